"""Streaming safetensors reader: one file or a sharded folder, tensor by tensor, nothing believed unchecked.

The header is parsed and validated here, not by the ``safetensors`` library, because a lying header must end in a
message that names file and tensor before anything is written, and because reads go into buffers of the caller, so that
memory does not grow with the model.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from mage_jax.weights.errors import SafetensorsError

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
MAX_HEADER = 100_000_000  # bytes; the format's own limit
_MAX_READ = 1 << 30  # one read call returns less than 2 GiB

ITEM_BITS = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
NUMPY_DTYPES = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
DTYPE_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies. ``offset`` counts bytes from the start of the file ``file`` (a name without folder)."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """One file's tensors in the order of their data, and its ``__metadata__`` (None where absent)."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str] | None


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"duplicate name {next(n for n in names if names.count(n) > 1)!r}")
    return result


def read_header(path: Path) -> Header:
    """Reads and validates the header of one file.

    Raises:
      SafetensorsError: the file is truncated or its header contradicts itself or the file's size.
    """
    if path.exists() and not path.is_file():  # opening a pipe would wait for ever
        kind = "a folder" if path.is_dir() else "no regular file"
        raise SafetensorsError(f"{path}: is {kind} instead of a safetensors file; put the file there")
    with path.open("rb") as f:
        size = os.fstat(f.fileno()).st_size
        prefix = f.read(8)
        if len(prefix) < 8:
            raise SafetensorsError(f"{path}: {size} bytes are too few for a safetensors file; it is truncated")
        (length,) = struct.unpack("<Q", prefix)
        if length > MAX_HEADER:
            raise SafetensorsError(f"{path}: header length {length} exceeds the limit of {MAX_HEADER}; not safetensors")
        if 8 + length > size:
            raise SafetensorsError(
                f"{path}: header of {length} bytes does not fit in a file of {size} bytes; it is truncated"
            )
        raw = f.read(length)
    return parse_header(raw, path=str(path), file=path.name, data_size=size - 8 - length)


