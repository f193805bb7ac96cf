"""Parameters in orbax's layout on disk, written and read slice by slice.

Orbax itself saves and restores whole arrays; a stack of 36 layers is gigabytes. This module writes the files that
``orbax.checkpoint.v1.save_checkpointables`` writes when its key-value database is off (zarr3 arrays, a file per chunk),
so ``load_checkpointables`` restores them like any training checkpoint, and reads both kinds. A chunk is one layer,
uncompressed: trained bfloat16 hardly compresses, and a chunk file then holds a checkpoint tensor's bytes as they are.
Tensorstore lays the arrays out and reads every encoding; only the bytes of plain chunks are copied past it.
"""

from __future__ import annotations

import json
import math
import os
import time
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from mage_jax.config import ModelConfig
from mage_jax.params import declare, flatten
from mage_jax.weights.errors import MismatchError, WeightsError
from mage_jax.weights.plain_chunks import (
    CHUNK_BYTES,
    CODECS,
    PlainArray,
    chunk_shape,
    copy_range,
    is_contiguous,
)

ITEM = "params"  # name of the checkpointable
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
TREE_METADATA = "_METADATA"
_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def _context() -> ts.Context:
    # Files are flushed together before the folder is renamed, not one by one.
    return ts.Context({"file_io_sync": False, "file_io_concurrency": {"limit": 8}})


class StoreWriter:
    """Writes one parameter tree into a new checkpoint folder."""

    def __init__(self, folder: Path, arrays: Mapping[str, tuple[tuple[int, ...], np.dtype, bool]]) -> None:
        """Creates the arrays.

        Args:
          folder: checkpoint folder; ``params/`` is created in it.
          arrays: dotted path -> (shape, dtype, whether axis 0 is the layer axis).
        """
        self.folder = folder
        self.chunks = {
            path: chunk_shape(shape, dtype, stacked=stacked) for path, (shape, dtype, stacked) in arrays.items()
        }
        self._arrays = dict(arrays)
        self._started = time.time_ns()
        context = _context()
        opened = {path: ts.open(self._spec(path), context=context, create=True, open=False) for path in self._arrays}
        for future in opened.values():
            future.result()
        self._plain = {
            path: PlainArray(folder / ITEM / path, shape, self.chunks[path], dtype.itemsize)
            for path, (shape, dtype, _) in self._arrays.items()
        }
        for array in self._plain.values():
            for file in array.files():
                file.parent.mkdir(parents=True, exist_ok=True)
                file.touch()
                os.truncate(file, array.chunk_bytes)

    def _spec(self, path: str) -> dict[str, Any]:
        shape, dtype, _ = self._arrays[path]
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.folder / ITEM / path}/"},
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunks[path])}},
                "codecs": CODECS,
            },
        }

    def copy(self, path: str, start: int, count: int, *, source: int, offset: int) -> None:
        """Copies ``count`` bytes at ``offset`` of the open file ``source`` to byte ``start`` of an array.

        Raises:
          EOFError: the source ends early.
          OSError: the disk is full.
        """
        for file, position, size in self._plain[path].segments(start, start + count):
            target = os.open(file, os.O_WRONLY)
            try:
                copy_range(source, target, size, source_offset=offset, target_offset=position)
            finally:
                os.close(target)
            offset += size

    def finish(self) -> None:
        """Writes orbax's metadata; call when every write is done."""
        tree, chunks = {}, []
        for path, (shape, _, _) in self._arrays.items():
            keys = tuple(path.split("."))
            tree[str(keys)] = {
                "key_metadata": [{"key": key, "key_type": 2} for key in keys],  # 2: key of a dict
                "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False, "write_shape": list(shape)},
            }
            sizes = {"write_shape": list(shape), "chunk_shape": list(self.chunks[path])}
            chunks.append({"array_metadata": {"param_name": path, **sizes, "ext_metadata": None}})
        tree_metadata = {
            "tree_metadata": tree,
            "use_ocdbt": False,
            "use_zarr3": True,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }
        checkpoint_metadata = {
            "item_handlers": {ITEM: _HANDLER},
            "metrics": {},
            "performance_metrics": {},
            "init_timestamp_nsecs": self._started,
            "commit_timestamp_nsecs": time.time_ns(),
            "custom_metadata": {},
        }
        arrays_folder = self.folder / ITEM / "array_metadatas"
        arrays_folder.mkdir()
        (arrays_folder / "process_0").write_text(json.dumps({"array_metadatas": chunks}))
        (self.folder / ITEM / TREE_METADATA).write_text(json.dumps(tree_metadata))
        (self.folder / CHECKPOINT_METADATA).write_text(json.dumps(checkpoint_metadata))
        (self.folder / "orbax.checkpoint").touch()
        for folder in (self.folder, self.folder / ITEM):
            (folder / "commit_success.txt").write_text("Checkpoint commit was successful\n")


