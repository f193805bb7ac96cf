"""Any checkpoint to parameters in memory, on the devices where they belong."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from orbax.checkpoint import v1 as ocp

from mage_jax.config import ModelConfig
from mage_jax.params import Params, declare, flatten, unflatten
from mage_jax.weights.errors import WeightsError
from mage_jax.weights.hf_import import HfWeights, open_hf
from mage_jax.weights.model_dir import Resolved, describe_source, read_model_file, resolve
from mage_jax.weights.names import Slot
from mage_jax.weights.orbax_store import ITEM, StoreReader, check_store

_READ_BYTES = 2 << 30  # what orbax may hold besides the parameters

Bounds = tuple[tuple[int, int], ...]  # (start, stop) per axis


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A checkpoint in memory.

    Attributes:
      params: parameter tree of jax arrays (structure: ``mage_jax.params.declare``).
      config: its geometry.
      assets: folder with tokenizer and other carried files; it may be absent for a run that was born here.
      source: which Hugging Face files the weights came from (see ``describe_source``); None if born here.
    """

    params: Params
    config: ModelConfig
    assets: Path
    source: dict[str, Any] | None


def read_config(path: str | Path) -> ModelConfig:
    """Geometry of any resolvable checkpoint, without reading weights.

    Raises:
      WeightsError: not a checkpoint, or damaged.
    """
    found = resolve(path)
    if found.kind != "hf":
        return read_model_file(found.root)[0]
    weights = open_hf(found.checkpoint)
    weights.files.close()
    return weights.config


def load_model(path: str | Path, *, dtype: Any = None, shardings: Any = None) -> LoadedModel:
    """Loads a model, run, step or Hugging Face folder.

    Only the values that this process's devices hold are kept, plus one tensor being read.

    Args:
      path: see ``mage_jax.weights.model_dir.resolve``.
      dtype: cast every parameter; None keeps what is stored.
      shardings: tree of shardings with the parameters' structure (``mage_jax.sharding.param_shardings``); None puts
        everything on the default device.

    Raises:
      WeightsError: not a checkpoint, damaged, or its arrays do not fit its geometry.
      ValueError: ``shardings`` has another structure than the parameters.
    """
    found = resolve(path)
    if found.kind == "hf":
        weights = open_hf(found.checkpoint)
        with weights.files:
            flat = _placements(weights.config, shardings)
            params = unflatten({p: a for p, a in _load_hf(weights, flat, dtype)})
            return LoadedModel(params, weights.config, found.assets, describe_source(weights.files))
    config, source = read_model_file(found.root)
    params = _load_orbax(found, config, _placements(config, shardings), dtype)
    return LoadedModel(params, config, found.assets, source)


def _placements(config: ModelConfig, shardings: Any) -> dict[str, Any]:
    specs = flatten(declare(config))
    if shardings is None:
        device = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
        return dict.fromkeys(specs, device)
    flat = flatten(shardings)
    if set(flat) != set(specs):
        raise ValueError(f"shardings and parameters differ in structure: {sorted(set(flat) ^ set(specs))}")
    return {path: flat[path] for path in specs}


def _load_orbax(found: Resolved, config: ModelConfig, placements: dict[str, Any], dtype: Any) -> Params:
    reader = StoreReader(found.checkpoint)
    check_store(reader, config)
    abstract = {
        path: jax.ShapeDtypeStruct(shape, dtype or stored, sharding=placements[path])
        for path, (shape, stored) in reader.arrays.items()
    }
    ordered = unflatten({path: abstract[path] for path in placements})
    context = ocp.Context()
    # Orbax refuses an array that alone passes its limit.
    largest = max(
        reader.padded_count(path) * max(stored.itemsize, abstract[path].dtype.itemsize)
        for path, (_, stored) in reader.arrays.items()
    )
    context.memory.read_concurrent_bytes = max(_READ_BYTES, largest + 1)
    try:
        with context:
            flat = flatten(ocp.load_checkpointables(found.checkpoint, {ITEM: ordered})[ITEM])
    except Exception as e:  # orbax wraps whatever its storage raises
        raise WeightsError(f"{found.checkpoint / ITEM}: cannot be restored: {e} ({e.__cause__})") from e
    return unflatten({path: flat[path] for path in placements})


def _load_hf(weights: HfWeights, placements: dict[str, Any], dtype: Any) -> Iterable[tuple[str, jax.Array]]:
    by_path: dict[str, list[Slot]] = {}
    for slot in weights.slots.values():
        by_path.setdefault(slot.path, []).append(slot)
    specs = flatten(declare(weights.config))
    for path, sharding in placements.items():
        target = np.dtype(dtype or weights.dtypes[path])
        yield path, _gather(weights, by_path[path], specs[path].shape, target, sharding)


def _gather(
    weights: HfWeights, members: list[Slot], shape: tuple[int, ...], dtype: np.dtype, sharding: Any
) -> jax.Array:
    """One parameter: every tensor is read once and its parts copied to the local shards that hold them."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    shards: dict[Bounds, np.ndarray] = {}
    for bounds in {_bounds(index, shape) for index in indices}:
        shards[bounds] = np.empty([stop - start for start, stop in bounds], dtype)
    for slot in members:
        wanted = {
            bounds: shard
            for bounds, shard in shards.items()
            if slot.layer is None or bounds[0][0] <= slot.layer < bounds[0][1]
        }
        if not wanted:
            continue
        values = weights.files.read(slot.name).reshape(slot.shape)
        for bounds, shard in wanted.items():
            inner = bounds if slot.layer is None else bounds[1:]
            part = values[tuple(slice(start, stop) for start, stop in inner)]
            if slot.layer is None:
                shard[...] = part
            else:
                shard[slot.layer - bounds[0][0]] = part
    array = jax.make_array_from_callback(shape, sharding, lambda index: shards[_bounds(index, shape)])
    return array.block_until_ready()  # or the next parameter would be read while this one's host copy still exists


def _bounds(index: Any, shape: tuple[int, ...]) -> Bounds:
    return tuple(s.indices(size)[:2] for s, size in zip(index, shape, strict=True))
