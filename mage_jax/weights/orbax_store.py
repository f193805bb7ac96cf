"""Parameters in orbax's layout on disk, written and read slice by slice through tensorstore.

Orbax itself saves and restores whole arrays; a stack of 36 layers is gigabytes. This module writes the files that
``orbax.checkpoint.v1.save_checkpointables`` writes when its key-value database is off (zarr3 arrays, a file per chunk),
so ``load_checkpointables`` restores them like any training checkpoint, and reads both kinds. A chunk is one layer,
uncompressed: trained bfloat16 hardly compresses, and a chunk file then holds a checkpoint tensor's bytes as they are.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts

from mage_jax.config import ModelConfig
from mage_jax.params import declare, flatten
from mage_jax.weights.errors import MismatchError, WeightsError

ITEM = "params"  # name of the checkpointable
CHUNK_BYTES = 64 << 20  # largest chunk, and what is read at a time
CHECKPOINT_METADATA = "_CHECKPOINT_METADATA"
TREE_METADATA = "_METADATA"
_HANDLER = "orbax.checkpoint.experimental.v1._src.handlers.pytree_handler.PyTreeHandler"


def _context() -> ts.Context:
    # Files are flushed together before the folder is renamed, not one by one.
    return ts.Context({"file_io_sync": False, "file_io_concurrency": {"limit": 8}})


def chunk_shape(shape: tuple[int, ...], dtype: np.dtype, *, stacked: bool) -> tuple[int, ...]:
    """One layer of a stacked parameter; rows of the next axis are divided evenly down to ``CHUNK_BYTES``."""
    lead = (1,) if stacked else ()
    inner = shape[1:] if stacked else shape
    size = math.prod(inner) * dtype.itemsize
    if not inner or size <= CHUNK_BYTES:
        return (*lead, *inner)
    least = math.ceil(size / CHUNK_BYTES)
    parts = next((n for n in range(least, 2 * least) if inner[0] % n == 0), least)
    return (*lead, math.ceil(inner[0] / parts), *inner[1:])


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
        self._stores = {path: future.result() for path, future in opened.items()}

    def _spec(self, path: str) -> dict[str, Any]:
        shape, dtype, _ = self._arrays[path]
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.folder / ITEM / path}/"},
            "metadata": {
                "shape": list(shape),
                "data_type": dtype.name,
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(self.chunks[path])}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
            },
            # A chunk of zeros is written too: no file then always means a damaged checkpoint.
            "store_data_equal_to_fill_value": True,
        }

    def write(self, path: str, index: tuple[Any, ...], values: np.ndarray) -> ts.Future:
        """Starts writing ``values`` at ``index``, which must cover whole chunks.

        The memory of ``values`` is referenced, not copied: leave it alone until the returned future is done.
        """
        return self._stores[path][index].write(values, can_reference_source_data_indefinitely=True).commit

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

    def stream(self) -> Iterator[tuple[str, int, np.ndarray]]:
        """Every array as (path, first row, rows), in order of rows, whole chunks and about ``CHUNK_BYTES`` at a time.

        ``rows`` may lie in a buffer that is reused: it is valid until the next block is asked for. The next block is
        read meanwhile, unless it is huge (an array that was saved as a single chunk can only be decoded whole).

        Raises:
          WeightsError: a chunk is missing or damaged.
        """
        plan = [(path, start, stop) for path in self._stores for start, stop in self._ranges(path)]
        buffers = itertools.cycle((_Buffer(), _Buffer()))
        with ThreadPoolExecutor(1) as pool:
            pending: Future[np.ndarray] | None = None
            for i, (path, start, stop) in enumerate(plan):
                current = pending or pool.submit(self._read, path, start, stop, next(buffers))
                rows = current.result()
                pending = None
                if i + 1 < len(plan) and self._block_bytes(*plan[i + 1]) <= 2 * CHUNK_BYTES:
                    pending = pool.submit(self._read, *plan[i + 1], next(buffers))
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

    def _read(self, path: str, start: int, stop: int, buffer: _Buffer) -> np.ndarray:
        store = self._stores[path]
        try:
            if not _is_plain(store):
                return store[start:stop].read().result()
            values = buffer.array((stop - start, *store.shape[1:]), store.dtype.numpy_dtype)
            _read_plain(store, self.folder / ITEM / path, start, values)
            return values
        except (ValueError, OSError) as e:
            raise WeightsError(f"{self.folder / ITEM}: parameter {path} cannot be read: {e}") from e


class _Buffer:
    """Memory that is reused: touching fresh pages costs more than the copy itself."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def array(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        nbytes = math.prod(shape) * dtype.itemsize
        if self._bytes.nbytes < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes].view(dtype).reshape(shape)


def _split_axis(chunk: tuple[int, ...]) -> int:
    """The axis along which chunks follow each other in memory: all before it have chunk size 1."""
    return next((i for i, size in enumerate(chunk) if size > 1), len(chunk) - 1)


def _is_plain(store: ts.TensorStore) -> bool:
    """Whether chunk files hold the values themselves, in order, as ``StoreWriter`` makes them."""
    spec = store.spec().to_json()
    metadata = spec.get("metadata", {})
    chunk = tuple(store.chunk_layout.read_chunk.shape)
    axis = _split_axis(chunk)
    return (
        spec["driver"] == "zarr3"
        and spec["kvstore"]["driver"] == "file"
        and metadata.get("codecs") == [{"name": "bytes", "configuration": {"endian": "little"}}]
        and metadata.get("chunk_key_encoding", {}).get("name") == "default"
        and chunk[axis + 1 :] == tuple(store.shape[axis + 1 :])
    )


def _read_plain(store: ts.TensorStore, folder: Path, start: int, values: np.ndarray) -> None:
    """Fills ``values`` with rows of the leading axis from ``start`` on, straight from chunk files."""
    chunk, shape = tuple(store.chunk_layout.read_chunk.shape), tuple(store.shape)
    axis = _split_axis(chunk)
    first, stop = start // chunk[0], math.ceil((start + values.shape[0]) / chunk[0])
    counts = [math.ceil(n / c) for n, c in zip(shape[1 : axis + 1], chunk[1 : axis + 1], strict=True)]
    row_bytes = math.prod(shape[axis + 1 :]) * values.itemsize
    view, done = memoryview(values.reshape(-1).view(np.uint8)), 0
    for index in itertools.product(range(first, stop), *map(range, counts)):
        size = min(chunk[axis], shape[axis] - index[axis] * chunk[axis]) * row_bytes
        path = folder.joinpath("c", *map(str, index), *["0"] * (len(shape) - len(index)))
        with path.open("rb", buffering=0) as f:
            got = 0
            while got < size:
                count = f.readinto(view[done + got : done + size])
                if not count:
                    raise ValueError(f"{path} ends after {got} of {size} bytes")
                got += count
        done += size


def check_store(reader: StoreReader, config: ModelConfig) -> None:
    """Raises ``MismatchError`` with every difference between stored arrays and declared parameters."""
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
    if problems:
        raise MismatchError(str(where), problems)