class StoreReader:
    """Reads slices of the parameters of a checkpoint, whoever wrote it."""

    def __init__(self, folder: Path) -> None:
        """Opens every array.

        Args:
          folder: checkpoint folder that holds ``params/``.

        Raises:
          WeightsError: not a readable orbax tree of arrays under nested dicts.
        """
        self.folder = folder
        root = folder / ITEM
        try:
            metadata = json.loads((root / TREE_METADATA).read_text())
            entries = metadata["tree_metadata"].values()
            paths = [".".join(str(key["key"]) for key in entry["key_metadata"]) for entry in entries]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
            raise WeightsError(f"{root / TREE_METADATA}: not the metadata of an orbax parameter tree: {e}") from e
        driver = "zarr3" if metadata.get("use_zarr3") else "zarr"
        context = _context()
        opened = {}
        for path in paths:
            kvstore: dict[str, Any] = {"driver": "file", "path": f"{root / path}/"}
            if metadata.get("use_ocdbt", True):
                base = {"driver": "file", "path": f"{root}/"}
                kvstore = {"driver": "ocdbt", "base": base, "path": f"{path}/"}
            # A chunk that is not there is an error, not zeros.
            spec = {"driver": driver, "kvstore": kvstore, "fill_missing_data_reads": False}
            opened[path] = ts.open(spec, context=context, open=True)
        self._stores: dict[str, ts.TensorStore] = {}
        for path, future in opened.items():
            try:
                self._stores[path] = future.result()
            except ValueError as e:
                raise WeightsError(f"{root}: parameter {path} cannot be opened: {e}") from e

    @property
    def arrays(self) -> dict[str, tuple[tuple[int, ...], np.dtype]]:
        """Dotted path -> (shape, dtype)."""
        return {path: (tuple(s.shape), np.dtype(s.dtype.numpy_dtype)) for path, s in self._stores.items()}

    def stream(self, *, skip: Container[str] = ()) -> Iterator[tuple[str, int, np.ndarray]]:
        """Arrays as (path, first row, rows), in order of rows, whole chunks and about ``CHUNK_BYTES`` at a time.

        The next block is read while the caller works on the current one, unless blocks are huge (an array that was
        saved as a single chunk can only be decoded whole).

        Raises:
          WeightsError: a chunk is missing or damaged.
        """
        paths = [path for path in self._stores if path not in skip]
        plan = [(path, start, stop) for path in paths for start, stop in self._ranges(path)]
        pending: ts.Future | None = None
        for i, (path, start, stop) in enumerate(plan):
            current = pending or self._stores[path][start:stop].read()
            pending = None
            if i + 1 < len(plan) and self._block_bytes(*plan[i + 1]) <= 2 * CHUNK_BYTES:
                next_path, next_start, next_stop = plan[i + 1]
                pending = self._stores[next_path][next_start:next_stop].read()
            try:
                rows = current.result()
            except (ValueError, OSError) as e:
                raise WeightsError(f"{self.folder / ITEM}: parameter {path} cannot be read: {e}") from e
            yield path, start, rows

    def _ranges(self, path: str) -> Iterator[tuple[int, int]]:
        store = self._stores[path]
        rows = store.shape[0]
        chunk = max(1, store.chunk_layout.read_chunk.shape[0])
        step = max(1, CHUNK_BYTES // max(1, self._block_bytes(path, 0, chunk))) * chunk
        for start in range(0, rows, step):
            yield start, min(start + step, rows)

    def _block_bytes(self, path: str, start: int, stop: int) -> int:
        store = self._stores[path]
        return (stop - start) * math.prod(store.shape[1:]) * store.dtype.numpy_dtype.itemsize

    def padded_count(self, path: str) -> int:
        """Values in all chunks of an array, padding included: what reading it whole decodes."""
        store = self._stores[path]
        chunk = store.chunk_layout.read_chunk.shape
        return math.prod(math.ceil(n / c) * c for n, c in zip(store.shape, chunk, strict=True))

    def plain(self, path: str) -> PlainArray | None:
        """The array's chunk files as byte ranges; None where chunks are encoded or not contiguous."""
        store = self._stores[path]
        spec = store.spec().to_json()
        metadata = spec.get("metadata", {})
        chunk = tuple(store.chunk_layout.read_chunk.shape)
        if (
            spec["driver"] == "zarr3"
            and spec["kvstore"]["driver"] == "file"
            and metadata.get("codecs") == CODECS
            and metadata.get("chunk_key_encoding") == {"name": "default"}
            and is_contiguous(tuple(store.shape), chunk)
        ):
            itemsize = store.dtype.numpy_dtype.itemsize
            return PlainArray(self.folder / ITEM / path, tuple(store.shape), chunk, itemsize)
        return None

    def missing_chunks(self) -> list[str]:
        """Chunk files of plain arrays that are absent or cut short; storage would read the absent ones as zeros."""
        problems = []
        for path in self._stores:
            array = self.plain(path)
            for file in array.files() if array else ():
                size = file.stat().st_size if file.exists() else None
                if size != array.chunk_bytes:
                    found = "is missing" if size is None else f"has {size} bytes instead of {array.chunk_bytes}"
                    problems.append(f"{file}: a part of parameter {path} {found}")
        return problems


def check_store(reader: StoreReader, config: ModelConfig) -> None:
    """Raises ``MismatchError`` with every difference between stored arrays and declared parameters, lost files too."""
    specs, arrays = flatten(declare(config)), reader.arrays
    where = reader.folder / ITEM
    problems = [
        f"parameter {p} is missing: model.json asks for {list(specs[p].shape)}" for p in specs if p not in arrays
    ]
    problems += [f"parameter {p} is not part of the model that model.json describes" for p in arrays if p not in specs]
    problems += [
        f"parameter {p} has shape {list(arrays[p][0])}, model.json asks for {list(spec.shape)}"
        for p, spec in specs.items()
        if p in arrays and arrays[p][0] != spec.shape
    ]
    problems += reader.missing_chunks()
    if problems:
        raise MismatchError(str(where), problems)
