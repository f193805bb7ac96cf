"""Streaming safetensors writer: sizes are known up front, so headers go first and tensors follow in any order."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mage_jax.weights.plain_chunks import copy_range
from mage_jax.weights.safetensors_io import ITEM_BITS, SINGLE_FILE

GB = 1_000_000_000  # as in Hugging Face's shard sizes
DEFAULT_METADATA = {"format": "pt"}  # transformers refuses files without it


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """What is known of a tensor before its values are: name, safetensors dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * ITEM_BITS[self.dtype] // 8


@dataclasses.dataclass(frozen=True)
class FileSpec:
    """One file of a checkpoint: its name, tensors in order of data, and ``__metadata__``."""

    file: str
    tensors: tuple[TensorSpec, ...]
    metadata: Mapping[str, str] | None = dataclasses.field(default_factory=lambda: dict(DEFAULT_METADATA))


def split(tensors: Sequence[TensorSpec], *, max_bytes: int | None) -> list[FileSpec]:
    """Distributes tensors over files in Hugging Face naming, order kept.

    A file closes when the next tensor would pass ``max_bytes`` of tensor data; a tensor that alone is larger gets a
    file of its own. None, or a limit that everything fits in, gives the single ``model.safetensors``.
    """
    if max_bytes is not None and max_bytes <= 0:
        raise ValueError(f"max_bytes must be positive, got {max_bytes}")
    groups: list[list[TensorSpec]] = [[]]
    used = 0
    for tensor in tensors:
        if groups[-1] and max_bytes is not None and used + tensor.nbytes > max_bytes:
            groups.append([])
            used = 0
        groups[-1].append(tensor)
        used += tensor.nbytes
    if len(groups) == 1:
        return [FileSpec(SINGLE_FILE, tuple(groups[0]))]
    count = len(groups)
    return [
        FileSpec(f"model-{i:05d}-of-{count:05d}.safetensors", tuple(group)) for i, group in enumerate(groups, start=1)
    ]


def header_bytes(spec: FileSpec) -> bytes:
    """Length prefix and JSON header, padded to 8 bytes like the reference writer's."""
    header: dict[str, Any] = {} if spec.metadata is None else {"__metadata__": dict(spec.metadata)}
    position = 0
    for tensor in spec.tensors:
        end = position + tensor.nbytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


class SafetensorsWriter:
    """Writes a checkpoint's files; each tensor's bytes may come in pieces and in any order.

    Usage: construct (writes all headers and reserves the space), ``write`` every byte of every tensor once, ``close``.
    """

    def __init__(self, folder: Path, files: Sequence[FileSpec]) -> None:
        """Creates the files.

        Raises:
          OSError: no space left, named with the file.
        """
        self.folder = folder
        self._handles: list[int] = []
        self._places: dict[str, tuple[int, int, TensorSpec]] = {}  # name -> handle, offset, spec
        self._left: dict[str, int] = {}
        try:
            for spec in files:
                handle = os.open(folder / spec.file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
                self._handles.append(handle)
                header = header_bytes(spec)
                _pwrite(handle, memoryview(header), 0)
                position = len(header)
                for tensor in spec.tensors:
                    self._places[tensor.name] = (handle, position, tensor)
                    self._left[tensor.name] = tensor.nbytes
                    position += tensor.nbytes
                os.truncate(handle, position)
        except BaseException:
            self._release()
            raise

    def write(self, name: str, array: np.ndarray, *, start: int = 0) -> None:
        """Writes contiguous values of one tensor from its byte ``start`` on.

        Raises:
          ValueError: the values do not fit in the tensor.
          OSError: the disk is full.
        """
        handle, offset, spec = self._places[name]
        if start < 0 or start + array.nbytes > spec.nbytes:
            raise ValueError(f"tensor {name}: {array.nbytes} bytes at {start} do not fit in {spec.nbytes}")
        view = memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
        _pwrite(handle, view, offset + start)
        self._left[name] -= array.nbytes

    def copy(self, name: str, count: int, *, start: int, source: int, offset: int) -> None:
        """Copies ``count`` bytes at ``offset`` of the open file ``source`` to byte ``start`` of a tensor.

        Raises:
          EOFError: the source ends early.
          OSError: the disk is full.
        """
        handle, position, _ = self._places[name]
        copy_range(source, handle, count, source_offset=offset, target_offset=position + start)
        self._left[name] -= count

    def close(self) -> None:
        """Closes the files.

        Raises:
          ValueError: a tensor was not written completely.
        """
        self._release()
        missing = [name for name, left in self._left.items() if left]
        if missing:
            raise ValueError(f"{self.folder}: tensors not written completely: {', '.join(missing[:5])}")

    def _release(self) -> None:
        while self._handles:
            os.close(self._handles.pop())

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, kind: Any, *exc: Any) -> None:
        if kind is None:
            self.close()
        else:
            self._release()


def _pwrite(handle: int, view: memoryview, offset: int) -> None:
    done = 0
    while done < len(view):
        done += os.pwrite(handle, view[done : done + (1 << 30)], offset + done)


def index_text(files: Sequence[FileSpec]) -> str:
    """``model.safetensors.index.json`` of a set of shards, formatted like the reference writer's."""
    tensors = [tensor for spec in files for tensor in spec.tensors]
    metadata = {
        "total_parameters": sum(math.prod(t.shape) for t in tensors),
        "total_size": sum(t.nbytes for t in tensors),
    }
    weight_map = {tensor.name: spec.file for spec in files for tensor in spec.tensors}
    return json.dumps({"metadata": metadata, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n"
