"""Qwen3 decoder layer: pre-norm GQA with normalised queries and keys, then SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from mage_jax.config import TextConfig
from mage_jax.model.layers import matmul
from mage_jax.ops.norms import rms_norm
from mage_jax.ops.rotary import rotate_half_split

# (q_btnh, k_btkh, v_btkh) -> [B, T, N, H]
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def decoder_layer(
    p: dict[str, Any], x_btd: jax.Array, angles_bth: jax.Array, attend: Attend, *, config: TextConfig
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    """One layer.

    Args:
      p: parameters of this layer.
      x_btd: residual stream [B, T, D].
      angles_bth: rotary angles [B, T, H/2].
      attend: the attention proper; training masks segments, decoding reads a cache.
      config: geometry.

    Returns:
      The residual stream, and this layer's rotated keys and values [B, T, K, H] (for a cache).
    """
    with jax.named_scope("attention"):
        y = rms_norm(x_btd, p["attn_norm_d"], eps=config.rms_norm_eps)
        q = matmul("btd,nhd->btnh", y, p["attn"]["q_nhd"])
        k = matmul("btd,khd->btkh", y, p["attn"]["k_khd"])
        v = matmul("btd,khd->btkh", y, p["attn"]["v_khd"])
        q = rotate_half_split(rms_norm(q, p["attn"]["q_norm_h"], eps=config.rms_norm_eps), angles_bth)
        k = rotate_half_split(rms_norm(k, p["attn"]["k_norm_h"], eps=config.rms_norm_eps), angles_bth)
        x_btd = x_btd + matmul("btnh,dnh->btd", attend(q, k, v), p["attn"]["o_dnh"])
    with jax.named_scope("mlp"):
        y = rms_norm(x_btd, p["mlp_norm_d"], eps=config.rms_norm_eps)
        gate = jax.nn.silu(matmul("btd,fd->btf", y, p["mlp"]["gate_fd"]))
        up = matmul("btd,fd->btf", y, p["mlp"]["up_fd"])
        x_btd = x_btd + matmul("btf,df->btd", gate * up, p["mlp"]["down_df"])
    return x_btd, (k, v)