def parse_header(raw: bytes, *, path: str, file: str, data_size: int) -> Header:
    """Validates a header against the number of data bytes that follow it.

    Args:
      raw: the JSON text.
      path: for messages.
      file: the ``TensorInfo.file`` of the results.
      data_size: bytes after the header.

    Raises:
      SafetensorsError: not JSON, duplicate names, unknown dtypes, or offsets that overlap, leave gaps, run past the
        end, leave bytes over, or do not match dtype and shape.
    """
    if not raw.startswith(b"{"):
        raise SafetensorsError(f"{path}: the header does not start with '{{'; not a safetensors file")
    try:
        header = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as e:
        raise SafetensorsError(f"{path}: the header is not valid JSON: {e}") from None
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (isinstance(metadata, dict) and all(isinstance(v, str) for v in metadata.values())):
        raise SafetensorsError(f"{path}: __metadata__ must map strings to strings")
    tensors = [_tensor(name, entry, path, file, 8 + len(raw)) for name, entry in header.items()]
    tensors.sort(key=lambda t: (t.offset, t.nbytes))
    position, previous, end = 8 + len(raw), "the header", 8 + len(raw) + data_size
    for tensor in tensors:
        if tensor.offset + tensor.nbytes > end:
            over = tensor.offset + tensor.nbytes - end
            raise SafetensorsError(f"{path}: tensor {tensor.name} ends {over} bytes after the end of the file")
    for tensor in tensors:
        if tensor.offset < position:
            raise SafetensorsError(f"{path}: tensor {tensor.name} overlaps {previous}")
        if tensor.offset > position:
            gap = tensor.offset - position
            raise SafetensorsError(f"{path}: tensor {tensor.name} leaves a gap of {gap} bytes after {previous}")
        position, previous = tensor.offset + tensor.nbytes, f"tensor {tensor.name}"
    if position != end:
        raise SafetensorsError(f"{path}: {end - position} bytes follow the last tensor of the header ({previous})")
    return Header(tuple(tensors), metadata)


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _tensor(name: str, entry: Any, path: str, file: str, base: int) -> TensorInfo:
    where = f"{path}: tensor {name}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise SafetensorsError(f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_BITS:
        raise SafetensorsError(f"{where} has unknown dtype {dtype!r}")
    if not isinstance(shape, list) or not all(map(_is_size, shape)):
        raise SafetensorsError(f"{where} has invalid shape {shape!r}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(map(_is_size, offsets)):
        raise SafetensorsError(f"{where} has invalid data_offsets {offsets!r}")
    start, stop = offsets
    bits = math.prod(shape) * ITEM_BITS[dtype]
    if start > stop or (stop - start) * 8 != bits:
        raise SafetensorsError(
            f"{where} has {stop - start} bytes at {offsets}, but {dtype} {shape} takes {bits / 8:g} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), file, base + start, stop - start)


class SafetensorsFolder:
    """All tensors of a checkpoint folder: ``model.safetensors``, or shards named by the index.

    Attributes:
      path: the folder.
      tensors: name -> ``TensorInfo``, file by file in order of data.
      metadata: file name -> its ``__metadata__``.
      index_text: the index file as it is; None for a single file.
    """

    def __init__(self, path: Path) -> None:
        """Reads and validates index and headers, no data.

        Raises:
          SafetensorsError: a file is missing or damaged, or index and files disagree.
        """
        self.path = Path(path)
        self.index_text: str | None = None
        self._handles: dict[str, int] = {}
        index_path, single_path = self.path / INDEX_FILE, self.path / SINGLE_FILE
        weight_map: dict[str, str] | None = None
        if index_path.exists():
            weight_map = self._read_index(index_path)
            files = list(dict.fromkeys(sorted(weight_map.values())))
            if single_path.exists() and SINGLE_FILE not in files:
                raise SafetensorsError(f"{self.path}: holds both {SINGLE_FILE} and {INDEX_FILE}; remove one of them")
        elif single_path.exists():
            files = [SINGLE_FILE]
        else:
            raise SafetensorsError(f"{self.path}: holds neither {SINGLE_FILE} nor {INDEX_FILE}")
        self.where = str(index_path if weight_map is not None else single_path)
        headers = {}
        for file in files:
            if not (self.path / file).exists():
                raise SafetensorsError(f"{index_path}: names shard {file}, which is missing from the folder")
            headers[file] = read_header(self.path / file)
        self.metadata = {file: header.metadata for file, header in headers.items()}
        self.tensors: dict[str, TensorInfo] = {}
        for header in headers.values():
            for tensor in header.tensors:
                if tensor.name in self.tensors:
                    other = self.tensors[tensor.name].file
                    raise SafetensorsError(f"{self.path / tensor.file}: tensor {tensor.name} is also in {other}")
                self.tensors[tensor.name] = tensor
        if weight_map is not None:
            self._check_index(index_path, weight_map)

    def _read_index(self, index_path: Path) -> dict[str, str]:
        if index_path.is_dir():
            raise SafetensorsError(f"{index_path}: is a folder, not an index; put the file there")
        try:
            self.index_text = index_path.read_bytes().decode("utf-8")
            index = json.loads(self.index_text, object_pairs_hook=_no_duplicates)
        except (ValueError, RecursionError) as e:
            raise SafetensorsError(f"{index_path}: not a valid index: {e}") from None
        weight_map = index.get("weight_map") if isinstance(index, dict) else None
        if not isinstance(weight_map, dict) or not weight_map:
            raise SafetensorsError(f"{index_path}: weight_map is missing or empty")
        for name, file in weight_map.items():
            if not isinstance(file, str) or file in ("", ".", "..") or Path(file).name != file:
                raise SafetensorsError(f"{index_path}: tensor {name} lies in {file!r}, which is not a plain file name")
        metadata = index.get("metadata")
        if not isinstance(metadata, dict) or not _is_size(metadata.get("total_size")):
            raise SafetensorsError(f"{index_path}: metadata.total_size is missing or not a number of bytes")
        self._declared_size: int = metadata["total_size"]
        return weight_map

    def _check_index(self, index_path: Path, weight_map: dict[str, str]) -> None:
        for name, file in weight_map.items():
            tensor = self.tensors.get(name)
            if tensor is None or tensor.file != file:
                found = f"; it is in {tensor.file}" if tensor else ""
                raise SafetensorsError(f"{index_path}: tensor {name} is not in its shard {file}{found}")
        for name, tensor in self.tensors.items():
            if name not in weight_map:
                raise SafetensorsError(
                    f"{self.path / tensor.file}: tensor {name} is not in the index {index_path.name}"
                )
        if self._declared_size != self.total_size:
            raise SafetensorsError(
                f"{index_path}: metadata.total_size is {self._declared_size}, the shards hold "
                f"{self.total_size} bytes of tensors"
            )

    @property
    def sharded(self) -> bool:
        return self.index_text is not None

    @property
    def files(self) -> list[str]:
        return list(self.metadata)

    @property
    def total_size(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def handle(self, tensor: TensorInfo) -> int:
        """Descriptor of the open file that holds a tensor; it stays open until ``close``."""
        if tensor.file not in self._handles:
            self._handles[tensor.file] = os.open(self.path / tensor.file, os.O_RDONLY)
        return self._handles[tensor.file]

    def read_into(self, tensor: TensorInfo, buffer: np.ndarray, *, start: int = 0) -> None:
        """Fills ``buffer`` (contiguous, any dtype) with the bytes of ``tensor`` from byte ``start`` on.

        Raises:
          SafetensorsError: the file ends early (it was changed after it was opened).
        """
        handle = self.handle(tensor)
        view = memoryview(buffer.reshape(-1).view(np.uint8))
        done = 0
        while done < len(view):
            piece = view[done : done + _MAX_READ]
            count = os.preadv(handle, [piece], tensor.offset + start + done)
            if count == 0:
                raise SafetensorsError(f"{self.path / tensor.file}: the file ends inside tensor {tensor.name}")
            done += count

    def read(self, name: str) -> np.ndarray:
        """One tensor as a new array.

        Raises:
          SafetensorsError: no such tensor, or a dtype that numpy cannot hold.
        """
        tensor = self.tensors.get(name)
        if tensor is None:
            raise SafetensorsError(f"{self.where}: has no tensor {name}")
        if tensor.dtype not in NUMPY_DTYPES:
            raise SafetensorsError(f"{self.path / tensor.file}: tensor {name} has unsupported dtype {tensor.dtype}")
        array = np.empty(tensor.shape, NUMPY_DTYPES[tensor.dtype])
        if array.nbytes:
            self.read_into(tensor, array)
        return array

    def close(self) -> None:
        for handle in self._handles.values():
            os.close(handle)
        self._handles.clear()

    def __enter__(self) -> SafetensorsFolder:
        return self

    def __exit__(self, *exc: Any) -> None:
        self.close()
