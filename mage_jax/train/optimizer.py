"""AdamW with linear warm-up and cosine decay, global-norm clipping, decay masks and frozen towers.

A frozen tower is not an optimiser setting: its weights leave the tree *before* differentiation, so that they have no
gradient, no moments, no decay, and cannot change by a bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from mage_jax.config import TOWERS, ConfigError, ModelConfig, OptimizerConfig
from mage_jax.params import Params, declare, flatten, map_specs, unflatten


def tower_of(path: str) -> str:
    """Tower of a dotted parameter path: "vision", "merger", "text" or "lm_head"."""
    head = path.split(".")[0]
    return "lm_head" if head == "lm_head_vd" else head


def partition(params: Any, frozen: tuple[str, ...]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Splits a parameter-shaped tree into (trainable, frozen) trees; ``merge`` joins them again."""
    flat = flatten(params)
    trainable = {path: leaf for path, leaf in flat.items() if tower_of(path) not in frozen}
    return unflatten(trainable), unflatten({path: leaf for path, leaf in flat.items() if path not in trainable})


def merge(trainable: dict[str, Any], frozen: dict[str, Any]) -> Params:
    """Inverse of ``partition``: no weight is in both, and towers are whole in one of them."""
    return {**trainable, **frozen}


@dataclasses.dataclass(frozen=True)
class Optimizer:
    """The update rule of a run; hashable by identity, holds no arrays.

    Attributes:
      config: its numbers.
      total_steps: length of the schedule.
      transform: optax chain from averaged float32 gradients to the update *before* the learning rate.
    """

    config: OptimizerConfig
    total_steps: int
    transform: optax.GradientTransformation

    def learning_rate(self, step: jax.Array) -> jax.Array:
        """float32 learning rate of the update number ``step`` (from 0). The first is not zero, the last is the end.

        A function of the step alone, so that a skipped update or a resume cannot shift the schedule.
        """
        c = self.config
        done = step.astype(jnp.float32) + 1.0
        warmup = done / max(c.warmup_steps, 1)
        progress = jnp.clip((done - c.warmup_steps) / max(self.total_steps - c.warmup_steps, 1), 0.0, 1.0)
        cosine = c.end_lr_ratio + (1.0 - c.end_lr_ratio) * 0.5 * (1.0 + jnp.cos(jnp.pi * progress))
        return c.learning_rate * jnp.where(done <= c.warmup_steps, warmup, cosine)

    def init(self, params: Params) -> optax.OptState:
        """Optimiser state for the trainable part of ``params``. Moments are float32 whatever the parameters are."""
        trainable, _ = partition(params, self.config.frozen)
        return self.transform.init(jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), trainable))

    def update(
        self, grads: dict[str, Any], opt_state: optax.OptState, trainable: dict[str, Any], *, step: jax.Array
    ) -> tuple[dict[str, Any], optax.OptState, jax.Array]:
        """One update.

        Args:
          grads: float32 averaged gradients of the trainable tree.
          opt_state: state from ``init`` or the previous update.
          trainable: trainable parameters, any dtype.
          step: int32 [] number of the update, from 0.

        Returns:
          float32 updates to add to the parameters, the next state, and the learning rate used.
        """
        rate = self.learning_rate(step)
        wide = jax.tree.map(lambda p: p.astype(jnp.float32), trainable)
        directions, opt_state = self.transform.update(grads, opt_state, wide)
        return jax.tree.map(lambda d: -rate * d, directions), opt_state, rate


def make_optimizer(config: OptimizerConfig, *, model: ModelConfig, total_steps: int) -> Optimizer:
    """AdamW for a model.

    Raises:
      ConfigError: ``frozen`` names the output head of a tied model, or leaves nothing to train.
    """
    if model.tied_embeddings and "lm_head" in config.frozen:
        raise ConfigError(
            "optimizer.frozen: 'lm_head' cannot be frozen by itself in this model, whose output head is the input"
            " embedding; freeze 'text', or use a model with tied_embeddings=False"
        )
    present = {tower_of(path) for path in flatten(declare(model))}
    if present <= set(config.frozen):
        raise ConfigError(f"optimizer.frozen: {config.frozen} are all towers of this model: nothing to train")
    decay, _ = partition(map_specs(lambda spec: spec.decay, declare(model)), config.frozen)
    steps = [optax.scale_by_adam(b1=config.beta1, b2=config.beta2, eps=config.eps)]
    if config.clip_norm:
        steps.insert(0, optax.clip_by_global_norm(config.clip_norm))
    if config.weight_decay:
        steps.append(optax.add_decayed_weights(config.weight_decay, mask=decay))
    return Optimizer(config=config, total_steps=total_steps, transform=optax.chain(*steps))


def applied_updates(opt_state: optax.OptState) -> jax.Array:
    """int32 [] number of updates that were applied (steps less skipped ones)."""
    return optax.tree_utils.tree_get(opt_state, "count")


def parameter_table(model: ModelConfig, frozen: tuple[str, ...]) -> str:
    """Parameters per tower, and which are frozen, as aligned text."""
    counts = dict.fromkeys(TOWERS, 0)
    for path, spec in flatten(declare(model)).items():
        size = 1
        for dim in spec.shape:
            size *= dim
        counts[tower_of(path)] += size
    lines = [f"{'tower':<10}{'parameters':>16}  trained"]
    for tower, count in counts.items():
        if tower == "lm_head" and not count:
            lines.append(f"{tower:<10}{'tied':>16}  with text")
        else:
            lines.append(f"{tower:<10}{count:>16,}  {'frozen' if tower in frozen else 'yes'}")
    trained = sum(count for tower, count in counts.items() if tower not in frozen)
    lines.append(f"{'total':<10}{sum(counts.values()):>16,}  {trained:,}")
    return "\n".join(lines)
