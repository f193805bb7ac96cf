"""The two towers joined: packed rows in, final hidden states out. The loss owns the vocabulary."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from mage_jax.config import ComputeConfig, ModelConfig
from mage_jax.model.decoder import decoder_layer
from mage_jax.model.layers import run_layers
from mage_jax.model.vision import encode_patches, merge_patches
from mage_jax.ops.attention import attention
from mage_jax.ops.norms import rms_norm
from mage_jax.ops.rotary import text_angles
from mage_jax.sharding import constrain_rows
from mage_jax.types import PackedRows


@flax.struct.dataclass
class Backbone:
    """Result of ``forward``.

    Attributes:
      hidden_btd: [B, T, D] after the final norm.
      kv: per-layer rotated keys and values, ([L, B, T, K, H], same), or None.
      captured: intermediate tensors by their reference names, empty unless asked for.
    """

    hidden_btd: jax.Array
    kv: tuple[jax.Array, jax.Array] | None
    captured: dict[str, jax.Array]


def output_head(params: dict[str, Any]) -> jax.Array:
    """The output embedding [V, D]: the separate head where there is one, else the tied input embedding."""
    return params.get("lm_head_vd", params["text"]["embed_vd"])


def embed_rows(
    params: dict[str, Any],
    rows: PackedRows,
    *,
    config: ModelConfig,
    compute: ComputeConfig,
    capture: bool = False,
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Token embeddings [B, T, D] with visual tokens *replaced* by merged patches of the same row."""
    dtype = jnp.dtype(compute.compute_dtype)
    embeds = params["text"]["embed_vd"][rows.tokens_bt].astype(dtype)
    if rows.patches_bpc.shape[1] == 0:  # text only: known when traced, so no tower is compiled
        return embeds, {"inputs_embeds": embeds} if capture else {}
    features, seen = encode_patches(
        params["vision"],
        rows.patches_bpc,
        rows.patch_windows_bp,
        rows.patch_positions_bp3,
        config=config.vision,
        compute=compute,
        capture=capture,
    )
    merged_bmd = merge_patches(params["merger"], features, config=config.vision)
    visual = jnp.take_along_axis(merged_bmd, jnp.maximum(rows.vision_index_bt, 0)[..., None], axis=1)
    embeds = jnp.where((rows.vision_index_bt >= 0)[..., None], visual, embeds)
    if capture:
        seen |= {"merged_features": merged_bmd, "inputs_embeds": embeds}
    return embeds, seen


def forward(
    params: dict[str, Any],
    rows: PackedRows,
    *,
    config: ModelConfig,
    compute: ComputeConfig,
    keep_kv: bool = False,
    capture: bool = False,
) -> Backbone:
    """Runs both towers over packed rows.

    Args:
      params: tree declared by ``mage_jax.params.declare``; layers stacked, or unstacked by ``unstack_layers``.
      rows: the batch.
      config: geometry.
      compute: precision, rematerialisation, kernels.
      keep_kv: return every layer's keys and values, for a cache.
      capture: return the intermediate tensors (parity checks); costs memory.
    """
    with jax.default_matmul_precision(compute.matmul_precision):
        embeds, seen = embed_rows(params, rows, config=config, compute=compute, capture=capture)
        angles = text_angles(rows.positions_bt, head_dim=config.text.head_dim, theta=config.text.rope_theta)

        def attend(q, k, v):
            return attention(
                q,
                k,
                v,
                q_segments_bt=rows.segment_ids_bt,
                kv_segments_bs=rows.segment_ids_bt,
                causal=True,
                impl=compute.attention,
                chunk=compute.attention_chunk,
            )

        def layer(p, x):
            x, kv = decoder_layer(p, constrain_rows(x), angles, attend, config=config.text)
            return x, (kv if keep_kv else None, x if capture else None)

        with jax.named_scope("text"):
            x, (kv, outputs) = run_layers(layer, params["text"]["layers"], constrain_rows(embeds), compute=compute)
            hidden = rms_norm(x, params["text"]["final_norm_d"], eps=config.text.rms_norm_eps)
        if capture:
            seen |= {f"dec_layer_{i}": outputs[i] for i in range(config.text.num_layers)}
            seen["dec_last_hidden"] = hidden
    return Backbone(hidden_btd=hidden, kv=kv, captured=seen)


def logits(params: dict[str, Any], hidden: jax.Array, *, compute: ComputeConfig) -> jax.Array:
    """float32 logits [..., V] of a *few* hidden states [..., D] (decoding, parity); training uses ``ops.vocab``."""
    with jax.default_matmul_precision(compute.matmul_precision):
        head = output_head(params).astype(hidden.dtype)
        return jnp.einsum("...d,vd->...v", hidden, head, preferred_element_type=jnp.float32)
