"""Mage-ViT and the merger: patches of packed rows to visual tokens of the decoder's width."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from mage_jax.config import PIXEL_MEAN, PIXEL_STD, ComputeConfig, VisionConfig
from mage_jax.model.layers import matmul, run_layers
from mage_jax.ops.attention import attention
from mage_jax.ops.norms import layer_norm
from mage_jax.ops.rotary import rotate_interleaved, vision_angles


def normalize_pixels(patches_bpc: jax.Array, config: VisionConfig) -> jax.Array:
    """uint8 patch vectors (channel, y, x) -> float32 normalised ones; float32 input passes unchanged."""
    if patches_bpc.dtype != jnp.uint8:
        return patches_bpc.astype(jnp.float32)
    per_channel = config.patch_size**2
    mean = jnp.repeat(jnp.asarray(PIXEL_MEAN, jnp.float32), per_channel)
    std = jnp.repeat(jnp.asarray(PIXEL_STD, jnp.float32), per_channel)
    return (patches_bpc.astype(jnp.float32) / 255.0 - mean) / std


def encode_patches(
    params: dict[str, Any],
    patches_bpc: jax.Array,
    windows_bp: jax.Array,
    positions_bp3: jax.Array,
    *,
    config: VisionConfig,
    compute: ComputeConfig,
    capture: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """The vision tower.

    Args:
      params: ``params["vision"]``.
      patches_bpc: [B, P, C] patch vectors.
      windows_bp: int32 [B, P] attention window of each patch, 0 is padding.
      positions_bp3: int32 [B, P, 3] (t, row, column).
      config: geometry.
      compute: precision and kernels.
      capture: also return the intermediate tensors by their reference names.

    Returns:
      [B, P, D] output of the last block (no norm after it), and the captured tensors.
    """
    dtype = jnp.dtype(compute.compute_dtype)
    seen: dict[str, jax.Array] = {}
    with jax.named_scope("vision"):
        pixels = normalize_pixels(patches_bpc, config).astype(dtype)
        kernel = params["patch_embed_dcyx"].reshape(config.hidden_size, config.patch_dim)
        x = matmul("bpc,dc->bpd", pixels, kernel)
        angles = vision_angles(positions_bp3, head_dim=config.head_dim, theta=config.rope_theta)
        embedded = x
        x = layer_norm(x, **params["pre_norm"], eps=config.layer_norm_eps)
        if capture:
            seen |= {"vision_patch_embed": embedded, "vision_rope_angles": angles, "vision_pre_ln": x}

        def layer(p, x):
            x = x + _attention_block(p, x, angles, windows_bp, config, compute)
            x = x + _mlp_block(p, x, config)
            return x, (x if capture else None)

        x, outputs = run_layers(layer, params["layers"], x, compute=compute)
        if capture:
            seen |= {f"vision_layer_{i}": outputs[i] for i in range(config.num_layers)}
    return x, seen


def _attention_block(p, x, angles, windows_bp, config, compute):
    y = layer_norm(x, **p["norm1"], eps=config.layer_norm_eps)
    bias = p["attn"]["qkv_bias_cnh"].astype(y.dtype)
    qkv = matmul("bpd,cnhd->cbpnh", y, p["attn"]["qkv_cnhd"]) + bias[:, None, None]
    q, k, v = qkv[0], qkv[1], qkv[2]
    out = attention(
        rotate_interleaved(q, angles),
        rotate_interleaved(k, angles),
        v,
        q_segments_bt=windows_bp,
        kv_segments_bs=windows_bp,
        causal=False,
        impl=compute.attention,
        chunk=compute.attention_chunk,
    )
    return matmul("bpnh,dnh->bpd", out, p["attn"]["proj_dnh"]) + p["attn"]["proj_bias_d"].astype(x.dtype)


def _mlp_block(p, x, config):
    y = layer_norm(x, **p["norm2"], eps=config.layer_norm_eps)
    y = matmul("bpd,fd->bpf", y, p["mlp"]["fc1_fd"]) + p["mlp"]["fc1_bias_f"].astype(y.dtype)
    y = jax.nn.gelu(y, approximate=False)  # exact erf: the tanh form differs by 3e-3 on the merged features
    return matmul("bpf,df->bpd", y, p["mlp"]["fc2_df"]) + p["mlp"]["fc2_bias_d"].astype(y.dtype)


def merge_patches(params: dict[str, Any], x_bpd: jax.Array, *, config: VisionConfig) -> jax.Array:
    """Each 4 consecutive patches (a 2x2 block) to one visual token: [B, P, D] -> [B, P/4, decoder width].

    The norm runs over the vision width *before* the four are concatenated.
    """
    with jax.named_scope("merger"):
        y = layer_norm(x_bpd, **params["norm"], eps=config.layer_norm_eps)
        y = y.reshape(y.shape[0], y.shape[1] // config.merge_factor, config.merged_size)
        y = matmul("bmf,gf->bmg", y, params["fc1_fd"]) + params["fc1_bias_f"].astype(y.dtype)
        y = jax.nn.gelu(y, approximate=False)
        return matmul("bmf,df->bmd", y, params["fc2_df"]) + params["fc2_bias_d"].astype(y.dtype)
