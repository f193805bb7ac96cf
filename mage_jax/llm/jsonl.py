"""An append-only JSONL file that survives a killed writer and serves several processes.

A line counts when its newline is on the disk. A writer that dies in the middle leaves a last line without one; the next
append cuts it off (and logs that), and a reader leaves it out. Anything else that is not JSON is damage by other hands
and an error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mage_jax.llm.client import LLMError

_LOG = logging.getLogger(__name__)
_BLOCK = 64 * 1024


class JsonlError(LLMError):
    """A line of an append-only file is not a JSON object, or the file cannot be read or written."""


class AppendLog:
    """One file of JSON objects. Appends are whole lines, flushed to the disk before ``append`` returns.

    Attributes:
      path: the file; its folder is made on the first append.
      torn_bytes: bytes of unfinished last lines that this object has cut or left out so far.
    """

    def __init__(self, path: str | os.PathLike[str]):
        self.path = Path(path)
        self.torn_bytes = 0
        self._lock = threading.Lock()  # flock is per open file, but a short in-process queue is cheaper

    def append(self, row: Mapping[str, Any]) -> None:
        """Adds one line.

        Raises:
          JsonlError: the row is not JSON, or the file cannot be written (disk full, no permission).
        """
        try:
            data = (json.dumps(row, ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n").encode()
        except (TypeError, ValueError) as error:
            raise JsonlError(f"{self.path}: the row to append is not JSON ({error})") from None
        with self._lock:
            try:
                self._write(data)
            except OSError as error:
                raise JsonlError(f"{self.path}: cannot append ({error.strerror or error})") from error

    def _write(self, data: bytes) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        new = not self.path.exists()
        handle = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = self._cut_torn_line(handle)
            try:
                while data:
                    data = data[os.write(handle, data) :]
                os.fsync(handle)
            except BaseException:
                with contextlib.suppress(OSError):
                    os.ftruncate(handle, size)  # a full disk must not leave half a line
                raise
        finally:
            os.close(handle)  # also releases the lock
        if new:
            folder = os.open(self.path.parent, os.O_RDONLY)  # the name of a new file must survive as well
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def _cut_torn_line(self, handle: int) -> int:
        """Shortens the file to its last newline. Returns the size."""
        size = end = os.fstat(handle).st_size
        if size == 0 or os.pread(handle, 1, size - 1) == b"\n":
            return size
        keep = 0
        while end > 0:
            start = max(0, end - _BLOCK)
            newline = os.pread(handle, end - start, start).rfind(b"\n")
            if newline >= 0:
                keep = start + newline + 1
                break
            end = start
        os.ftruncate(handle, keep)
        self._torn(size - keep, "cut off")
        return keep

    def _torn(self, count: int, what: str) -> None:
        self.torn_bytes += count
        _LOG.warning(
            "%s: unfinished last line of %d bytes %s (a writer was killed or is at work)", self.path, count, what
        )

    def rows(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Yields (line number from 1, object) of the complete lines; nothing for an absent file. Never writes.

        Raises:
          JsonlError: a complete line is not a JSON object (file and line are named), or the file cannot be read.
        """
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, start=1):
                    if not line.endswith(b"\n"):
                        self._torn(len(line), "left out")
                        return
                    yield number, self._parse(line, number)
        except FileNotFoundError:
            return
        except OSError as error:
            raise JsonlError(f"{self.path}: cannot be read ({error.strerror or error})") from error

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise JsonlError(f"{self.path}:{number}: is not JSON ({error}); restore or delete the line") from None
        if not isinstance(row, dict):
            raise JsonlError(f"{self.path}:{number}: must be a JSON object, got {type(row).__name__}")
        return row
