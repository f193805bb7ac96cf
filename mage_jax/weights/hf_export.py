"""Checkpoint or live parameters to a Hugging Face folder, streamed block by block."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from tqdm import tqdm

from mage_jax.config import ModelConfig
from mage_jax.params import Params, declare, flatten
from mage_jax.weights.atomic import atomic_folder
from mage_jax.weights.errors import MismatchError, WeightsError
from mage_jax.weights.hf_config import (
    CONFIG_FILE,
    read_hf_config,
    read_json,
    same_geometry,
    set_dtype,
    write_hf_config,
)
from mage_jax.weights.model_dir import copy_assets, read_model_file, resolve
from mage_jax.weights.names import SUPPORTED_DTYPES, Slot, slots
from mage_jax.weights.orbax_store import StoreReader, check_store
from mage_jax.weights.plain_chunks import CHUNK_BYTES, PlainArray
from mage_jax.weights.safetensors_io import INDEX_FILE, NUMPY_DTYPES
from mage_jax.weights.safetensors_write import (
    GB,
    FileSpec,
    SafetensorsWriter,
    TensorSpec,
    index_text,
    split,
)

DEFAULT_DTYPE = "bfloat16"
DEFAULT_SHARD_GB = 5.0
_HF_DTYPES = {numpy_name: name for name, numpy_name in SUPPORTED_DTYPES.items()}

Block = tuple[str, int, np.ndarray]  # parameter path, first row of the leading axis, rows


def export_hf(
    checkpoint: str | Path,
    out: str | Path,
    *,
    dtype: str | None = None,
    max_shard_gb: float | None = None,
    progress: bool = False,
) -> None:
    """Writes a model, run or step folder as a Hugging Face folder.

    Args:
      checkpoint: see ``mage_jax.weights.model_dir.resolve``; a Hugging Face folder is refused.
      out: folder to create; on any error it stays absent.
      dtype: "bfloat16", "float16" or "float32" for every tensor; None keeps each tensor's dtype in the source files,
        bfloat16 for a model that was born here.
      max_shard_gb: re-shard so that no file holds more (10^9 bytes); None keeps the source's files, 5 for a model that
        was born here.
      progress: show a progress bar.

    Raises:
      WeightsError: the checkpoint is damaged or ``out`` exists.
      OSError: the disk is full.
    """
    found = resolve(checkpoint)
    if found.kind == "hf":
        raise WeightsError(f"{found.checkpoint} is a Hugging Face folder already; convert it to a model folder first")
    config, source = read_model_file(found.root)
    reader = StoreReader(found.checkpoint)
    check_store(reader, config)
    plan = _Plan(config, source, found.assets, dtype, max_shard_gb)

    def fill(writer: SafetensorsWriter, bar: tqdm) -> None:
        plain = _plain_arrays(reader, plan)
        for slot in plan.slots.values():
            if slot.path in plain:
                _copy_plain(plain[slot.path], slot, plan.dtypes[slot.name].itemsize, writer)
                bar.update(slot.count * plan.dtypes[slot.name].itemsize)
        _write_blocks(reader.stream(skip=plain), plan, writer, bar)

    _export(plan, Path(out), fill, progress=progress)


def export_params(
    params: Params,
    out: str | Path,
    *,
    config: ModelConfig,
    source: dict[str, Any] | None = None,
    assets: str | Path | None = None,
    dtype: str | None = None,
    max_shard_gb: float | None = None,
) -> None:
    """Writes parameters that are in memory; arguments as in ``export_hf`` and ``LoadedModel``.

    With several processes all must call it; each block is gathered in turn and process 0 writes.

    Raises:
      MismatchError: ``params`` does not have the structure or shapes of ``config``.
      WeightsError: ``out`` exists.
      OSError: the disk is full.
    """
    specs, flat = flatten(declare(config)), flatten(params)
    problems = [f"parameter {path} is missing or unexpected" for path in sorted(set(specs) ^ set(flat))]
    problems += [
        f"parameter {path} has shape {flat[path].shape}, the config asks for {spec.shape}"
        for path, spec in specs.items()
        if path in flat and tuple(flat[path].shape) != spec.shape
    ]
    if problems:
        raise MismatchError("parameters", problems)
    plan = _Plan(config, source, Path(assets) if assets is not None else None, dtype, max_shard_gb)
    blocks = _live_blocks(flat)
    if jax.process_index() == 0:
        _export(plan, Path(out), lambda writer, bar: _write_blocks(blocks, plan, writer, bar))
    else:
        for _ in blocks:  # take part in gathering
            pass


class _Plan:
    """What is written: files, index and per-tensor dtypes of one export."""

    def __init__(
        self,
        config: ModelConfig,
        source: dict[str, Any] | None,
        assets: Path | None,
        dtype: str | None,
        max_shard_gb: float | None,
    ) -> None:
        self.config, self.source, self.assets, self.dtype = config, source, assets, dtype
        self.files, self.index = plan_files(config, source, dtype=dtype, max_shard_gb=max_shard_gb)
        tensors = [tensor for file in self.files for tensor in file.tensors]
        self.total = sum(tensor.nbytes for tensor in tensors)
        self.dtypes = {tensor.name: NUMPY_DTYPES[tensor.dtype] for tensor in tensors}
        by_name = {slot.name: slot for slot in slots(config)}
        self.slots = {tensor.name: by_name[tensor.name] for tensor in tensors}  # in order of the files
        self.members: dict[str, list[Slot]] = {}
        for slot in by_name.values():
            self.members.setdefault(slot.path, []).append(slot)


def _plain_arrays(reader: StoreReader, plan: _Plan) -> dict[str, PlainArray]:
    """Arrays whose bytes can be copied as they are: uncompressed, and no cast is wanted."""
    plain = {}
    for path, (_, stored) in reader.arrays.items():
        array = reader.plain(path)
        if array is not None and all(plan.dtypes[slot.name] == stored for slot in plan.members[path]):
            plain[path] = array
    return plain


def _copy_plain(array: PlainArray, slot: Slot, itemsize: int, writer: SafetensorsWriter) -> None:
    nbytes = slot.count * itemsize
    first = (slot.layer or 0) * nbytes
    done = 0
    for file, offset, count in array.segments(first, first + nbytes):
        try:
            handle = os.open(file, os.O_RDONLY)
        except FileNotFoundError:
            raise WeightsError(f"{file} is missing: the checkpoint lacks a part of {slot.path}") from None
        try:
            writer.copy(slot.name, count, start=done, source=handle, offset=offset)
        except EOFError as e:
            raise WeightsError(f"{file}: a part of {slot.path} {e}") from e
        finally:
            os.close(handle)
        done += count


def _write_blocks(blocks: Iterable[Block], plan: _Plan, writer: SafetensorsWriter, bar: tqdm) -> None:
    for path, start, rows in blocks:
        for name, values, first in _tensor_pieces(plan.members[path], start, rows):
            values = values.astype(plan.dtypes[name], copy=False)
            writer.write(name, values, start=first * values.itemsize)
            bar.update(values.nbytes)


def _live_blocks(flat: dict[str, Any]) -> Iterator[Block]:
    for path, array in flat.items():
        row_bytes = max(1, array.nbytes // array.shape[0])
        step = max(1, CHUNK_BYTES // row_bytes)
        for start in range(0, array.shape[0], step):
            rows = array[start : start + step]
            if isinstance(rows, jax.Array) and not rows.is_fully_addressable:
                rows = multihost_utils.process_allgather(rows, tiled=True)
            yield path, start, np.asarray(rows)


def _export(plan: _Plan, out: Path, fill: Callable[[SafetensorsWriter, tqdm], None], *, progress: bool = False) -> None:
    copied = plan.assets if plan.assets is not None and plan.assets.is_dir() else None
    with atomic_folder(out, need_bytes=plan.total, copied=copied) as folder:
        bar = tqdm(total=plan.total, unit="B", unit_scale=True, desc="to safetensors", disable=not progress)
        with bar, SafetensorsWriter(folder, plan.files) as writer:
            fill(writer, bar)
        if plan.index is not None:
            (folder / INDEX_FILE).write_text(plan.index, encoding="utf-8")
        _write_config(folder, plan)


def _tensor_pieces(members: list[Slot], start: int, rows: np.ndarray) -> Iterator[tuple[str, np.ndarray, int]]:
    """A block as (tensor name, values, number of the first value in the tensor)."""
    if members[0].layer is None:
        yield members[0].name, rows, start * (members[0].count // members[0].shape[0])
    else:
        for i, values in enumerate(rows):
            yield members[start + i].name, values, 0


def plan_files(
    config: ModelConfig, source: dict[str, Any] | None, *, dtype: str | None, max_shard_gb: float | None
) -> tuple[list[FileSpec], str | None]:
    """Which tensor goes where: the source's files unless asked otherwise.

    Returns:
      The files, and the text of the index (None for a single file).

    Raises:
      WeightsError: ``source`` does not name the model's tensors, an unsupported dtype, or a limit that is not positive.
    """
    if dtype is not None and dtype not in _HF_DTYPES:
        raise WeightsError(f"dtype {dtype!r} is not supported; choose one of {', '.join(_HF_DTYPES)}")
    if max_shard_gb is not None and not (math.isfinite(max_shard_gb) and max_shard_gb * GB >= 1):
        raise WeightsError(f"max_shard_gb must be positive and finite, got {max_shard_gb}")
    expected = {slot.name: slot for slot in slots(config)}
    if source is None:
        stored = [(name, _HF_DTYPES[DEFAULT_DTYPE]) for name in expected]
        max_shard_gb = max_shard_gb or DEFAULT_SHARD_GB
    else:
        stored = [tuple(tensor) for file in source["files"] for tensor in file["tensors"]]
        if sorted(name for name, _ in stored) != sorted(expected):
            difference = sorted({name for name, _ in stored} ^ set(expected))
            raise WeightsError(f"model.json: source and model name different tensors: {', '.join(difference[:5])}")
    specs = {
        name: TensorSpec(name, _HF_DTYPES[dtype] if dtype else kept, expected[name].hf_shape) for name, kept in stored
    }
    if source is None or max_shard_gb is not None:
        files = split(list(specs.values()), max_bytes=int((max_shard_gb or DEFAULT_SHARD_GB) * GB))
        return files, index_text(files) if len(files) > 1 else None
    files = [
        FileSpec(file["file"], tuple(specs[name] for name, _ in file["tensors"]), file["metadata"])
        for file in source["files"]
    ]
    unchanged = all(specs[name].dtype == kept for name, kept in stored)
    index = source["index"] if unchanged or not source["sharded"] else index_text(files)
    return files, index


def _write_config(folder: Path, plan: _Plan) -> None:
    if plan.assets is not None and plan.assets.is_dir():
        # ``copy_assets`` leaves out the source's own weight files, so only a stranger of the same name could land here.
        replaced = {INDEX_FILE, *(file["file"] for file in plan.source["files"])} if plan.source else set()
        for name in sorted({INDEX_FILE, *(file.file for file in plan.files)} - replaced):
            if (plan.assets / name).exists():
                raise WeightsError(
                    f"{plan.assets / name}: a carried file has the name of a weight file; remove it first"
                )
        copy_assets(plan.assets, folder, source=plan.source)
    path, config = folder / CONFIG_FILE, plan.config
    if not path.exists():
        write_hf_config(folder, config, dtype=plan.dtype or DEFAULT_DTYPE)
        return
    if not same_geometry(read_hf_config(folder, has_lm_head=not config.tied_embeddings), config):
        raise WeightsError(
            f"{plan.assets}/{CONFIG_FILE} describes another model than model.json; the carried file was edited"
        )
    if plan.dtype is not None:
        carried = set_dtype(read_json(path), plan.dtype)
        path.write_text(json.dumps(carried, indent=2) + "\n", encoding="utf-8")
