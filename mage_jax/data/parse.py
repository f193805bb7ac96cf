"""One JSON record, in either public shape, to one internal form.

Two shapes are read:

* OpenAI messages: ``{"id": ..., "messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"},
  {"type": "text", "text": "..."}]}, ...]}``; ``{"type": "image_url", "image_url": {"url": ...}}`` with a path, a
  ``file://`` URL or a base64 ``data:`` URI is accepted as well;
* ShareGPT / LLaVA: ``{"image": "a.png" or [...], "conversations": [{"from": "human", "value": "<image>\\n..."},
  {"from": "gpt", "value": "..."}]}``. In human turns each ``<image>`` stands for the next image; the newline with which
  that format separates it from the text (the one after it, or the one before it when it ends the turn) is dropped,
  since the chat template has none there. In gpt turns ``<image>`` is text.

Relative image paths start at the JSONL's folder. Absolute paths and ``..`` are allowed: a record is as trusted as the
code that reads it, and public sets use both. Web addresses are refused: training must not depend on a download.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import json
import os
import pathlib
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from mage_jax.data.image import ImageRef

IMAGE_PLACEHOLDER = "<image>"
_PLACEHOLDER = re.compile(r"<image>\n?|\n<image>\Z")
_SHAREGPT_ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
_ROLES = ("system", "user", "assistant")


class RecordError(ValueError):
    """A record cannot be used. The text is ``file:line: field: reason``."""


@dataclasses.dataclass(frozen=True)
class Record:
    """One training conversation.

    Attributes:
      id: unique in its record set.
      messages: what ``mage_jax.agent.render.render`` takes.
      images: in order of appearance in the messages.
      source_file, line: where it came from (line counts from 1).
    """

    id: str
    messages: tuple[dict[str, Any], ...]
    images: tuple[ImageRef, ...]
    source_file: str
    line: int

    @property
    def where(self) -> str:
        return f"{self.source_file}:{self.line}"


def default_id(source_file: str | os.PathLike[str], line: int) -> str:
    """The id of a record that names none: ``<file stem>:<line>``."""
    return f"{pathlib.Path(source_file).stem}:{line}"


def parse_record(raw: bytes | str, *, source_file: str, line: int) -> Record:
    """Parses one JSONL line. Image files are not opened.

    Raises:
      RecordError: an empty line, unreadable JSON, or a field that is missing or wrong (named). Nothing else.
    """
    return _Parser(source_file, line).record(raw)


class _Parser:
    """Carries the place of a record, so that every error can name it."""

    def __init__(self, source_file: str, line: int):
        self.source_file = source_file
        self.line = line
        self.images: list[ImageRef] = []

    def fail(self, field: str, reason: str) -> RecordError:
        return RecordError(f"{self.source_file}:{self.line}: {field}: {reason}")

    def record(self, raw: bytes | str) -> Record:
        try:
            text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
            if not text.strip():
                raise self.fail("line", "is empty; delete it")
            data = json.loads(text)
        except RecordError:
            raise
        except (ValueError, RecursionError) as error:
            raise self.fail("line", f"is not JSON ({error})") from error
        if not isinstance(data, dict):
            raise self.fail("line", f"must be a JSON object, got {type(data).__name__}")
        shapes = [key for key in ("messages", "conversations") if key in data]
        if len(shapes) != 1:
            raise self.fail("messages", f"needs exactly one of messages and conversations, got {shapes or 'neither'}")
        turns = data[shapes[0]]
        if not isinstance(turns, list) or not turns:
            raise self.fail(shapes[0], "must be a list of at least one turn")
        messages = self.openai(turns) if shapes[0] == "messages" else self.sharegpt(turns, data)
        self.check_roles(messages, shapes[0])
        return Record(
            id=self.record_id(data),
            messages=tuple(messages),
            images=tuple(self.images),
            source_file=self.source_file,
            line=self.line,
        )

    def record_id(self, data: dict[str, Any]) -> str:
        value = data.get("id")
        if value is None:
            return default_id(self.source_file, self.line)
        if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
            raise self.fail("id", f"must be a non-empty string or an integer, got {value!r:.80}")
        return self.text(str(value), "id")

    def text(self, value: Any, field: str) -> str:
        if not isinstance(value, str):
            raise self.fail(field, f"must be a string, got {type(value).__name__}")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise self.fail(field, f"holds a lone surrogate at character {error.start}") from None
        return value

    def check_roles(self, messages: list[dict[str, Any]], field: str) -> None:
        roles = [message["role"] for message in messages]
        if "system" in roles[1:]:
            raise self.fail(f"{field}[{roles.index('system', 1)}]", "a system turn must come first")
        if "assistant" not in roles:
            raise self.fail(field, "has no assistant turn, so there is nothing to learn from it")

    # OpenAI messages

    def openai(self, turns: list[Any]) -> list[dict[str, Any]]:
        messages = []
        for i, turn in enumerate(turns):
            field = f"messages[{i}]"
            if not isinstance(turn, Mapping):
                raise self.fail(field, f"must be an object, got {type(turn).__name__}")
            role = turn.get("role")
            if role not in _ROLES:
                raise self.fail(f"{field}.role", f"unknown role {role!r:.80}; known: {', '.join(_ROLES)}")
            content = turn.get("content")
            if isinstance(content, list):
                items = [self.item(item, f"{field}.content[{j}]", role) for j, item in enumerate(content)]
                messages.append({"role": role, "content": items})
            else:
                messages.append({"role": role, "content": self.text(content, f"{field}.content")})
        return messages

    def item(self, item: Any, field: str, role: str) -> dict[str, Any]:
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "text":
            return {"type": "text", "text": self.text(item.get("text"), f"{field}.text")}
        if kind not in ("image", "image_url"):
            raise self.fail(f"{field}.type", f"must be text, image or image_url, got {kind!r:.80}")
        if role == "assistant":
            raise self.fail(field, "an assistant turn cannot hold an image")
        value, name = item.get(kind), f"{field}.{kind}"
        if kind == "image_url" and isinstance(value, Mapping):
            value, name = value.get("url"), f"{name}.url"
        self.images.append(self.image(value, name))
        return {"type": "image"}

    # ShareGPT / LLaVA conversations

    def sharegpt(self, turns: list[Any], data: dict[str, Any]) -> list[dict[str, Any]]:
        value = data.get("image")
        paths = [] if value is None else value if isinstance(value, list) else [value]
        self.images = [self.image(path, f"image[{i}]") for i, path in enumerate(paths)]
        messages, placeholders = [], 0
        for i, turn in enumerate(turns):
            field = f"conversations[{i}]"
            if not isinstance(turn, Mapping):
                raise self.fail(field, f"must be an object, got {type(turn).__name__}")
            name = turn.get("from")
            role = _SHAREGPT_ROLES.get(name) if isinstance(name, str) else None
            if role is None:
                raise self.fail(f"{field}.from", f"unknown role {name!r:.80}; known: {', '.join(_SHAREGPT_ROLES)}")
            text = self.text(turn.get("value"), f"{field}.value")
            if role == "user" and IMAGE_PLACEHOLDER in text:
                placeholders += text.count(IMAGE_PLACEHOLDER)
                messages.append({"role": role, "content": _split_placeholders(text)})
            else:
                messages.append({"role": role, "content": text})
        if placeholders != len(self.images):
            raise self.fail(
                "image", f"{len(self.images)} images, but {placeholders} {IMAGE_PLACEHOLDER} in human turns"
            )
        return messages

    # images

    def image(self, value: Any, field: str) -> ImageRef:
        value = self.text(value, field)
        if value.startswith("data:"):
            return self.data_uri(value, field)
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", value):
            try:
                url = urlsplit(value)
            except ValueError as error:
                raise self.fail(field, f"is not a URL ({error})") from None
            if url.scheme.lower() != "file" or url.netloc not in ("", "localhost"):
                raise self.fail(field, f"must be a local file, got {value!r:.80}; download it and give its path")
            value = unquote(url.path, errors="replace")
        if not value or "\0" in value:
            raise self.fail(field, f"is not a path: {value!r:.80}")
        return ImageRef(os.path.join(os.path.dirname(self.source_file), value))

    def data_uri(self, value: str, field: str) -> ImageRef:
        header, comma, payload = value.partition(",")
        if not comma or not header.endswith(";base64"):
            raise self.fail(field, "a data URI must be data:image/...;base64,...")
        try:
            encoded = base64.b64decode(payload, validate=True)
        except (binascii.Error, ValueError) as error:
            raise self.fail(field, f"is not base64 ({error})") from None
        return ImageRef(f"{self.source_file}:{self.line}:{field}", encoded)


def _split_placeholders(text: str) -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = []
    for i, piece in enumerate(_PLACEHOLDER.split(text)):
        if i:
            items.append({"type": "image"})
        if piece:
            items.append({"type": "text", "text": piece})
    return items
