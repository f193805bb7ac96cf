"""Pictures on disk by content: ``<root>/<first two hex digits>/<sha256 of the file's bytes>``.

The same screenshot is stored once however many turns show it. Files keep their bytes and format (PNG, JPEG, ...); the
name has no suffix because the hash does not decide one.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import re
import threading

_SHA256 = re.compile(r"[0-9a-f]{64}")


class ImageStoreError(ValueError):
    """A picture that the store does not hold, or holds damaged; the text names it."""


def is_sha256(text: str) -> bool:
    """Whether text is 64 lower-case hexadecimal digits."""
    return _SHA256.fullmatch(text) is not None


class ImageStore:
    """A folder of pictures by hash. Safe for several writers: files appear whole, by rename, and never change."""

    def __init__(self, root: str | os.PathLike[str]):
        self.root = pathlib.Path(root)

    def path(self, sha256: str) -> pathlib.Path:
        """Where a picture of this hash lies, or would lie.

        Raises:
          ImageStoreError: not a hash (which also keeps paths from a file inside the store).
        """
        if not is_sha256(sha256):
            raise ImageStoreError(f"{sha256!r:.80} is not a sha256 of 64 lower-case hex digits")
        return self.root / sha256[:2] / sha256

    def put(self, encoded: bytes) -> str:
        """Stores the bytes of a picture file and returns their sha256. Storing twice is free; damage is repaired."""
        sha256 = hashlib.sha256(encoded).hexdigest()
        path = self.path(sha256)
        if path.is_file() and path.stat().st_size == len(encoded):
            return sha256
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{sha256}.{os.getpid()}.{threading.get_ident()}.tmp")
        try:
            temporary.write_bytes(encoded)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
        return sha256

    def get(self, sha256: str) -> bytes:
        """The bytes of a picture, hashed again.

        Raises:
          ImageStoreError: missing, unreadable, or its bytes have another hash.
        """
        try:
            encoded = self.path(sha256).read_bytes()
        except OSError as error:
            raise ImageStoreError(f"image {sha256} is not in {self.root} ({error.strerror or error})") from error
        if hashlib.sha256(encoded).hexdigest() != sha256:
            raise ImageStoreError(f"image {sha256} in {self.root} is damaged; store it again")
        return encoded

    def __contains__(self, sha256: str) -> bool:
        return self.path(sha256).is_file()
