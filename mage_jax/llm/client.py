"""What every language-model backend takes and gives back.

A backend is anything with ``complete(Request) -> Reply``. Backends answer; wrappers with the same method add one thing
each: a cassette (``replay``), a cost record (``ledger``), checked JSON (``structured``). They stack in this order::

    StructuredClient(LedgerClient(CassetteClient("calls.jsonl", HttpClient(config)), ledger))

so that the record sees every call, the invalid ones too, and knows which ones were only replayed.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Mapping
from typing import Any, Literal, Protocol, runtime_checkable

ROLES = ("system", "user", "assistant")
PHASES = ("authoring", "recurring")
FINISH_REASONS = ("stop", "length", "content_filter")
KEY_VERSION = 1  # part of every key: raise it when the canonical form changes

Phase = Literal["authoring", "recurring"]

_DATA_URI = re.compile(r"data:(image/[a-z0-9.+-]+);base64,", re.IGNORECASE)


class LLMError(RuntimeError):
    """A call could not be answered. Subclasses say where it went wrong."""


class InvalidRequest(LLMError, ValueError):
    """A message, request, usage or reply is built from wrong values; the text names the field."""


def _require(ok: bool, field: str, reason: str) -> None:
    if not ok:
        raise InvalidRequest(f"{field}: {reason}")


def _check_text(value: Any, field: str) -> None:
    _require(isinstance(value, str), field, f"must be a string, got {type(value).__name__}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{field}: holds a lone surrogate at character {error.start}") from None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def canonical_json(value: Any) -> str:
    """One spelling for equal JSON values: keys sorted, no spaces, ASCII only. NaN and infinities raise ValueError."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)


def _json_copy(value: Any, field: str) -> Any:
    """A plain copy that later changes by the caller do not reach, and that hashes the same after a trip to disk."""
    try:
        return json.loads(canonical_json(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"{field}: is not JSON ({error})") from None


def image_type(data: bytes) -> str | None:
    """The MIME type by the first bytes: PNG, JPEG, GIF or WebP; None for anything else."""
    if data.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if data.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if data.startswith((b"GIF87a", b"GIF89a")):
        return "image/gif"
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "image/webp"
    return None


def decode_image(image: bytes | str) -> tuple[str, bytes]:
    """(MIME type, encoded bytes) of an image given as file contents or as a base64 ``data:image/...`` URI.

    Raises:
      InvalidRequest: another kind of text (a web address, a path), broken base64, or bytes of an unknown format.
    """
    if isinstance(image, bytes):
        kind = image_type(image)
        _require(kind is not None, "images", f"bytes are not PNG, JPEG, GIF or WebP (they start {image[:8]!r})")
        return str(kind), image
    _require(isinstance(image, str), "images", f"must be bytes or a data URI, got {type(image).__name__}")
    match = _DATA_URI.match(image)
    _require(
        match is not None, "images", f"must be data:image/...;base64,..., got {image[:40]!r}; send the file's bytes"
    )
    assert match is not None
    try:
        data = base64.b64decode(image[match.end() :], validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"images: is not base64 ({error})") from None
    _require(bool(data), "images", "is empty")
    return match[1].lower(), data


def data_uri(image: bytes | str) -> str:
    """The ``data:`` URI of an image in either form."""
    kind, data = decode_image(image)
    return f"data:{kind};base64,{base64.b64encode(data).decode('ascii')}"


@dataclasses.dataclass(frozen=True)
class Message:
    """One message. The images stand before the text, in order.

    Attributes:
      role: system, user or assistant.
      text: may be empty only beside an image.
      images: file contents (PNG, JPEG, GIF, WebP) or base64 data URIs; user messages only.
    """

    role: str
    text: str
    images: tuple[bytes | str, ...] = ()

    def __post_init__(self) -> None:
        _require(self.role in ROLES, "Message.role", f"{self.role!r} is not one of {', '.join(ROLES)}")
        _check_text(self.text, "Message.text")
        _require(isinstance(self.images, tuple), "Message.images", "must be a tuple")
        _require(bool(self.text or self.images), "Message.text", "is empty and there is no image")
        _require(not self.images or self.role == "user", "Message.images", f"a {self.role} message cannot hold images")
        for image in self.images:
            decode_image(image)


@dataclasses.dataclass(frozen=True)
class Request:
    """One call.

    Attributes:
      messages: at least one.
      model: the name that the endpoint and the price table know.
      max_tokens: upper limit of completion tokens.
      temperature: 0 asks for the most likely answer.
      seed: sent to the endpoint and part of the key: ask the same question with other seeds to get several answers.
      schema: JSON schema (the subset of ``structured``) of the object to answer with, or None for free text.
      purpose: what the call is for, such as ``rationale`` or ``forge/judge``; groups the cost records.
      phase: ``authoring`` (paid once per skill) or ``recurring`` (paid per task or step).
      labels: further names for the cost records (round, stage, skill, task).

    ``purpose``, ``phase`` and ``labels`` are bookkeeping: they are never sent and are not part of ``request_key``.
    """

    messages: tuple[Message, ...]
    model: str
    purpose: str
    max_tokens: int = 1024
    temperature: float = 0.0
    seed: int | None = None
    schema: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)
    phase: Phase = "recurring"
    labels: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        ok = isinstance(self.messages, tuple) and all(isinstance(m, Message) for m in self.messages)
        _require(ok and bool(self.messages), "Request.messages", "must be a tuple of at least one Message")
        for name in ("model", "purpose"):
            _check_text(getattr(self, name), f"Request.{name}")
            _require(bool(getattr(self, name).strip()), f"Request.{name}", "is empty")
        _require(_is_int(self.max_tokens) and self.max_tokens > 0, "Request.max_tokens", "must be a positive integer")
        number = isinstance(self.temperature, (int, float)) and not isinstance(self.temperature, bool)
        _require(number and 0 <= self.temperature <= 2, "Request.temperature", f"not in [0, 2]: {self.temperature!r}")
        object.__setattr__(self, "temperature", float(self.temperature))  # 0 and 0.0 are the same request
        _require(self.seed is None or _is_int(self.seed), "Request.seed", "must be an integer or None")
        _require(self.phase in PHASES, "Request.phase", f"{self.phase!r} is not one of {', '.join(PHASES)}")
        if self.schema is not None:
            _require(isinstance(self.schema, Mapping), "Request.schema", "must be a mapping or None")
            object.__setattr__(self, "schema", _json_copy(dict(self.schema), "Request.schema"))
        _require(isinstance(self.labels, Mapping), "Request.labels", "must be a mapping")
        for name, value in self.labels.items():
            _check_text(name, "Request.labels")
            _check_text(value, f"Request.labels[{name!r}]")
        object.__setattr__(self, "labels", dict(self.labels))

    def replace(self, **changes: Any) -> Request:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class Usage:
    """Token counts as the endpoint bills them.

    Attributes:
      prompt: all prompt tokens, the cached ones included.
      cached_prompt: those of ``prompt`` that the endpoint read from its cache.
      completion: written tokens, hidden reasoning included.
    """

    prompt: int
    cached_prompt: int
    completion: int

    def __post_init__(self) -> None:
        for name in ("prompt", "cached_prompt", "completion"):
            value = getattr(self, name)
            _require(_is_int(value) and value >= 0, f"Usage.{name}", f"must be a count, got {value!r}")
        _require(self.cached_prompt <= self.prompt, "Usage.cached_prompt", f"exceeds prompt ({self.prompt})")

    @property
    def uncached_prompt(self) -> int:
        return self.prompt - self.cached_prompt

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompt + other.prompt,
            self.cached_prompt + other.cached_prompt,
            self.completion + other.completion,
        )


