"""Hugging Face folder to model folder, streamed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore as ts
from tqdm import tqdm

from mage_jax.config import ModelConfig
from mage_jax.params import declare, flatten
from mage_jax.weights.atomic import atomic_folder
from mage_jax.weights.errors import HfConfigError
from mage_jax.weights.hf_config import CONFIG_FILE, read_hf_config
from mage_jax.weights.model_dir import ASSETS, copy_assets, describe_source, write_model_file
from mage_jax.weights.names import LM_HEAD, Slot, match
from mage_jax.weights.orbax_store import StoreWriter
from mage_jax.weights.safetensors_io import NUMPY_DTYPES, SafetensorsFolder

_BUFFERS = 2  # one is filled while the other is written


@dataclasses.dataclass(frozen=True)
class HfWeights:
    """A Hugging Face folder whose tensors and config are known to fit.

    Attributes:
      files: the open weight files.
      config: geometry.
      slots: checkpoint name -> place in the parameters.
      dtypes: parameter path -> stored dtype.
    """

    files: SafetensorsFolder
    config: ModelConfig
    slots: dict[str, Slot]
    dtypes: dict[str, np.dtype]


def open_hf(folder: str | Path) -> HfWeights:
    """Reads config, index and headers of a folder and checks them against each other; no data is read.

    Raises:
      HfConfigError: the config is incomplete or unsupported.
      SafetensorsError: a weight file is damaged.
      MismatchError: tensors do not fit the geometry; all disagreements are listed.
    """
    folder = Path(folder)
    if not (folder / CONFIG_FILE).is_file():
        raise HfConfigError(f"{folder / CONFIG_FILE} does not exist; not a Hugging Face model folder")
    files = SafetensorsFolder(folder)
    config = read_hf_config(folder, has_lm_head=LM_HEAD in files.tensors)
    matched = match(config, files.tensors, where=files.where)
    dtypes = {slot.path: NUMPY_DTYPES[files.tensors[slot.name].dtype] for slot in matched}
    return HfWeights(files, config, {slot.name: slot for slot in matched}, dtypes)


def import_hf(hf: str | Path, out: str | Path, *, progress: bool = False) -> None:
    """Converts a Hugging Face folder to a model folder, bit for bit and piece by piece.

    Args:
      hf: folder with ``config.json`` and safetensors files.
      out: model folder to create; on any error it stays absent.
      progress: show a progress bar.

    Raises:
      WeightsError: the input is damaged, incomplete or unsupported, or ``out`` exists.
      OSError: the disk is full.
    """
    weights = open_hf(hf)
    with weights.files:
        _import(weights, Path(hf), Path(out), progress)


def _import(weights: HfWeights, hf: Path, out: Path, progress: bool) -> None:
    source = describe_source(weights.files)
    specs = flatten(declare(weights.config))
    arrays = {path: (spec.shape, weights.dtypes[path], spec.axes[0] == "layer") for path, spec in specs.items()}
    with atomic_folder(out, need_bytes=source["total_size"]) as folder:
        writer = StoreWriter(folder, arrays)
        _copy_tensors(weights, writer, progress=progress)
        writer.finish()
        copy_assets(hf, folder / ASSETS, source=source)
        write_model_file(folder, config=weights.config, source=source)


def _copy_tensors(weights: HfWeights, writer: StoreWriter, *, progress: bool) -> None:
    buffers = [np.empty(0, np.uint8)] * _BUFFERS
    writes: list[ts.Future | None] = [None] * _BUFFERS
    turn = 0
    bar = tqdm(total=weights.files.total_size, unit="B", unit_scale=True, desc="to orbax", disable=not progress)
    try:
        for tensor in weights.files.tensors.values():  # in order of data on the disk
            slot = weights.slots[tensor.name]
            dtype = weights.dtypes[slot.path]
            for index, shape, start in _pieces(slot, writer.chunks[slot.path], dtype.itemsize):
                turn = (turn + 1) % _BUFFERS
                if (pending := writes[turn]) is not None:
                    pending.result()
                nbytes = math.prod(shape) * dtype.itemsize
                if buffers[turn].nbytes < nbytes:
                    buffers[turn] = np.empty(nbytes, np.uint8)
                values = buffers[turn][:nbytes].view(dtype).reshape(shape)
                weights.files.read_into(tensor, values, start=start)
                writes[turn] = writer.write(slot.path, index, values)
                bar.update(nbytes)
        for pending in writes:
            if pending is not None:
                pending.result()
    finally:
        bar.close()
        # After an error, no write may still be under way when the folder is removed.
        for pending in writes:
            if pending is not None:
                pending.exception()


def _pieces(
    slot: Slot, chunk: tuple[int, ...], itemsize: int
) -> Iterator[tuple[tuple[Any, ...], tuple[int, ...], int]]:
    """A tensor's chunks as (index in the parameter, shape, first byte in the tensor)."""
    lead = () if slot.layer is None else (slot.layer,)
    rows = chunk[len(lead)]
    row_bytes = slot.count // slot.shape[0] * itemsize
    for start in range(0, slot.shape[0], rows):
        stop = min(start + rows, slot.shape[0])
        yield (*lead, slice(start, stop)), (stop - start, *slot.shape[1:]), start * row_bytes
