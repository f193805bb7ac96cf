"""THE renderer: messages to token ids with loss spans. Training, RL, evaluation and serving all call ``render``.

ChatML as Qwen writes it::

    <|im_start|>role\\n...<|im_end|>\\n

An image is ``<|vision_start|>``, ``<|image_pad|>`` repeated to its token count, ``<|vision_end|>``, with nothing
between it and the text around it. Control tokens are placed here and only here; text can never produce one.

The loss covers what the model itself writes: an assistant turn after its header, up to and including ``<|im_end|>``
(the newline after it is written by the template). Spans tile the tokens and tell thought, action and calls apart, so
that a rule can reweight one kind: stage 1 masks the bodies of thoughts and keeps their tags.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

import numpy as np

from mage_jax.agent.spans import TextKind, split_text
from mage_jax.agent.tokenizer import Tokenizer

DEFAULT_SYSTEM = "You are a helpful assistant."
ROLES = ("system", "user", "assistant")

Kind = Literal["prompt", "end"] | TextKind
# Weight of each kind's tokens in the supervised loss: all that the model writes.
KIND_WEIGHTS: dict[Kind, float] = {"prompt": 0.0, "end": 1.0, **dict.fromkeys(get_args(TextKind), 1.0)}


class RenderError(ValueError):
    """Messages that cannot be rendered; the text names the message and the field."""


class ImageCountError(RenderError):
    """The number of images, or the token count of one, does not fit the messages."""


@dataclasses.dataclass(frozen=True)
class Span:
    """Tokens ``start`` (included) to ``end`` (excluded) of one kind.

    Kinds: "prompt" (given to the model), "end" (the ``<|im_end|>`` by which it ends its turn), and those of the text
    that it writes (``spans.TextSpan``). A token has the kind of its first character: the newline that a full stop
    takes with it belongs to the sentence. ``message`` is the index in the given messages, -1 for the inserted system
    turn and for the generation prompt.
    """

    start: int
    end: int
    kind: Kind
    message: int


@dataclasses.dataclass(frozen=True)
class ImageSlot:
    """Where one image stands: ``count`` image_pad tokens from ``start`` on."""

    start: int
    count: int


@dataclasses.dataclass(frozen=True)
class Rendered:
    """One rendered conversation.

    Attributes:
      tokens: int32 [T].
      weights: float32 [T]; ``weights[t]`` is the loss weight of *token* t. The shift to next-token targets is done in
        packing, once.
      spans: tile [0, T) in order.
      image_slots: one per image, in order of appearance.
    """

    tokens: np.ndarray
    weights: np.ndarray
    spans: tuple[Span, ...]
    image_slots: tuple[ImageSlot, ...]


class _Writer:
    """Collects tokens. Text waits until a control token or a new kind follows, because Qwen's tokenizer sees the whole
    run between two control tokens at once ("user\\n" together with the question)."""

    def __init__(self, tokenizer: Tokenizer):
        self.tokenizer = tokenizer
        self.tokens: list[int] = []
        self.spans: list[Span] = []
        self.image_slots: list[ImageSlot] = []
        self._text: list[str] = []
        self._kind: Kind = "prompt"
        self._message = -1

    def begin(self, kind: Kind, message: int) -> None:
        self.flush()
        self._kind, self._message = kind, message

    def text(self, text: str) -> None:
        self._text.append(text)

    def assistant(self, text: str, message: int) -> None:
        """The body of an assistant turn: one run of tokens, each of its first character's kind."""
        self.begin("other", message)
        ids, starts = self.tokenizer.encode_with_starts(text)
        first = 0
        for span in split_text(text):
            last = bisect.bisect_left(starts, span.end, first)
            self._kind = span.kind
            self._append(ids[first:last])
            first = last

    def control(self, *ids: int) -> None:
        self.flush()
        self._append(ids)

    def image(self, count: int) -> None:
        special = self.tokenizer.special_ids
        self.control(special.vision_start)
        self.image_slots.append(ImageSlot(start=len(self.tokens), count=count))
        self._append([special.image_pad] * count)
        self._append([special.vision_end])

    def flush(self) -> None:
        if self._text:
            self._append(self.tokenizer.encode_text("".join(self._text)))
            self._text = []

    def _append(self, ids: Sequence[int]) -> None:
        start = len(self.tokens)
        self.tokens.extend(ids)
        end = len(self.tokens)
        last = self.spans[-1] if self.spans else None
        if last is not None and (last.kind, last.message) == (self._kind, self._message):
            self.spans[-1] = dataclasses.replace(last, end=end)
        elif end > start:
            self.spans.append(Span(start, end, self._kind, self._message))


