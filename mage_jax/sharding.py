"""Mesh, axis types and the rules that map logical axes to mesh axes. The one place where they are written.

Rows are split over ``data`` and ``fsdp``; parameters and optimiser state are sharded over ``fsdp`` along their
``embed`` axis. Axis types are Auto: XLA partitions the step from the shardings of its inputs and the constraints in
the model.
"""

from __future__ import annotations

import math
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from mage_jax.config import ConfigError, MeshConfig, ModelConfig
from mage_jax.params import ParamSpec, declare, map_specs

AXES = ("data", "fsdp")
ROW_AXES = ("data", "fsdp")  # mesh axes that split a batch's rows

# Logical axis -> mesh axis. Axes not named here are never sharded.
RULES: dict[str, str] = {"embed": "fsdp"}


def make_mesh(config: MeshConfig, devices: list[Any] | None = None) -> Mesh:
    """The device mesh of a run.

    Raises:
      ConfigError: the axis sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp]
    if -1 in sizes:
        known = -math.prod(sizes)
        if len(devices) % known:
            raise ConfigError(f"mesh: {len(devices)} devices cannot be split into groups of {known}")
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise ConfigError(f"mesh: data {sizes[0]} x fsdp {sizes[1]} is not the {len(devices)} devices present")
    return jax.make_mesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES), devices=devices)


def param_spec(spec: ParamSpec, mesh: Mesh) -> P:
    """Partition of one weight. An axis that the mesh axis does not divide stays whole.

    Raises:
      ValueError: two logical axes of the weight land on one mesh axis.
    """
    names: list[str | None] = []
    for size, axis in zip(spec.shape, spec.axes, strict=True):
        target = RULES.get(axis) if axis else None
        names.append(target if target and size % mesh.shape[target] == 0 else None)
    used = [n for n in names if n]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {spec.axes} map twice to one mesh axis: {names}")
    return P(*names)


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, Any]:
    """Tree of ``NamedSharding`` with the structure of the parameters."""
    return map_specs(lambda s: NamedSharding(mesh, param_spec(s, mesh)), declare(config))


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of every leaf of a batch: rows over the row axes."""
    return NamedSharding(mesh, P(ROW_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def row_count(mesh: Mesh) -> int:
    """How many ways a batch's rows are split."""
    return math.prod(mesh.shape[a] for a in ROW_AXES)


def constrain_rows(x: jax.Array) -> jax.Array:
    """Keeps an activation [B, ...] split by rows; does nothing outside ``jax.set_mesh``."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or not set(ROW_AXES) <= set(mesh.axis_names):
        return x
    return jax.lax.with_sharding_constraint(x, P(ROW_AXES))
