"""Key-value cache of a batch that decodes in step."""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp


@flax.struct.dataclass
class KVCache:
    """Keys and values of every layer, and which slots each row may read.

    Attributes:
      k: one array [B, K, S, H] per layer (separate arrays, so that each is updated in place).
      v: same.
      visible_bs: bool [B, S]; True where a token of the row stands.
      slot: int32 scalar, the next slot to write, the same for all rows (rows of other lengths leave gaps).
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    visible_bs: jax.Array
    slot: jax.Array

    @classmethod
    def from_prefill(cls, kv: tuple[jax.Array, jax.Array], visible_bt: jax.Array, *, slots: int) -> KVCache:
        """Cache of ``slots`` positions holding a prefill's keys and values ([L, B, T, K, H] each)."""
        length = visible_bt.shape[1]

        def per_layer(stacked_lbtkh: jax.Array) -> tuple[jax.Array, ...]:
            moved = jnp.swapaxes(stacked_lbtkh, 2, 3)
            padded = jnp.pad(moved, ((0, 0), (0, 0), (0, 0), (0, slots - length), (0, 0)))
            return tuple(padded[i] for i in range(padded.shape[0]))

        return cls(
            k=per_layer(kv[0]),
            v=per_layer(kv[1]),
            visible_bs=jnp.pad(visible_bt, ((0, 0), (0, slots - length))),
            slot=jnp.int32(length),
        )

    def make_visible(self) -> KVCache:
        """Marks the slot about to be written as readable by every row."""
        visible = jax.lax.dynamic_update_slice(
            self.visible_bs, jnp.ones((self.visible_bs.shape[0], 1), bool), (jnp.int32(0), self.slot)
        )
        return self.replace(visible_bs=visible)


def write_slot(cache_bksh: jax.Array, new_b1kh: jax.Array, slot: jax.Array) -> jax.Array:
    """Writes one position of every row."""
    update = jnp.swapaxes(new_b1kh, 1, 2).astype(cache_bksh.dtype)
    zero = jnp.int32(0)
    return jax.lax.dynamic_update_slice(cache_bksh, update, (zero, zero, slot, zero))


def slots_for(prompt: int, new_tokens: int, *, multiple: int = 64) -> int:
    """Cache size for a prompt bucket and a number of new tokens, rounded so that few shapes are compiled."""
    return -(-(prompt + new_tokens) // multiple) * multiple


def bucket(size: int, *, smallest: int) -> int:
    """The bucket that holds ``size``: ``smallest`` doubled, with a step at one and a half times.

    At most a third of a bucket is padding, and lengths up to 32K share about 20 compiled shapes.
    """
    edge = smallest
    while edge < size:
        if edge + edge // 2 >= size and (edge // 2) % 4 == 0:
            return edge + edge // 2
        edge *= 2
    return edge
