"""Hugging Face folder to model folder, streamed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
from tqdm import tqdm

from mage_jax.config import ModelConfig
from mage_jax.params import declare, flatten
from mage_jax.weights.atomic import atomic_folder
from mage_jax.weights.errors import HfConfigError, SafetensorsError
from mage_jax.weights.hf_config import CONFIG_FILE, read_hf_config
from mage_jax.weights.model_dir import ASSETS, copy_assets, describe_source, write_model_file
from mage_jax.weights.names import LM_HEAD, Slot, check_layer_counts, match
from mage_jax.weights.orbax_store import StoreWriter
from mage_jax.weights.safetensors_io import NUMPY_DTYPES, SafetensorsFolder


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
    if not folder.is_dir():
        raise HfConfigError(f"{folder} {'is not a folder' if folder.exists() else 'does not exist'}")
    if not (folder / CONFIG_FILE).is_file():
        raise HfConfigError(f"{folder / CONFIG_FILE} does not exist; not a Hugging Face model folder")
    files = SafetensorsFolder(folder)
    config = read_hf_config(folder, has_lm_head=LM_HEAD in files.tensors)
    check_layer_counts(config, files.tensors, where=str(folder / CONFIG_FILE))
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
    with atomic_folder(out, need_bytes=source["total_size"], copied=hf) as folder:
        copy_assets(hf, folder / ASSETS, source=source)
        writer = StoreWriter(folder, arrays)
        _copy_tensors(weights, writer, progress=progress)
        writer.finish()
        write_model_file(folder, config=weights.config, source=source)


def _copy_tensors(weights: HfWeights, writer: StoreWriter, *, progress: bool) -> None:
    total = weights.files.total_size
    with tqdm(total=total, unit="B", unit_scale=True, desc="to orbax", disable=not progress) as bar:
        for tensor in weights.files.tensors.values():  # in order of data on the disk
            slot = weights.slots[tensor.name]
            handle = weights.files.handle(tensor)
            start = (slot.layer or 0) * tensor.nbytes
            try:
                writer.copy(slot.path, start, tensor.nbytes, source=handle, offset=tensor.offset)
            except EOFError as e:
                raise SafetensorsError(f"{weights.files.path / tensor.file}: tensor {tensor.name} {e}") from e
            bar.update(tensor.nbytes)
