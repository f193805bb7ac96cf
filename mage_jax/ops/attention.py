"""Attention over packed rows: one entry, several implementations with the same mask.

A query attends to a key of its own segment that does not come later in the row (``causal``), or to its whole segment.
Segment 0 is padding: it attends to nothing, yields zeros, and nobody attends to it.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from mage_jax.types import PADDING_SEGMENT

_MASKED = -1e30  # finite, so that a fully masked row stays free of NaN


def attention(
    q_btnh: jax.Array,
    k_bskh: jax.Array,
    v_bskh: jax.Array,
    *,
    q_segments_bt: jax.Array,
    kv_segments_bs: jax.Array,
    causal: bool,
    impl: str = "xla",
    chunk: int = 512,
) -> jax.Array:
    """Grouped-query attention with segment masking; query head j reads key-value head j // (N / K).

    Args:
      q_btnh: queries [B, T, N, H]; scaled by H**-0.5 here.
      k_bskh: keys [B, S, K, H].
      v_bskh: values [B, S, K, H].
      q_segments_bt: int32 [B, T] segment of each query.
      kv_segments_bs: int32 [B, S] segment of each key.
      causal: whether key index must not exceed query index (T and S then index the same row).
      impl: "xla" builds all T x S scores at once, "xla_chunked" ``chunk`` query rows at a time, recomputed in the
        backward.
      chunk: query rows at a time for "xla_chunked".

    Returns:
      [B, T, N, H] in the queries' dtype. Softmax in float32.
    """
    length = q_btnh.shape[1]
    q_index_t = jnp.arange(length, dtype=jnp.int32)
    if impl == "xla" or (impl == "xla_chunked" and length <= chunk):
        return _dense(q_btnh, q_segments_bt, q_index_t, k_bskh, v_bskh, kv_segments_bs, causal=causal)
    if impl != "xla_chunked":
        raise ValueError(f"attention: unknown implementation {impl!r}")

    pad = -length % chunk
    steps = (length + pad) // chunk
    q = jnp.pad(q_btnh, ((0, 0), (0, pad), (0, 0), (0, 0))).reshape(q_btnh.shape[0], steps, chunk, *q_btnh.shape[2:])
    segments = jnp.pad(q_segments_bt, ((0, 0), (0, pad))).reshape(-1, steps, chunk)
    index = jnp.arange(length + pad, dtype=jnp.int32).reshape(steps, chunk)

    @functools.partial(jax.checkpoint, prevent_cse=False)
    def one_chunk(_, xs):
        q_chunk, segments_chunk, index_chunk = xs
        out = _dense(q_chunk, segments_chunk, index_chunk, k_bskh, v_bskh, kv_segments_bs, causal=causal)
        return None, out

    _, out = jax.lax.scan(one_chunk, None, (jnp.moveaxis(q, 1, 0), jnp.moveaxis(segments, 1, 0), index))
    return jnp.moveaxis(out, 0, 1).reshape(q_btnh.shape[0], length + pad, *q_btnh.shape[2:])[:, :length]


def _dense(q_btnh, q_segments_bt, q_index_t, k_bskh, v_bskh, kv_segments_bs, *, causal):
    mask_bts = (q_segments_bt[:, :, None] == kv_segments_bs[:, None, :]) & (
        q_segments_bt[:, :, None] != PADDING_SEGMENT
    )
    if causal:
        k_index_s = jnp.arange(k_bskh.shape[1], dtype=jnp.int32)
        mask_bts &= k_index_s[None, None, :] <= q_index_t[None, :, None]
    kv_heads = k_bskh.shape[2]
    q = q_btnh.reshape(*q_btnh.shape[:2], kv_heads, -1, q_btnh.shape[-1])
    scores = jnp.einsum("btkgh,bskh->bkgts", q, k_bskh, preferred_element_type=jnp.float32)
    weights = _masked_softmax(scores * q_btnh.shape[-1] ** -0.5, mask_bts[:, None, None])
    out = jnp.einsum("bkgts,bskh->btkgh", weights.astype(v_bskh.dtype), v_bskh)
    return out.reshape(q_btnh.shape).astype(q_btnh.dtype)


def decode_attention(q_bnh: jax.Array, k_bksh: jax.Array, v_bksh: jax.Array, *, visible_bs: jax.Array) -> jax.Array:
    """One query per row against a cache laid out [B, K, S, H]; ``visible_bs`` marks the slots it may read.

    Returns [B, N, H]. The layout keeps each head's keys contiguous, so that no step transposes the cache.
    """
    kv_heads, head_dim = k_bksh.shape[1], q_bnh.shape[-1]
    q = q_bnh.reshape(q_bnh.shape[0], kv_heads, -1, head_dim)
    scores = jnp.einsum("bkgh,bksh->bkgs", q, k_bksh, preferred_element_type=jnp.float32)
    weights = _masked_softmax(scores * head_dim**-0.5, visible_bs[:, None, None, :])
    out = jnp.einsum("bkgs,bksh->bkgh", weights.astype(v_bksh.dtype), v_bksh)
    return out.reshape(q_bnh.shape).astype(q_bnh.dtype)


def _masked_softmax(scores: jax.Array, mask: jax.Array) -> jax.Array:
    """Softmax over the last axis of float32 scores; rows without any key give zeros."""
    weights = jax.nn.softmax(jnp.where(mask, scores, _MASKED), axis=-1)
    return jnp.where(jnp.any(mask, axis=-1, keepdims=True), weights, 0.0)
