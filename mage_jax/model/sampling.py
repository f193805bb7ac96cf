"""Next-token choice: greedy, temperature, top-k, top-p; each row of a batch has its own settings."""

from __future__ import annotations

import dataclasses
import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Settings of one request. ``temperature=0`` is greedy; ``top_k=0`` and ``top_p=1`` cut nothing."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature: must be 0 (greedy) or a positive number, got {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be in (0, 1], got {self.top_p}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k: must be 0 (off) or a positive 32-bit number, got {self.top_k}")


@flax.struct.dataclass
class SamplingArrays:
    """``Sampling`` of every row, [B] each."""

    temperature_b: jax.Array
    top_p_b: jax.Array
    top_k_b: jax.Array
    seed_b: jax.Array

    @classmethod
    def of(cls, settings: list[Sampling]) -> SamplingArrays:
        return cls(
            temperature_b=np.array([s.temperature for s in settings], np.float32),
            top_p_b=np.array([s.top_p for s in settings], np.float32),
            top_k_b=np.array([s.top_k for s in settings], np.int32),
            seed_b=np.array([s.seed & 0x7FFFFFFF for s in settings], np.int32),
        )


def sample(logits_bv: jax.Array, settings: SamplingArrays, step: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Chooses one token per row.

    Args:
      logits_bv: float32 [B, V].
      settings: per-row settings.
      step: int32 scalar; a row's draw depends on its own seed and the step only, never on its neighbours.

    Returns:
      int32 [B] tokens, and float32 [B] their log-probability under the row's temperature *before* top-k and top-p
      (temperature 1 for greedy rows): what an importance ratio needs.
    """
    greedy_b = settings.temperature_b == 0
    # The best token at 0, so that a tiny temperature drives the others to -inf and never overflows to +inf. It is kept
    # a normal number: the hardware flushes smaller ones to zero.
    temperature_b = jnp.where(greedy_b, 1.0, jnp.maximum(settings.temperature_b, 1e-30))
    scaled = (logits_bv - jnp.max(logits_bv, axis=-1, keepdims=True)) / temperature_b[:, None]
    logp = jax.nn.log_softmax(scaled, axis=-1)

    def draw(logp: jax.Array) -> jax.Array:
        kept = jnp.where(_keep(logp, settings.top_k_b, settings.top_p_b), logp, -jnp.inf)
        keys = jax.vmap(lambda seed: jax.random.fold_in(jax.random.key(seed), step))(settings.seed_b)
        return jax.vmap(jax.random.categorical)(keys, kept).astype(jnp.int32)

    best = jnp.argmax(logits_bv, axis=-1).astype(jnp.int32)
    # The sort over the vocabulary is skipped at run time when every row is greedy.
    drawn = jax.lax.cond(jnp.all(greedy_b), lambda _: best, draw, logp)
    tokens = jnp.where(greedy_b, best, drawn)
    return tokens, jnp.take_along_axis(logp, tokens[:, None], axis=-1)[:, 0]


def _keep(logp_bv: jax.Array, top_k_b: jax.Array, top_p_b: jax.Array) -> jax.Array:
    """Tokens that survive top-k, and among those top-p (renormalised, the first token over the threshold kept)."""
    order = jnp.argsort(-logp_bv, axis=-1)
    ranked = jnp.take_along_axis(logp_bv, order, axis=-1)
    vocab = logp_bv.shape[-1]
    k = jnp.where(top_k_b > 0, jnp.minimum(top_k_b, vocab), vocab)
    in_k = jnp.arange(vocab)[None, :] < k[:, None]
    probs = jax.nn.softmax(jnp.where(in_k, ranked, -jnp.inf), axis=-1)
    before = jnp.cumsum(probs, axis=-1) - probs
    keep_ranked = in_k & ((before < top_p_b[:, None]) | (top_p_b[:, None] >= 1.0))
    keep_ranked = keep_ranked.at[:, 0].set(True)
    rows = jnp.arange(logp_bv.shape[0])[:, None]
    return jnp.zeros_like(keep_ranked).at[rows, order].set(keep_ranked)
