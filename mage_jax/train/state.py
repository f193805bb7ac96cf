"""What a training step carries, and its abstract tree and shardings, all derived from ``params.declare``."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from mage_jax.config import TrainConfig
from mage_jax.params import Params, abstract_params, init_params
from mage_jax.sharding import param_shardings, replicated
from mage_jax.train.optimizer import Optimizer, partition


@flax.struct.dataclass
class TrainState:
    """Everything that one step turns into the next.

    Attributes:
      step: int32 [] steps taken, whether applied or skipped; the next step's number.
      params: the whole parameter tree, frozen towers included.
      opt_state: optimiser state of the trainable towers only.
      rng: uint32 [2] key data; a step that samples folds ``step`` into it and leaves it unchanged.
    """

    step: jax.Array
    params: Params
    opt_state: optax.OptState
    rng: jax.Array


def state_shardings(config: TrainConfig, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """``NamedSharding`` of each leaf: parameters and their moments alike, everything else replicated."""
    params = param_shardings(config.model, mesh)
    trainable, _ = partition(params, optimizer.config.frozen)
    abstract = jax.eval_shape(optimizer.init, abstract_params(config.model))
    opt_state = optax.tree_utils.tree_map_params(
        optimizer.transform,
        lambda _, sharding: sharding,
        abstract,
        trainable,
        transform_non_params=lambda _: replicated(mesh),
    )
    return TrainState(step=replicated(mesh), params=params, opt_state=opt_state, rng=replicated(mesh))


def abstract_state(config: TrainConfig, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """The state as ``ShapeDtypeStruct`` leaves with their shardings: what a restore or a lowering needs."""
    params = abstract_params(config.model, dtype=config.param_dtype)
    shapes = jax.eval_shape(lambda p: _fresh(config, optimizer, p), params)
    return jax.tree.map(
        lambda shape, sharding: jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding),
        shapes,
        state_shardings(config, optimizer, mesh),
    )


def init_state(config: TrainConfig, optimizer: Optimizer, mesh: Mesh) -> TrainState:
    """A state with random parameters, made directly in its shardings (no host holds it whole)."""

    def init() -> TrainState:
        params = init_params(config.model, jax.random.key(config.seed), dtype=config.param_dtype)
        return _fresh(config, optimizer, params)

    return jax.jit(init, out_shardings=state_shardings(config, optimizer, mesh))()


def state_from_params(config: TrainConfig, optimizer: Optimizer, mesh: Mesh, params: Params) -> TrainState:
    """A state at step 0 around given parameters, which are cast to ``config.param_dtype`` and consumed."""

    def wrap(params: Params) -> TrainState:
        return _fresh(config, optimizer, jax.tree.map(lambda p: p.astype(config.param_dtype), params))

    shardings = state_shardings(config, optimizer, mesh)
    params = jax.device_put(params, shardings.params)
    return jax.jit(wrap, out_shardings=shardings, donate_argnums=0)(params)


def _fresh(config: TrainConfig, optimizer: Optimizer, params: Params) -> TrainState:
    # Kept apart from the key of the initialiser, and as plain uint32 so that a checkpoint holds plain arrays only.
    rng = jax.random.key_data(jax.random.fold_in(jax.random.key(config.seed), 1))
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params), rng=rng)


def bytes_per_device(tree: Any) -> int:
    """Bytes that one device holds of a tree of arrays or sharded ``ShapeDtypeStruct`` leaves."""
    total = 0
    for leaf in jax.tree.leaves(tree):
        shape = leaf.sharding.shard_shape(leaf.shape) if leaf.sharding is not None else leaf.shape
        size = jnp.dtype(leaf.dtype).itemsize
        for dim in shape:
            size *= dim
        total += size
    return total
