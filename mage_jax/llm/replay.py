"""Cassettes: recorded answers in a JSONL file, found by the canonical hash of the request.

A line is ``{"key", "purpose", "request", "reply"}``. ``request`` is the canonical request of ``client``: images only by
hash, no headers, no token. With ``image_dir`` the pictures are kept beside it, one file per hash.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from mage_jax.llm.client import (
    Client,
    InvalidRequest,
    LLMError,
    Reply,
    Request,
    Usage,
    canonical_json,
    canonical_request,
    decode_image,
    request_key,
)
from mage_jax.llm.jsonl import AppendLog

Mode = Literal["record", "replay", "replay_only"]
MODES = ("record", "replay", "replay_only")
_REPLY_FIELDS = ("text", "model", "finish_reason", "id")


class CassetteError(LLMError):
    """A cassette cannot be used: a damaged line, an unknown mode, or nothing to record from."""


class CassetteMiss(CassetteError):
    """The request is not in the cassette and must not be sent; the text says what is nearest."""


@dataclasses.dataclass(frozen=True)
class _Entry:
    purpose: str
    request: dict[str, Any]
    reply: Reply


class CassetteClient:
    """Records and replays another client's answers.

    Modes:
      record: always ask, and record; a newer answer to the same request wins.
      replay: answer from the cassette; ask and record only what is missing.
      replay_only: answer from the cassette; a missing request is a ``CassetteMiss``. Never writes; needs no client.

    Raises (on construction):
      CassetteError: unknown mode, no client to ask, no file to replay only from, or a line that does not hold what its
        key says (file and line named).
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        inner: Client | None = None,
        *,
        mode: Mode = "replay",
        image_dir: str | os.PathLike[str] | None = None,
    ):
        self._log = AppendLog(path)
        self.path = self._log.path
        self.mode = mode
        if mode not in MODES:
            raise CassetteError(f"{self.path}: mode {mode!r} is not one of {', '.join(MODES)}")
        if mode != "replay_only" and inner is None:
            raise CassetteError(f"{self.path}: mode {mode!r} needs a client to ask")
        if mode == "replay_only" and not self.path.is_file():
            raise CassetteError(f"{self.path}: no such cassette; record it first (mode 'record' or 'replay')")
        self._inner = inner
        self._image_dir = None if image_dir is None else Path(image_dir)
        self._entries = {row["key"]: self._entry(row, line) for line, row in self._checked_rows()}
        self._guard = threading.Lock()
        self._key_locks: dict[str, threading.Lock] = defaultdict(threading.Lock)

    def __len__(self) -> int:
        return len(self._entries)

    def _checked_rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        for line, row in self._log.rows():
            if set(row) != {"key", "purpose", "request", "reply"} or not isinstance(row["key"], str):
                raise CassetteError(f"{self.path}:{line}: needs exactly key, purpose, request and reply")
            if hashlib.sha256(canonical_json(row["request"]).encode()).hexdigest() != row["key"]:
                raise CassetteError(f"{self.path}:{line}: key does not fit its request; record the call again")
            yield line, row

    def _entry(self, row: dict[str, Any], line: int) -> _Entry:
        try:
            reply = Reply(
                **{name: row["reply"][name] for name in _REPLY_FIELDS},
                usage=Usage(**row["reply"]["usage"]),
                replayed=True,
            )
        except (KeyError, TypeError, InvalidRequest) as error:
            raise CassetteError(f"{self.path}:{line}: reply: {type(error).__name__}: {error}") from None
        if not isinstance(row["purpose"], str) or not isinstance(row["request"], dict):
            raise CassetteError(f"{self.path}:{line}: purpose must be a string and request an object")
        return _Entry(row["purpose"], row["request"], reply)

    def complete(self, request: Request) -> Reply:
        """Answers from the cassette or the inner client, as the mode says.

        Raises:
          CassetteMiss: mode ``replay_only`` and nothing recorded.
          LLMError: what the inner client raises; failures are not recorded.
        """
        key = request_key(request)
        with self._guard:
            lock = self._key_locks[key]
        with lock:  # two threads with one question pay once
            if self.mode != "record" and key in self._entries:
                return self._entries[key].reply
            if self._inner is None or self.mode == "replay_only":
                raise CassetteMiss(self._miss(request))
            reply = self._inner.complete(request)
            self._record(key, request, reply)
            return reply

    def _record(self, key: str, request: Request, reply: Reply) -> None:
        if self._image_dir is not None:
            for message in request.messages:
                for image in message.images:
                    _store_image(self._image_dir, image)
        row = {
            "key": key,
            "purpose": request.purpose,
            "request": canonical_request(request),
            "reply": {name: getattr(reply, name) for name in _REPLY_FIELDS}
            | {"usage": dataclasses.asdict(reply.usage)},
        }
        self._log.append(row)
        kept = reply.replace(parsed=None, cost_usd=None, replayed=True, attempts=1)
        self._entries[key] = _Entry(request.purpose, row["request"], kept)

    def _miss(self, request: Request) -> str:
        head = f"{self.path}: no answer recorded for purpose {request.purpose!r} (key {request_key(request)[:12]})"
        entries = list(self._entries.values())
        if not entries:
            return f"{head}; the cassette is empty"
        purposes = sorted({entry.purpose for entry in entries})
        nearest = (difflib.get_close_matches(request.purpose, purposes, n=1, cutoff=0.0) or purposes[:1])[0]
        wanted = canonical_request(request)
        differing = min(
            ([name for name in wanted if wanted[name] != e.request.get(name)] for e in entries if e.purpose == nearest),
            key=len,
        )
        return (
            f"{head}; the nearest recorded purpose is {nearest!r}, whose closest request differs in "
            f"{', '.join(differing)}; record it (mode 'replay')"
        )


def _store_image(folder: Path, image: bytes | str) -> None:
    kind, data = decode_image(image)
    path = folder / f"{hashlib.sha256(data).hexdigest()}.{kind.removeprefix('image/')}"
    if path.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    temporary = folder / f".{path.name}.{os.getpid()}-{threading.get_ident()}"
    try:
        with open(temporary, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