@dataclasses.dataclass(frozen=True)
class Reply:
    """One answer.

    Attributes:
      text: as written by the model.
      usage: tokens; of all calls where ``attempts`` > 1.
      model: the name that the endpoint reports, often more exact than the requested one.
      finish_reason: ``stop``, ``length`` (cut at ``max_tokens``) or ``content_filter``.
      parsed: the checked JSON object; filled by ``StructuredClient`` when the request has a schema, else None.
      cost_usd: US dollars; filled by ``LedgerClient``; None when the model is unpriced or nobody counted.
      replayed: True when nothing was paid now: the answer comes from a cassette.
      attempts: calls made for this answer (re-asks after invalid JSON).
      id: the endpoint's own name of the call, or "".
    """

    text: str
    usage: Usage
    model: str
    finish_reason: str
    parsed: Any = dataclasses.field(default=None, hash=False)
    cost_usd: float | None = None
    replayed: bool = False
    attempts: int = 1
    id: str = ""

    def __post_init__(self) -> None:
        for name in ("text", "model", "id"):
            _check_text(getattr(self, name), f"Reply.{name}")
        known = self.finish_reason in FINISH_REASONS
        _require(known, "Reply.finish_reason", f"{self.finish_reason!r} is not one of {', '.join(FINISH_REASONS)}")
        cost = self.cost_usd
        _require(cost is None or (math.isfinite(cost) and cost >= 0), "Reply.cost_usd", f"must be >= 0, got {cost!r}")

    def replace(self, **changes: Any) -> Reply:
        return dataclasses.replace(self, **changes)


@runtime_checkable
class Client(Protocol):
    """A backend, or a wrapper around one. Safe to call from several threads."""

    def complete(self, request: Request) -> Reply:
        """Answers one request or raises ``LLMError``."""
        ...


def canonical_request(request: Request) -> dict[str, Any]:
    """What decides the answer, as plain JSON: images by SHA-256 of their contents, no bookkeeping, no secrets."""
    return {
        "version": KEY_VERSION,
        "model": request.model,
        "messages": [
            {
                "role": message.role,
                "text": message.text,
                "images": [hashlib.sha256(decode_image(image)[1]).hexdigest() for image in message.images],
            }
            for message in request.messages
        ],
        "max_tokens": request.max_tokens,
        "temperature": request.temperature,
        "seed": request.seed,
        "schema": request.schema,
    }


def request_key(request: Request) -> str:
    """SHA-256 (64 hex digits) of the canonical request. The order of keys in the schema does not matter."""
    return hashlib.sha256(canonical_json(canonical_request(request)).encode("ascii")).hexdigest()