def _items(message: Any, index: int) -> tuple[str, list[str | None]]:
    """(role, items) of one message; an item is a text, or None for an image."""
    where = f"messages[{index}]"
    if not isinstance(message, Mapping):
        raise RenderError(f"{where}: must be a mapping with role and content, got {type(message).__name__}")
    role = message.get("role")
    if role not in ROLES:
        raise RenderError(f"{where}.role: must be one of {', '.join(ROLES)}, got {role!r}")
    if role == "system" and index > 0:
        raise RenderError(f"{where}.role: a system turn must be the first message")
    content = message.get("content")
    if isinstance(content, str):
        return role, [content]
    if not isinstance(content, (list, tuple)):
        raise RenderError(f"{where}.content: must be a string or a list of items, got {type(content).__name__}")
    items: list[str | None] = []
    for i, item in enumerate(content):
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "text" and isinstance(item.get("text"), str):
            items.append(item["text"])
        elif kind == "image" and role != "assistant":
            items.append(None)
        elif kind == "image":
            raise RenderError(f"{where}.content[{i}]: an assistant turn cannot hold an image")
        else:
            raise RenderError(
                f'{where}.content[{i}]: needs {{"type": "text", "text": str}} or {{"type": "image"}}, got {item!r:.80}'
            )
    return role, items


def _kind_weights(changes: Mapping[Kind, float]) -> dict[Kind, float]:
    for kind, weight in changes.items():
        if kind not in KIND_WEIGHTS:
            raise RenderError(f"kind_weights: no kind {kind!r}; there are {', '.join(KIND_WEIGHTS)}")
        if not 0 <= weight < math.inf:
            raise RenderError(f"kind_weights[{kind!r}]: must be finite and not negative, got {weight!r}")
    return {**KIND_WEIGHTS, **changes}


def render(
    messages: Sequence[Mapping[str, Any]],
    *,
    tokenizer: Tokenizer,
    image_token_counts: Sequence[int] = (),
    add_generation_prompt: bool = False,
    default_system: str | None = DEFAULT_SYSTEM,
    kind_weights: Mapping[Kind, float] = KIND_WEIGHTS,
) -> Rendered:
    """Renders a conversation.

    Args:
      messages: OpenAI shape: ``role`` (system, user, assistant) and ``content``, a string or a list of
        ``{"type": "text", "text": str}`` and ``{"type": "image"}`` items.
      tokenizer: with Qwen's control tokens.
      image_token_counts: visual tokens of each image, in order of appearance.
      add_generation_prompt: end with ``<|im_start|>assistant\\n``, for the model to go on.
      default_system: the system turn to insert when the first message is not one; None inserts nothing.
      kind_weights: loss weight of some kinds' tokens, such as ``{"think_body": 0.0}``; others keep ``KIND_WEIGHTS``.

    Returns:
      ``Rendered``. An assistant header is tokenised apart from its body, as in generation, where the body does not
      exist yet; so a body that begins with a newline trains exactly the tokens that are sampled.

    Raises:
      RenderError: no messages, an unknown role or item, a system turn that is not first, an unknown kind or a weight
        that is negative or not finite.
      ImageCountError: more or fewer images than counts, or a count below 1.
    """
    weight_of = _kind_weights(kind_weights)
    if not messages:
        raise RenderError("messages: is empty")
    parsed = [(index, *_items(message, index)) for index, message in enumerate(messages)]
    images = sum(item is None for _, _, items in parsed for item in items)
    if images != len(image_token_counts):
        raise ImageCountError(f"messages hold {images} images, but {len(image_token_counts)} token counts are given")
    for i, count in enumerate(image_token_counts):
        if count < 1:
            raise ImageCountError(f"image_token_counts[{i}]: must be positive, got {count}")
    if default_system is not None and parsed[0][1] != "system":
        parsed.insert(0, (-1, "system", [default_system]))

    special = tokenizer.special_ids
    writer = _Writer(tokenizer)
    counts = iter(image_token_counts)
    for index, role, items in parsed:
        writer.begin("prompt", index)
        writer.control(special.im_start)
        writer.text(f"{role}\n")
        if role == "assistant":
            writer.assistant("".join(items), index)
            writer.begin("end", index)
        else:
            for item in items:
                if item is None:
                    writer.image(int(next(counts)))
                else:
                    writer.text(item)
        writer.control(special.im_end)
        if role == "assistant":
            writer.begin("prompt", index)
        writer.text("\n")
    if add_generation_prompt:
        writer.begin("prompt", -1)
        writer.control(special.im_start)
        writer.text("assistant\n")
    writer.flush()

    weights = np.zeros(len(writer.tokens), np.float32)
    for span in writer.spans:
        weights[span.start : span.end] = weight_of[span.kind]
    return Rendered(
        tokens=np.asarray(writer.tokens, np.int32),
        weights=weights,
        spans=tuple(writer.spans),
        image_slots=tuple(writer.image_slots),
    )


def token_table(tokens: Sequence[int], weights: Sequence[float], *, tokenizer: Tokenizer) -> str:
    """Readable check of a loss mask: one line per token, ``weight | id | text``, with the text as a Python literal."""
    lines = (
        f"{float(weight):3.1f} | {int(token):6d} | {tokenizer.decode([token])!a}"
        for token, weight in zip(tokens, weights, strict=True)
    )
    return "\n".join(lines) + "\n"
