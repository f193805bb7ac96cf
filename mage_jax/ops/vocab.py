"""The vocabulary projection in chunks over the sequence: the full [B, T, V] logits never exist.

One function serves the supervised loss (weighted cross-entropy) and reinforcement learning (per-token log-probs).
"""

from __future__ import annotations

import functools

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class TokenStats:
    """Per-target quantities, float32 [B, T] each.

    Attributes:
      logp_bt: log-probability of the target.
      entropy_bt: entropy of the predicted distribution, nats (gradient stopped).
      correct_bt: 1 where the target is the most likely token.
    """

    logp_bt: jax.Array
    entropy_bt: jax.Array
    correct_bt: jax.Array


@flax.struct.dataclass
class LossSums:
    """Sums, never means: they add up over micro-batches, rows and devices, and are divided once.

    Attributes:
      loss: sum of weight * cross-entropy, nats.
      weight: sum of weights.
      correct: sum of weight * (target is the most likely token).
    """

    loss: jax.Array
    weight: jax.Array
    correct: jax.Array


def token_stats(
    hidden_btd: jax.Array, head_vd: jax.Array, targets_bt: jax.Array, *, chunk: int, temperature: float = 1.0
) -> TokenStats:
    """Log-probability, entropy and hit of each target.

    Args:
      hidden_btd: final hidden states [B, T, D].
      head_vd: output embedding [V, D].
      targets_bt: int32 [B, T], each in [0, V).
      chunk: sequence positions whose logits exist at a time; need not divide T. The backward recomputes them.
      temperature: divides the logits.
    """
    batch, length, _ = hidden_btd.shape
    chunk = min(chunk, length)
    pad = -length % chunk
    steps = (length + pad) // chunk
    hidden = jnp.pad(hidden_btd, ((0, 0), (0, pad), (0, 0))).reshape(batch, steps, chunk, -1)
    targets = jnp.pad(targets_bt, ((0, 0), (0, pad))).reshape(batch, steps, chunk)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(_, xs):
        hidden_bcd, targets_bc = xs
        logits = jnp.einsum(
            "bcd,vd->bcv", hidden_bcd, head_vd.astype(hidden_bcd.dtype), preferred_element_type=jnp.float32
        )
        logits = logits / temperature
        log_z = jax.nn.logsumexp(logits, axis=-1)
        logp = jnp.take_along_axis(logits, targets_bc[..., None], axis=-1)[..., 0] - log_z
        frozen = jax.lax.stop_gradient(logits)
        log_p = frozen - jax.lax.stop_gradient(log_z)[..., None]  # subtract first: z - sum(p * logits) cancels badly
        entropy = -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)
        correct = (jnp.argmax(frozen, axis=-1) == targets_bc).astype(jnp.float32)
        return None, TokenStats(logp_bt=logp, entropy_bt=entropy, correct_bt=correct)

    _, stats = jax.lax.scan(one_chunk, None, (jnp.moveaxis(hidden, 1, 0), jnp.moveaxis(targets, 1, 0)))
    return jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1).reshape(batch, length + pad)[:, :length], stats)


def cross_entropy_sums(
    hidden_btd: jax.Array, head_vd: jax.Array, targets_bt: jax.Array, weights_bt: jax.Array, *, chunk: int
) -> LossSums:
    """Weighted cross-entropy as sums. A target of weight 0 contributes nothing, whatever its value."""
    stats = token_stats(hidden_btd, head_vd, targets_bt, chunk=chunk)
    # where, not a product: a non-finite log-prob of an unsupervised token must not reach the sum.
    used = weights_bt > 0
    return LossSums(
        loss=jnp.sum(jnp.where(used, -stats.logp_bt * weights_bt, 0.0)),
        weight=jnp.sum(weights_bt),
        correct=jnp.sum(jnp.where(used, stats.correct_bt * weights_bt, 0.0)),
    )
