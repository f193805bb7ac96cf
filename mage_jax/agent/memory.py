"""Working memory: the messages that the model sees at turn t, made from the task and the turns before.

The model card keeps the newest responses whole and folds older turns to their one-line actions right after the system
prompt. Turn t of the default reading (3 responses, 3 screenshots)::

    system
    user       [screenshot]? Task: ...
               Previous actions:
               Step 1: {action of turn 1} ... Step t-4: {action of turn t-4}
    assistant  response t-3         user  what answered it
    assistant  response t-2         user  what answered it
    assistant  response t-1         user  what answered it

Responses stand as they were sampled, thoughts included. The answer to a ``computer_use`` response is a screenshot, to
a ``bash`` response the text of its outputs. The first screenshot, taken before turn 1, opens the first user turn as
long as nothing is folded.

Screenshots: the newest ``images_to_keep`` of those that the window shows. One that answered a folded turn is gone with
it, unless it is the newest of all: then it opens the first user turn, so that the model never acts blind.

Pure: equal arguments give equal messages. Nothing here looks into a screenshot; a reference is any value.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from mage_jax.agent.calls import FUNCTIONS

FOLDINGS = ("per_turn", "pairwise")


class WindowError(ValueError):
    """A turn or setting that working memory cannot use; the text names the turn and the field."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """How much of an episode the model sees. The first two defaults are the card's evaluation flags.

    Attributes:
      history_n: complete responses kept, beside the one being written.
      images_to_keep: most screenshots shown, the current one included.
      folding: "per_turn" folds each turn that leaves the window. "pairwise" (the other reading of the card's word)
        folds two at a time, so that the first user turn changes every second turn only: history_n or history_n + 1
        responses are kept.
      keep_opening_view: also keep, if a slot is free, the screenshot that the oldest kept response acted on when a
        folded turn brought it. Not reported; makes no difference as long as every turn brings a screenshot.
      omitted_screenshot: text that stands for the screenshot of a kept turn beyond ``images_to_keep``. Not reported;
        with the defaults of "per_turn" there is none.
    """

    history_n: int = 3
    images_to_keep: int = 3
    folding: Literal["per_turn", "pairwise"] = "per_turn"
    keep_opening_view: bool = False
    omitted_screenshot: str = "(screenshot omitted)"

    def __post_init__(self):
        for name in ("history_n", "images_to_keep"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise WindowError(f"MemoryConfig.{name}: must be a positive integer, got {value!r}")
        if self.folding not in FOLDINGS:
            raise WindowError(f"MemoryConfig.folding: must be one of {', '.join(FOLDINGS)}, got {self.folding!r}")
        if not isinstance(self.omitted_screenshot, str) or not self.omitted_screenshot:
            raise WindowError("MemoryConfig.omitted_screenshot: must be a text, not empty")

    def folded_turns(self, past: int) -> int:
        """How many of ``past`` turns are folded, the oldest first. Never leaves fewer than ``history_n`` whole."""
        beyond = max(0, past - self.history_n)
        return beyond if self.folding == "per_turn" else beyond - beyond % 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class PastTurn:
    """A turn that is over: what the model wrote and what answered it.

    Attributes:
      response: as sampled, without ``<|im_end|>``.
      action: sentence of its Action line, without "Action:".
      channel: "computer_use" or "bash".
      screenshot: reference of the one that answered it; any value but None. computer_use only, required.
      outputs: of its commands, in order (stdout and stderr merged). bash only, at least one; may be empty texts.
    """

    response: str
    action: str
    channel: Literal["computer_use", "bash"]
    screenshot: Any = None
    outputs: tuple[str, ...] = ()

    def __post_init__(self):
        if self.channel not in FUNCTIONS:
            raise WindowError(f"PastTurn.channel: must be one of {', '.join(FUNCTIONS)}, got {self.channel!r}")
        if not self.action.strip() or "\n" in self.action:
            raise WindowError(f"PastTurn.action: must be one line, not empty, got {self.action!r:.80}")
        if (self.screenshot is not None) != (self.channel == "computer_use"):
            raise WindowError(f"PastTurn.screenshot: computer_use has one and bash none, in a {self.channel} turn")
        if isinstance(self.outputs, str) or bool(self.outputs) != (self.channel == "bash"):
            raise WindowError(
                f"PastTurn.outputs: bash has a tuple of texts and computer_use none, in a {self.channel} turn"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """What the model sees at turn ``turn``. Turns and screenshots are numbered from 1 as in the protocol.

    Attributes:
      messages: what ``render.render`` takes; image items are bare ``{"type": "image"}``.
      screenshots: references, one per image item, in order.
      shots: for each of them the turn at which it was new (1 is the one before turn 1).
      folded, retained: turn numbers, 1 to turn - 1 together, in order.
    """

    turn: int
    messages: tuple[dict[str, Any], ...]
    screenshots: tuple[Any, ...]
    shots: tuple[int, ...]
    folded: tuple[int, ...]
    retained: tuple[int, ...]


def build_window(
    task: str,
    *,
    first_screenshot: Any,
    turns: Sequence[PastTurn],
    system_prompt: str,
    config: MemoryConfig = MemoryConfig(),
) -> Window:
    """The messages for turn ``len(turns) + 1``.

    Args:
      task: the instruction, as the user gave it.
      first_screenshot: reference of the screenshot before turn 1; any value but None.
      turns: all turns so far, from turn 1 on. Responses that were never executed (malformed ones) are no turns.
      system_prompt: see ``prompt.load_system_prompt``.
      config: the reading of the card.

    Raises:
      WindowError: no first screenshot.
    """
    if first_screenshot is None:
        raise WindowError("first_screenshot: the model never acts without a view of the screen, got None")
    cut = config.folded_turns(len(turns))
    seen = {1: first_screenshot}
    seen |= {number + 1: turn.screenshot for number, turn in enumerate(turns, 1) if turn.channel == "computer_use"}
    # Shot n answered turn n - 1; the first one goes with the first fold.
    candidates = [shot for shot in seen if shot > cut + 1]
    opening_view = max(shot for shot in seen if shot <= cut + 1)
    if cut == 0 or config.keep_opening_view or not candidates:
        candidates.insert(0, opening_view)
    shown = candidates[-config.images_to_keep :]

    opening = [{"type": "image"}] if shown[0] <= cut + 1 else []
    opening.append({"type": "text", "text": "\n".join([f"Task: {task}", *_folded_lines(turns[:cut])])})
    messages = [{"role": "system", "content": system_prompt}, {"role": "user", "content": opening}]
    for number, turn in enumerate(turns[cut:], cut + 1):
        messages.append({"role": "assistant", "content": turn.response})
        messages.append({"role": "user", "content": _answer(turn, is_shown=number + 1 in shown, config=config)})
    return Window(
        turn=len(turns) + 1,
        messages=tuple(messages),
        screenshots=tuple(seen[shot] for shot in shown),
        shots=tuple(shown),
        folded=tuple(range(1, cut + 1)),
        retained=tuple(range(cut + 1, len(turns) + 1)),
    )


def _folded_lines(turns: Sequence[PastTurn]) -> list[str]:
    if not turns:
        return []
    return ["Previous actions:", *(f"Step {number}: {turn.action}" for number, turn in enumerate(turns, 1))]


def _answer(turn: PastTurn, *, is_shown: bool, config: MemoryConfig) -> list[dict[str, str]]:
    if turn.channel == "bash":
        # One user turn for all outputs, as Qwen's template joins consecutive tool messages.
        text = "\n".join(f"<tool_response>\n{output}\n</tool_response>" for output in turn.outputs)
        return [{"type": "text", "text": text}]
    if is_shown:
        return [{"type": "image"}]
    return [{"type": "text", "text": config.omitted_screenshot}]
