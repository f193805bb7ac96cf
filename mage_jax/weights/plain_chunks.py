"""Uncompressed zarr3 arrays as byte ranges of files.

Where chunks divide an array into contiguous pieces and nothing encodes them, a chunk file holds the array's bytes as
they are, and a checkpoint tensor (one layer of a stack, or a whole weight) is a byte range of such files. Converting is
then copying ranges between files, which the kernel does without passing through this process.
"""

from __future__ import annotations

import errno
import itertools
import math
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np

CHUNK_BYTES = 64 << 20  # largest chunk written
SMALL_BYTES = 1 << 20  # a stack of vectors up to this size is one chunk: fewer files to open on every host
CODECS = [{"name": "bytes", "configuration": {"endian": "little"}}]
_NO_KERNEL_COPY = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
_BUFFER = 8 << 20


def chunk_shape(shape: tuple[int, ...], dtype: np.dtype, *, stacked: bool) -> tuple[int, ...]:
    """One layer of a stacked parameter; rows of the next axis are divided evenly down to ``CHUNK_BYTES``."""
    if math.prod(shape) * dtype.itemsize <= SMALL_BYTES:
        return shape
    lead, inner = ((1,), shape[1:]) if stacked else ((), shape)
    size = math.prod(inner) * dtype.itemsize
    if size <= CHUNK_BYTES:
        return (*lead, *inner)
    least = math.ceil(size / CHUNK_BYTES)
    parts = next((n for n in range(least, 2 * least) if inner[0] % n == 0), least)
    return (*lead, math.ceil(inner[0] / parts), *inner[1:])


class PlainArray:
    """Geometry of one uncompressed array on disk.

    Attributes:
      folder: the array's folder.
      chunk_bytes: size of every chunk file (the last of a row may hold padding).
    """

    def __init__(self, folder: Path, shape: tuple[int, ...], chunk: tuple[int, ...], itemsize: int) -> None:
        """Raises ``ValueError`` if chunks of this shape are not contiguous pieces of the array."""
        if not is_contiguous(shape, chunk):
            raise ValueError(f"chunks {chunk} are not contiguous in an array of shape {shape}")
        self.folder = folder
        self.chunk_bytes = math.prod(chunk) * itemsize
        axis = _split_axis(chunk)
        self._tail = ["0"] * (len(shape) - axis - 1)
        self._outer = shape[:axis]
        self._parts = math.ceil(shape[axis] / chunk[axis])
        self._run_bytes = math.prod(shape[axis:]) * itemsize  # bytes under one index of the outer axes

    def segments(self, start: int, stop: int) -> Iterator[tuple[Path, int, int]]:
        """A byte range of the array as (chunk file, first byte in it, bytes)."""
        while start < stop:
            run, within = divmod(start, self._run_bytes)
            part, offset = divmod(within, self.chunk_bytes)
            end = min((part + 1) * self.chunk_bytes, self._run_bytes)
            count = min(end - within, stop - start)
            yield self._file(run, part), offset, count
            start += count

    def files(self) -> Iterator[Path]:
        """Every chunk file, in order."""
        for run, part in itertools.product(range(math.prod(self._outer)), range(self._parts)):
            yield self._file(run, part)

    def _file(self, run: int, part: int) -> Path:
        outer = np.unravel_index(run, self._outer) if self._outer else ()
        return self.folder.joinpath("c", *(str(int(i)) for i in outer), str(part), *self._tail)


def _split_axis(chunk: tuple[int, ...]) -> int:
    """The axis along which chunks follow each other in memory: all before it have chunk size 1."""
    return next((i for i, size in enumerate(chunk) if size > 1), len(chunk) - 1)


def is_contiguous(shape: tuple[int, ...], chunk: tuple[int, ...]) -> bool:
    axis = _split_axis(chunk)
    return bool(shape) and tuple(chunk[axis + 1 :]) == tuple(shape[axis + 1 :])


def copy_range(source: int, target: int, count: int, *, source_offset: int, target_offset: int) -> None:
    """Copies bytes between open files, inside the kernel where it can.

    Raises:
      EOFError: the source ends early.
      OSError: the disk is full, or any other error of reading or writing.
    """
    done, kernel = 0, hasattr(os, "copy_file_range")
    while done < count:
        places = source_offset + done, target_offset + done
        if kernel:
            try:
                moved = os.copy_file_range(source, target, min(count - done, 1 << 30), *places)
            except OSError as e:
                if e.errno not in _NO_KERNEL_COPY:
                    raise
                moved = 0
            kernel = moved > 0  # some file systems answer 0 instead of refusing
        else:
            piece = os.pread(source, min(count - done, _BUFFER), places[0])
            if not piece:
                raise EOFError(f"ends {count - done} bytes early")
            moved = os.pwrite(target, piece, places[1])
        done += moved
