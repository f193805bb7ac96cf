"""Dimension legend and the structs that cross room borders.

Letters used in names everywhere: B packed rows, T tokens of a row, S keys of a row, P patches of a row,
M merged visual tokens of a row (P / 4), L layers, D width, N query heads, K key-value heads, H head size,
F feed-forward width, V vocabulary, C patch vector (channels * size * size). A suffix spells the axes:
``q_btnh`` is [B, T, N, H], ``embed_vd`` is [V, D].

The padding rule, defined once: **segment id 0 is padding**. A padded query attends to nothing and yields zeros,
nobody attends to a padded key, and a padded target has loss weight 0. This module imports neither jax nor flax,
so that the host-side rooms (``agent``, ``data``) can use it; ``PackedRows`` is registered as a pytree by
``mage_jax.ops.pytrees`` (imported by every room that traces).
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

PADDING_SEGMENT = 0
TEXT_TOKEN = -1  # ``vision_index`` of a token that is not a visual token

Array = Any  # np.ndarray on the host, jax.Array inside a step


@dataclasses.dataclass(frozen=True)
class PackedRows:
    """What the model reads: tokens and patches of a batch of packed rows.

    Attributes:
      tokens_bt: int32 [B, T] token ids.
      segment_ids_bt: int32 [B, T]; 1, 2, ... per sample of the row, 0 is padding.
      positions_bt: int32 [B, T] rotary position, restarting at 0 in each segment.
      vision_index_bt: int32 [B, T]; for a visual token the index of its merged patch block (0 .. M-1) in this row's
        patches, ``TEXT_TOKEN`` (-1) elsewhere. An index may repeat (two turns that share a screenshot).
      patches_bpc: [B, P, C] patch vectors in 2x2-block order: float32 normalised pixels, or uint8 raw pixels that the
        model normalises itself (a quarter of the transfer). P is a multiple of 4 and may be 0.
      patch_windows_bp: int32 [B, P] attention window of each patch (1, 2, ...), 0 is padding.
      patch_positions_bp3: int32 [B, P, 3] (t, row, column) of each patch on its image's patch grid.
    """

    tokens_bt: Array
    segment_ids_bt: Array
    positions_bt: Array
    vision_index_bt: Array
    patches_bpc: Array
    patch_windows_bp: Array
    patch_positions_bp3: Array

    def replace(self, **changes: Any) -> PackedRows:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class TrainBatch:
    """Packed rows with what the supervised loss needs.

    Attributes:
      rows: the model's input.
      targets_bt: int32 [B, T]; ``targets[b, t]`` is the token that position t must predict (the next one of the same
        segment); any value where the weight is 0.
      weights_bt: float32 [B, T] loss weight of each target; 0 outside supervised spans, at segment ends and padding.
    """

    rows: PackedRows
    targets_bt: Array
    weights_bt: Array

    def replace(self, **changes: Any) -> TrainBatch:
        return dataclasses.replace(self, **changes)


@dataclasses.dataclass(frozen=True)
class ImageSpan:
    """Where one image of a sample stands among the sample's patches.

    Attributes:
      key: equal keys mean equal patches: inside one row such images share them.
      num_patches: of this image.
      first: its first patch in ``Sample.patches``; -1 if it was left out because its row holds the key already.
    """

    key: str
    num_patches: int
    first: int


@dataclasses.dataclass(frozen=True)
class Sample:
    """One unpacked sample on the host: what a renderer and the image code produce, what a packer consumes.

    Attributes:
      sample_id: stable name, written to the consumed-samples ledger.
      tokens: int32 [T] token ids, visual tokens already repeated to their count.
      weights: float32 [T]; ``weights[t]`` is the loss weight of *token* t (packing shifts it to the position before).
      patches: [P, C] float32 or uint8 patch vectors of all images, in order of appearance; P may be 0.
      patch_windows: int32 [P], 1, 2, ... attention windows in order.
      patch_positions: int32 [P, 3].
      images: one span for each image in order of appearance, a repeated image pointing to the same patches; empty: the
        images are unnamed, ``patches`` holds each of them, and nothing is shared.
    """

    sample_id: str
    tokens: np.ndarray
    weights: np.ndarray
    patches: np.ndarray
    patch_windows: np.ndarray
    patch_positions: np.ndarray
    images: tuple[ImageSpan, ...] = ()
