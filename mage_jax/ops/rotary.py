"""Rotary positions of both towers. Angles, cosines and the rotation itself are float32; cast back last.

In bfloat16 a position such as 257 is not even representable, so nothing here may be computed in the activations' type.
Frequencies are computed on the host in float64 and rounded to float32 step by step, as the reference rounds.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np


def _inverse_powers(theta: float, exponents: np.ndarray) -> np.ndarray:
    """1 / theta**e with each of the two operations rounded to float32."""
    powers = np.power(np.float64(theta), exponents.astype(np.float32).astype(np.float64)).astype(np.float32)
    return (np.float32(1.0) / powers).astype(np.float32)


def text_angles(positions_bt: jax.Array, *, head_dim: int, theta: float) -> jax.Array:
    """Half-split angles of the decoder: float32 [B, T, H/2], frequency i is theta**(-2i/H)."""
    frequencies = _inverse_powers(theta, np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim))
    return positions_bt.astype(jnp.float32)[..., None] * frequencies


def rotate_half_split(x_btnh: jax.Array, angles_bth: jax.Array) -> jax.Array:
    """Rotates lane i with lane i + H/2 (Qwen3). ``angles_bth`` is [B, T, H/2]."""
    cos, sin = jnp.cos(angles_bth)[:, :, None, :], jnp.sin(angles_bth)[:, :, None, :]
    first, second = jnp.split(x_btnh.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x_btnh.dtype)


def vision_angles(positions_bp3: jax.Array, *, head_dim: int, theta: float) -> jax.Array:
    """Angles of the vision tower: float32 [B, P, H] as concatenated, before the rotation.

    Half of the head is split 4:6:6 between t, row and column; frequency i of an axis of n is theta**(-i/n), each axis
    restarting at i = 0. The half is then repeated.
    """
    unit = head_dim // 32
    parts = []
    for axis, size in enumerate((4 * unit, 6 * unit, 6 * unit)):
        frequencies = _inverse_powers(theta, np.arange(size, dtype=np.float32) / np.float32(size))
        parts.append(positions_bp3[..., axis].astype(jnp.float32)[..., None] * frequencies)
    half = jnp.concatenate(parts, axis=-1)
    return jnp.concatenate([half, half], axis=-1)


def rotate_interleaved(x_bpnh: jax.Array, angles_bph: jax.Array) -> jax.Array:
    """The vision tower's rotation: lanes 2j and 2j+1 are mixed, each with *its own* angle.

    Angles are laid out for a half-split rotation and applied to interleaved pairs, so this is not an orthogonal
    rotation and no textbook form equals it. The released weights were trained with it.
    """
    x = x_bpnh.astype(jnp.float32)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    turned = jnp.stack([-pairs[..., 1], pairs[..., 0]], axis=-1).reshape(x.shape)
    cos, sin = jnp.cos(angles_bph)[:, :, None, :], jnp.sin(angles_bph)[:, :, None, :]
    return (x * cos + turned * sin).astype(x_bpnh.dtype)
