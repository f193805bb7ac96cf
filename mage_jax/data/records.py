"""Records in JSONL files, read by line at random.

Opening a file reads it once, front to back: it notes where each line starts, checks every line's structure and that no
id is used twice, and keeps nothing but the offsets (8 bytes a record). A record is parsed again when it is asked for.
Image files are looked at only then, so that opening a large set does not touch a million files.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence

import numpy as np

from mage_jax.data.parse import Record, RecordError, parse_record


class _JsonlFile:
    """Offsets of one file's lines. Every read opens the file: nothing to share, lock, close or lose in a worker."""

    def __init__(self, path: str):
        self.path = path
        self.offsets = np.zeros(1, np.int64)
        self.digest = b""

    def scan(self) -> Iterator[Record]:
        """Yields every record of the file while building the offsets and a digest of the contents."""
        offsets = [0]
        digest = hashlib.blake2b(digest_size=16)
        try:
            with open(self.path, "rb") as file:
                for number, raw in enumerate(file, start=1):
                    offsets.append(offsets[-1] + len(raw))
                    digest.update(raw)
                    yield parse_record(raw, source_file=self.path, line=number)
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        self.offsets = np.asarray(offsets, np.int64)
        self.digest = digest.digest()

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def read(self, index: int) -> Record:
        start, end = (int(v) for v in self.offsets[index : index + 2])
        try:
            with open(self.path, "rb") as file:
                file.seek(start)
                raw = file.read(end - start)
        except OSError as error:
            raise RecordError(f"{self.path}: cannot be read ({error.strerror or error})") from error
        if len(raw) != end - start:
            raise RecordError(f"{self.path}:{index + 1}: line: the file became shorter since it was opened")
        return parse_record(raw, source_file=self.path, line=index + 1)


class RecordSet(Sequence[Record]):
    """All records of one or more JSONL files, in file and line order. Picklable; safe to share by threads.

    Raises (on opening and on indexing):
      RecordError: an unreadable file, or a bad record, or an id used twice; file, line and field are named.
    """

    def __init__(self, paths: Sequence[str | os.PathLike[str]]):
        if isinstance(paths, (str, bytes, os.PathLike)):
            paths = [paths]  # one file, not its letters
        self._files = [_JsonlFile(os.fspath(path)) for path in paths]
        # Ids are kept as 16-byte digests while opening: a set of a million long names would cost hundreds of MB.
        seen: dict[bytes, tuple[int, int]] = {}  # to (file, line)
        for f, file in enumerate(self._files):
            for record in file.scan():
                key = hashlib.blake2b(record.id.encode(), digest_size=16).digest()
                if key in seen:
                    first_file, first_line = seen[key]
                    raise RecordError(
                        f"{record.where}: id: {record.id!r} is already used by "
                        f"{self._files[first_file].path}:{first_line}; ids must be unique"
                    )
                seen[key] = (f, record.line)
        self._starts = np.cumsum([0] + [len(file) for file in self._files])
        digests = b"".join(file.digest for file in self._files)
        self.fingerprint = hashlib.blake2b(digests, digest_size=16).hexdigest()  # changes with any byte of any file

    @property
    def paths(self) -> list[str]:
        return [file.path for file in self._files]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Record:
        if not -len(self) <= index < len(self):
            raise IndexError(f"record {index} of {len(self)}")
        index %= len(self)
        file = int(np.searchsorted(self._starts, index, side="right")) - 1
        return self._files[file].read(index - int(self._starts[file]))
