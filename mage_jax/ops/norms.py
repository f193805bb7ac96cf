"""Normalisations. Statistics in float32 whatever the activations' type."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def layer_norm(x: jax.Array, scale_d: jax.Array, bias_d: jax.Array, *, eps: float) -> jax.Array:
    """LayerNorm over the last axis; ``x`` [..., D] keeps its dtype."""
    x32 = x.astype(jnp.float32)
    centred = x32 - jnp.mean(x32, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    y = centred * jax.lax.rsqrt(variance + eps)
    return (y * scale_d.astype(jnp.float32) + bias_d.astype(jnp.float32)).astype(x.dtype)


def rms_norm(x: jax.Array, scale_d: jax.Array, *, eps: float) -> jax.Array:
    """RMSNorm over the last axis: float32 statistics, cast to the input's dtype, then times the weight (as Qwen3)."""
    x32 = x.astype(jnp.float32)
    y = x32 * jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + eps)
    return y.astype(x.dtype) * scale_d.astype(x.dtype)
