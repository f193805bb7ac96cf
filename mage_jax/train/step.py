"""The supervised step: pure, donated, and exact under micro-batching, packing and device count.

Loss and gradients are *sums* over supervised targets until the very end, where they are divided once by the total
weight. A mean of per-micro-batch means would weigh a target by how many neighbours it happened to be packed with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from mage_jax.config import ComputeConfig, ConfigError, ModelConfig, TrainConfig
from mage_jax.model.mage_vl import forward, output_head
from mage_jax.ops.vocab import LossSums, cross_entropy_sums
from mage_jax.params import Params
from mage_jax.sharding import ROW_AXES, replicated, row_count, rows_sharding
from mage_jax.train.optimizer import Optimizer, applied_updates, merge, partition
from mage_jax.train.state import TrainState, state_shardings
from mage_jax.types import PADDING_SEGMENT, TrainBatch


@flax.struct.dataclass
class StepMetrics:
    """What a step reports. Sums with their denominators; ``summarize`` divides.

    Attributes:
      sums: loss, weight and hits of the whole batch.
      tokens: int32 [] tokens that are not padding.
      grad_norm: l2 norm of the averaged gradient of the trainable weights, before clipping.
      param_norm: l2 norm of all weights after the step.
      update_norm: l2 norm of what was added to them (0 if skipped).
      learning_rate: of this step.
      skipped_updates: int32 [] steps without any supervised target so far, this one included.
    """

    sums: LossSums
    tokens: jax.Array
    grad_norm: jax.Array
    param_norm: jax.Array
    update_norm: jax.Array
    learning_rate: jax.Array
    skipped_updates: jax.Array


def batch_sums(params: Params, batch: TrainBatch, *, model: ModelConfig, compute: ComputeConfig) -> LossSums:
    """Forward pass and loss sums of a batch."""
    hidden = forward(params, batch.rows, config=model, compute=compute).hidden_btd
    with jax.named_scope("loss"), jax.default_matmul_precision(compute.matmul_precision):
        head = output_head(params)
        return cross_entropy_sums(hidden, head, batch.targets_bt, batch.weights_bt, chunk=compute.vocab_chunk)


def split_micro_batches(batch: TrainBatch, count: int) -> TrainBatch:
    """Every leaf [B, ...] -> [count, B / count, ...]; micro-batch m takes the rows m, m + count, m + 2 count, ...

    Strided, not contiguous: each device keeps an equal share of every micro-batch, of the rows it already has.
    """

    def split(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0] // count, count, *x.shape[1:]).swapaxes(0, 1)
        return _constrain(x, P(None, ROW_AXES))

    return jax.tree.map(split, batch)


def gradient_sums(
    trainable: dict[str, Any],
    frozen: dict[str, Any],
    batch: TrainBatch,
    *,
    config: TrainConfig,
    grad_specs: Any = None,
) -> tuple[dict[str, Any], LossSums]:
    """float32 gradient of the loss *sum* with respect to ``trainable``, and the sums, over all micro-batches.

    Args:
      trainable: what is differentiated.
      frozen: the other weights; their backward pass is never built.
      batch: [B, ...] rows; B is a multiple of ``config.micro_batches``.
      config: geometry, compute and number of micro-batches.
      grad_specs: PartitionSpec per trainable weight: keeps the accumulator sharded like the weights.
    """

    def loss_sum(trainable: dict[str, Any], micro: TrainBatch) -> tuple[jax.Array, LossSums]:
        sums = batch_sums(merge(trainable, frozen), micro, model=config.model, compute=config.compute)
        return sums.loss, sums

    def one(micro: TrainBatch) -> tuple[dict[str, Any], LossSums]:
        grads, sums = jax.grad(loss_sum, has_aux=True)(trainable, micro)
        return _constrain_tree(jax.tree.map(lambda g: g.astype(jnp.float32), grads), grad_specs), sums

    if config.micro_batches == 1:
        return one(batch)

    def accumulate(carry: Any, micro: TrainBatch) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, carry, one(micro)), None

    zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable)
    nothing = LossSums(loss=jnp.zeros(()), weight=jnp.zeros(()), correct=jnp.zeros(()))
    start = (_constrain_tree(zeros, grad_specs), nothing)
    total, _ = jax.lax.scan(accumulate, start, split_micro_batches(batch, config.micro_batches))
    return total


def train_step(
    state: TrainState, batch: TrainBatch, *, config: TrainConfig, optimizer: Optimizer, grad_specs: Any = None
) -> tuple[TrainState, StepMetrics]:
    """One update. A batch without any supervised target changes nothing but ``step`` and is counted as skipped."""
    trainable, frozen = partition(state.params, optimizer.config.frozen)
    grads, sums = gradient_sums(trainable, frozen, batch, config=config, grad_specs=grad_specs)
    has_targets = sums.weight > 0
    grads = jax.tree.map(lambda g: g / jnp.where(has_targets, sums.weight, 1.0), grads)
    with jax.named_scope("optimizer"):
        updates, opt_state, rate = optimizer.update(grads, state.opt_state, trainable, step=state.step)
        updates = jax.tree.map(lambda u: jnp.where(has_targets, u, 0.0), updates)
        opt_state = jax.tree.map(lambda new, old: jnp.where(has_targets, new, old), opt_state, state.opt_state)
        trainable = jax.tree.map(lambda p, u: (p.astype(jnp.float32) + u).astype(p.dtype), trainable, updates)
    new = state.replace(step=state.step + 1, params=merge(trainable, frozen), opt_state=opt_state)
    metrics = StepMetrics(
        sums=sums,
        tokens=_token_count(batch),
        grad_norm=optax.tree.norm(grads),
        param_norm=_norm(new.params),
        update_norm=optax.tree.norm(updates),
        learning_rate=rate,
        skipped_updates=new.step - applied_updates(opt_state),
    )
    return new, metrics


def make_train_step(
    config: TrainConfig, *, optimizer: Optimizer, mesh: Mesh
) -> Callable[[TrainState, TrainBatch], tuple[TrainState, StepMetrics]]:
    """``train_step`` jitted for a mesh; the state is donated. Call it inside ``jax.set_mesh(mesh)``.

    Raises:
      ConfigError: the rows cannot be split evenly over micro-batches and devices.
    """
    check_rows(config, mesh)
    shardings = state_shardings(config, optimizer, mesh)
    trainable, _ = partition(shardings.params, optimizer.config.frozen)
    grad_specs = jax.tree.map(lambda sharding: sharding.spec, trainable)
    return jax.jit(
        functools.partial(train_step, config=config, optimizer=optimizer, grad_specs=grad_specs),
        in_shardings=(shardings, rows_sharding(mesh)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def make_eval_step(
    config: TrainConfig, *, optimizer: Optimizer, mesh: Mesh
) -> Callable[[Params, TrainBatch], LossSums]:
    """Jitted (params, batch) -> ``LossSums``, to be added up over batches. Call it inside ``jax.set_mesh(mesh)``."""
    shardings = state_shardings(config, optimizer, mesh)
    return jax.jit(
        functools.partial(batch_sums, model=config.model, compute=config.compute),
        in_shardings=(shardings.params, rows_sharding(mesh)),
        out_shardings=replicated(mesh),
    )


def check_rows(config: TrainConfig, mesh: Mesh) -> None:
    """Raises ``ConfigError`` unless every micro-batch gives each device the same number of rows."""
    ways = row_count(mesh)
    if config.data.rows % (config.micro_batches * ways):
        raise ConfigError(
            f"data.rows: {config.data.rows} rows cannot be split evenly into micro_batches={config.micro_batches}"
            f" over {ways} devices; use a multiple of {config.micro_batches * ways}"
        )


def summarize(metrics: StepMetrics) -> dict[str, float | int]:
    """Host numbers of a step's metrics (already fetched): the one place where sums are divided.

    ``loss`` and ``accuracy`` are absent if the batch had no supervised target.
    """
    weight = float(metrics.sums.weight)
    means = summarize_sums(metrics.sums) if weight else {}
    return {
        **means,
        "grad_norm": float(metrics.grad_norm),
        "param_norm": float(metrics.param_norm),
        "update_norm": float(metrics.update_norm),
        "learning_rate": float(metrics.learning_rate),
        "tokens": int(metrics.tokens),
        "target_weight": weight,
        "skipped_updates": int(metrics.skipped_updates),
    }


def summarize_sums(sums: LossSums) -> dict[str, float]:
    """Mean loss (nats per unit of weight) and accuracy; the weight must not be zero."""
    weight = float(sums.weight)
    return {"loss": float(sums.loss) / weight, "accuracy": float(sums.correct) / weight}


def _token_count(batch: TrainBatch) -> jax.Array:
    return jnp.sum(batch.rows.segment_ids_bt != PADDING_SEGMENT, dtype=jnp.int32)


def _norm(tree: Any) -> jax.Array:
    return optax.tree.norm(jax.tree.map(lambda x: x.astype(jnp.float32), tree))


def _constrain_tree(tree: Any, specs: Any) -> Any:
    return tree if specs is None else jax.tree.map(_constrain, tree, specs)


def _constrain(x: jax.Array, spec: P) -> jax.Array:
    """A sharding constraint where a mesh is set, nothing elsewhere (tests call the pure functions without one)."""
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, spec)
