"""Prefill once, then one token at a time; batched, jitted, with bucketed shapes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from mage_jax.config import ComputeConfig, ModelConfig
from mage_jax.model.cache import KVCache, bucket, slots_for, write_slot
from mage_jax.model.decoder import decoder_layer
from mage_jax.model.layers import layer_at, unstack_layers
from mage_jax.model.mage_vl import forward, logits
from mage_jax.model.sampling import Sampling, SamplingArrays, sample
from mage_jax.ops.attention import decode_attention
from mage_jax.ops.norms import rms_norm
from mage_jax.ops.rotary import text_angles
from mage_jax.types import PADDING_SEGMENT, TEXT_TOKEN, PackedRows


@flax.struct.dataclass
class DecodeState:
    """Everything a decode step carries.

    Attributes:
      cache: keys and values so far.
      logits_bv: float32 [B, V] logits of the next token.
      position_b: int32 [B] rotary position of the next token.
      done_b: bool [B]; a finished row emits its end token for ever.
      step: int32 scalar, tokens chosen so far.
    """

    cache: KVCache
    logits_bv: jax.Array
    position_b: jax.Array
    done_b: jax.Array
    step: jax.Array


@dataclasses.dataclass(frozen=True)
class Generated:
    """New tokens of a chunk: int32 [B, n] ids, float32 [B, n] log-probs, bool [B, n] (False after a row's end)."""

    tokens: np.ndarray
    logps: np.ndarray
    live: np.ndarray


def prefill(params: Any, rows: PackedRows, *, config: ModelConfig, compute: ComputeConfig, slots: int) -> DecodeState:
    """Runs the prompts, one segment a row, padded on either side.

    Args:
      params: parameters, stacked or unstacked.
      rows: prompts [B, T]; padding has segment 0.
      config: geometry.
      compute: precision and kernels.
      slots: size S of the cache.
    """
    out = forward(params, rows, config=config, compute=compute, keep_kv=True)
    visible = rows.segment_ids_bt != PADDING_SEGMENT
    index = jnp.arange(visible.shape[1], dtype=jnp.int32)
    last_b = jnp.max(jnp.where(visible, index, 0), axis=1)
    hidden_bd = jnp.take_along_axis(out.hidden_btd, last_b[:, None, None], axis=1)[:, 0]
    position_b = jnp.take_along_axis(rows.positions_bt, last_b[:, None], axis=1)[:, 0] + 1
    return DecodeState(
        cache=KVCache.from_prefill(out.kv, visible, slots=slots),
        logits_bv=logits(params, hidden_bd, compute=compute),
        position_b=position_b,
        done_b=~jnp.any(visible, axis=1),
        step=jnp.int32(0),
    )


def decode_step(
    params: Any, state: DecodeState, tokens_b: jax.Array, *, config: ModelConfig, compute: ComputeConfig
) -> DecodeState:
    """Feeds one token per row and computes the logits of the next. An image token is just its embedding here."""
    text = config.text
    cache = state.cache.make_visible()
    k_cache, v_cache = list(cache.k), list(cache.v)
    with jax.default_matmul_precision(compute.matmul_precision):
        x = params["text"]["embed_vd"][tokens_b][:, None].astype(jnp.dtype(compute.compute_dtype))
        angles = text_angles(state.position_b[:, None], head_dim=text.head_dim, theta=text.rope_theta)
        for i in range(text.num_layers):

            def attend(q, k, v, i=i):
                k_cache[i] = write_slot(k_cache[i], k, cache.slot)
                v_cache[i] = write_slot(v_cache[i], v, cache.slot)
                return decode_attention(q[:, 0], k_cache[i], v_cache[i], visible_bs=cache.visible_bs)[:, None]

            x, _ = decoder_layer(layer_at(params["text"]["layers"], i), x, angles, attend, config=text)
        hidden = rms_norm(x[:, 0], params["text"]["final_norm_d"], eps=text.rms_norm_eps)
    return state.replace(
        cache=cache.replace(k=tuple(k_cache), v=tuple(v_cache), slot=cache.slot + 1),
        logits_bv=logits(params, hidden, compute=compute),
        position_b=state.position_b + 1,
        step=state.step + 1,
    )


def decode_tokens(
    params: Any,
    state: DecodeState,
    settings: SamplingArrays,
    *,
    config: ModelConfig,
    compute: ComputeConfig,
    count: int,
) -> tuple[DecodeState, tuple[jax.Array, jax.Array, jax.Array]]:
    """Chooses and feeds up to ``count`` tokens, stopping early when every row has ended.

    Returns:
      The state, and [B, count] tokens, log-probs and live flags.
    """
    batch = state.position_b.shape[0]
    ends = jnp.asarray(config.eos_token_ids, jnp.int32)
    blank = (
        jnp.full((batch, count), ends[0], jnp.int32),
        jnp.zeros((batch, count), jnp.float32),
        jnp.zeros((batch, count), bool),
    )

    def go_on(carry):
        state, _, i = carry
        return (i < count) & ~jnp.all(state.done_b)

    def one(carry):
        state, out, i = carry
        token_b, logp_b = sample(state.logits_bv, settings, state.step)
        live_b = ~state.done_b
        token_b = jnp.where(live_b, token_b, ends[0])
        out = jax.tree.map(
            lambda buffer, new: jax.lax.dynamic_update_slice(buffer, new[:, None], (jnp.int32(0), i)),
            out,
            (token_b, jnp.where(live_b, logp_b, 0.0), live_b),
        )
        state = state.replace(done_b=state.done_b | jnp.any(token_b[:, None] == ends[None, :], axis=1))
        return decode_step(params, state, token_b, config=config, compute=compute), out, i + 1

    state, out, _ = jax.lax.while_loop(go_on, one, (state, blank, jnp.int32(0)))
    return state, out


class Generator:
    """Batched generation with compiled shapes kept in buckets.

    Args:
      params: stacked parameters (unstacked here once, so that a decode step reads each weight once).
      config: geometry.
      compute: precision and kernels.
    """

    def __init__(self, params: dict[str, Any], *, config: ModelConfig, compute: ComputeConfig) -> None:
        self.config, self.compute = config, compute
        dtype = jnp.dtype(compute.compute_dtype)
        # Cast once: casting inside the step would read float32 and write bfloat16 copies for every token.
        self.params = unstack_layers(jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), params))
        self._prefill = jax.jit(functools.partial(prefill, config=config, compute=compute), static_argnames=("slots",))
        self._decode = jax.jit(
            functools.partial(decode_tokens, config=config, compute=compute),
            static_argnames=("count",),
            donate_argnums=(1,),
        )

    def stream(
        self, rows: PackedRows, sampling: Sampling | list[Sampling], *, max_new_tokens: int, chunk: int = 8
    ) -> Iterator[Generated]:
        """Yields new tokens in chunks of at most ``chunk`` steps until every row has ended.

        Args:
          rows: prompts [B, T] with numpy leaves, one segment a row, padded on either side.
          sampling: settings of all rows, or one per row.
          max_new_tokens: limit per row.
          chunk: tokens per device call; larger is faster, smaller streams sooner.

        Raises:
          ValueError: the prompt and the new tokens exceed the model's positions, or settings do not match the rows.
        """
        batch = rows.tokens_bt.shape[0]
        settings = [sampling] * batch if isinstance(sampling, Sampling) else list(sampling)
        if len(settings) != batch:
            raise ValueError(f"sampling: {len(settings)} settings for {batch} prompts")
        longest = int(np.sum(np.asarray(rows.segment_ids_bt) != PADDING_SEGMENT, axis=1).max())
        if longest == 0:
            raise ValueError("rows: every prompt is empty")
        if longest + max_new_tokens > self.config.text.max_positions:
            raise ValueError(
                f"prompt of {longest} tokens and {max_new_tokens} new ones exceed the model's "
                f"{self.config.text.max_positions} positions"
            )
        rows = pad_to_buckets(rows, merge_factor=self.config.vision.merge_factor)
        chunk = min(chunk, max_new_tokens)
        # A whole number of chunks, since the last call may run past max_new_tokens; the surplus is cut below.
        room = -(-max_new_tokens // chunk) * chunk
        slots = slots_for(rows.tokens_bt.shape[1], room)
        state = self._prefill(self.params, rows, slots=slots)
        arrays = SamplingArrays.of(settings)
        left = max_new_tokens
        while left > 0:
            state, out = self._decode(self.params, state, arrays, count=chunk)
            tokens, logps, live, done = jax.device_get((*out, state.done_b))
            yield Generated(tokens=tokens[:, :left], logps=logps[:, :left], live=live[:, :left])
            if done.all():
                return
            left -= chunk

    def __call__(
        self, rows: PackedRows, sampling: Sampling | list[Sampling], *, max_new_tokens: int, chunk: int = 32
    ) -> Generated:
        """All new tokens at once: [B, n] with n at most ``max_new_tokens``."""
        chunks = list(self.stream(rows, sampling, max_new_tokens=max_new_tokens, chunk=chunk))
        return Generated(
            tokens=np.concatenate([c.tokens for c in chunks], axis=1),
            logps=np.concatenate([c.logps for c in chunks], axis=1),
            live=np.concatenate([c.live for c in chunks], axis=1),
        )


def pad_to_buckets(rows: PackedRows, *, merge_factor: int, smallest: int = 64) -> PackedRows:
    """Pads tokens and patches on the right to bucket sizes, so that nearby lengths share a compiled program."""
    tokens, patches = rows.tokens_bt.shape[1], rows.patches_bpc.shape[1]
    to_t = bucket(tokens, smallest=smallest) - tokens
    to_p = bucket(patches, smallest=smallest * merge_factor) - patches if patches else 0

    def pad(x: np.ndarray, amount: int, value: int = 0) -> np.ndarray:
        x = np.asarray(x)
        return np.pad(x, ((0, 0), (0, amount)) + ((0, 0),) * (x.ndim - 2), constant_values=value)

    return PackedRows(
        tokens_bt=pad(rows.tokens_bt, to_t),
        segment_ids_bt=pad(rows.segment_ids_bt, to_t),
        positions_bt=pad(rows.positions_bt, to_t),
        vision_index_bt=pad(rows.vision_index_bt, to_t, TEXT_TOKEN),
        patches_bpc=pad(rows.patches_bpc, to_p),
        patch_windows_bp=pad(rows.patch_windows_bp, to_p),
        patch_positions_bp3=pad(rows.patch_positions_bp3, to_p),
    )
