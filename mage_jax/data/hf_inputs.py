"""The released processor's flat layout to packed rows, and flat tower outputs back.

The reference implementation flattens the patches of a whole batch and splices visual tokens in order of appearance.
Here each row carries its own patches, so grid rows are dealt to batch rows by counting image tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from mage_jax.config import VisionConfig
from mage_jax.data.image import attention_windows, block_positions
from mage_jax.data.packing import shift
from mage_jax.types import PADDING_SEGMENT, TEXT_TOKEN, PackedRows, TrainBatch

IGNORE_LABEL = -100
_PIXEL_KEYS = ("pixel_values", "image_grid_thw")


class HfInputsError(ValueError):
    """The arrays contradict each other; the key and both numbers are named."""


@dataclasses.dataclass(frozen=True)
class HfInputs:
    """Packed rows of a flat batch.

    Attributes:
      rows: numpy ``PackedRows``; each row is padded to the patches of the fullest one.
      batch: with targets and weights when the inputs had labels, else None.
      patch_rows, patch_slots: int32 [patches in all]; flat patch i is ``per_row[patch_rows[i], patch_slots[i]]``.
      merge_factor: patches per merged token.
    """

    rows: PackedRows
    batch: TrainBatch | None
    patch_rows: np.ndarray
    patch_slots: np.ndarray
    merge_factor: int

    def flatten_patches(self, values_bp: np.ndarray) -> np.ndarray:
        """[B, P, ...] values of patches to the inputs' own order [patches in all, ...]."""
        return values_bp[self.patch_rows, self.patch_slots]

    def flatten_merged(self, values_bm: np.ndarray) -> np.ndarray:
        """[B, M, ...] values of merged tokens to the order of the reference's ``merged_features``."""
        first = slice(None, None, self.merge_factor)
        return values_bm[self.patch_rows[first], self.patch_slots[first] // self.merge_factor]


def from_hf_inputs(inputs: Mapping[str, np.ndarray], *, vision: VisionConfig, image_token_id: int) -> HfInputs:
    """Converts ``input_ids`` [B, T] and what comes with them.

    Args:
      inputs: ``input_ids`` and optionally ``attention_mask`` [B, T] (0 is padding, on either side), ``position_ids``
        [B, T] (absent: running count of the mask, 1 at padding; with segments, restarting in each), ``segment_ids``
        [B, T], ``labels`` [B, T] (-100 is ignored), ``pixel_values`` [patches, C], ``image_grid_thw`` [grids, 3],
        ``patch_positions`` [patches, 3] in block order (absent: computed, for images). Other keys are ignored.
        Segments may count from 1 with 0 as padding, or from 0; see ``_segments``.
      vision: geometry of the patches and the frame window.
      image_token_id: the id that stands for one visual token.

    Raises:
      HfInputsError: a shape is wrong, image tokens and patches do not match (both counts given), or a grid row would
        belong to two batch rows.
    """
    ids = _array(inputs, "input_ids", ndim=2)
    if ids is None:
        raise HfInputsError("input_ids: is missing")
    mask = _array(inputs, "attention_mask", shape=ids.shape)
    positions = _array(inputs, "position_ids", shape=ids.shape)
    segments = _segments(_array(inputs, "segment_ids", shape=ids.shape), mask, positions, ids.shape)
    if positions is None:
        positions = _default_positions(segments)
    is_visual = ids == image_token_id
    vision_index = np.where(is_visual, np.cumsum(is_visual, axis=1) - 1, TEXT_TOKEN)

    pixels, grid, patch_positions = _pixels(inputs, vision)
    grids_of_row = _deal(grid, is_visual.sum(axis=1), vision.merge_factor)
    patches_of_grid = grid.prod(axis=1)
    patches_of_row = [int(patches_of_grid[list(dealt)].sum()) for dealt in grids_of_row]
    batch_size, most = len(ids), max(patches_of_row, default=0)
    rows = PackedRows(
        tokens_bt=ids.astype(np.int32),
        segment_ids_bt=segments.astype(np.int32),
        positions_bt=positions.astype(np.int32),
        vision_index_bt=vision_index.astype(np.int32),
        patches_bpc=np.zeros((batch_size, most, vision.patch_dim), pixels.dtype),
        patch_windows_bp=np.zeros((batch_size, most), np.int32),
        patch_positions_bp3=np.zeros((batch_size, most, 3), np.int32),
    )
    start = 0
    for r, (dealt, count) in enumerate(zip(grids_of_row, patches_of_row, strict=True)):
        rows.patches_bpc[r, :count] = pixels[start : start + count]
        rows.patch_positions_bp3[r, :count] = patch_positions[start : start + count]
        rows.patch_windows_bp[r, :count] = attention_windows(grid[list(dealt)], frame_window=vision.frame_window_size)
        start += count
    labels = _array(inputs, "labels", shape=ids.shape)
    return HfInputs(
        rows=rows,
        batch=None if labels is None else _with_labels(rows, labels),
        patch_rows=np.repeat(np.arange(batch_size, dtype=np.int32), patches_of_row),
        patch_slots=np.concatenate([np.arange(n, dtype=np.int32) for n in (*patches_of_row, 0)]),
        merge_factor=vision.merge_factor,
    )


def _array(
    inputs: Mapping[str, np.ndarray], key: str, *, ndim: int | None = None, shape: tuple[int, ...] | None = None
) -> np.ndarray | None:
    if key not in inputs or inputs[key] is None:
        return None
    value = np.asarray(inputs[key])
    if ndim is not None and value.ndim != ndim:
        raise HfInputsError(f"{key}: must have {ndim} dimensions, got shape {value.shape}")
    if shape is not None and value.shape != shape:
        raise HfInputsError(f"{key}: must have the shape {shape} of input_ids, got {value.shape}")
    if not np.issubdtype(value.dtype, np.integer) and value.dtype != bool:
        raise HfInputsError(f"{key}: must hold integers, got {value.dtype}")
    return value.astype(np.int64)


def _segments(
    segments: np.ndarray | None, mask: np.ndarray | None, positions: np.ndarray | None, shape: tuple[int, int]
) -> np.ndarray:
    """Our segment ids: 1, 2, ... with 0 as padding.

    A file that counts from 0 is told from one with padding by its mask; without a mask, by its positions: a leading run
    of zeros is a sample if its positions run 0, 1, 2, ... (padding has 1 or 0 everywhere).
    """
    if segments is None:
        return np.ones(shape, np.int64) if mask is None else (mask != 0).astype(np.int64)
    if segments.size and segments.min() < 0:
        raise HfInputsError(f"segment_ids: must not be negative, got {segments.min()}")
    if mask is not None:
        valid = mask != 0
        offset = 1 if np.any(segments[valid] == 0) else 0
        return np.where(valid, segments + offset, PADDING_SEGMENT)
    if positions is not None and any(map(_starts_with_sample_0, segments, positions)):
        return segments + 1
    return segments


def _starts_with_sample_0(segments_t: np.ndarray, positions_t: np.ndarray) -> bool:
    others = np.flatnonzero(segments_t)
    leading = int(others[0]) if len(others) else len(segments_t)
    return leading > 0 and np.array_equal(positions_t[:leading], np.arange(leading))


def _default_positions(segments: np.ndarray) -> np.ndarray:
    """Position inside the own segment, counting only its own tokens; 1 at padding, as the reference has it."""
    positions = np.ones_like(segments)
    for segment in range(1, int(segments.max(initial=0)) + 1):
        inside = segments == segment
        positions = np.where(inside, np.cumsum(inside, axis=1) - 1, positions)
    return positions


def _pixels(inputs: Mapping[str, np.ndarray], vision: VisionConfig) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pixels [P, C], grid [G, 3], positions [P, 3]), all empty for text only; checked against each other."""
    sizes = {key: np.size(inputs.get(key) if inputs.get(key) is not None else ()) for key in _PIXEL_KEYS}
    if not any(sizes.values()):
        return (
            np.zeros((0, vision.patch_dim), np.float32),
            np.zeros((0, 3), np.int64),
            np.zeros((0, 3), np.int64),
        )
    for key, size in sizes.items():
        if not size:
            raise HfInputsError(f"{key}: is missing or empty, while the other of {_PIXEL_KEYS} is not")
    pixels = np.asarray(inputs["pixel_values"])
    if pixels.ndim != 2 or pixels.shape[1] != vision.patch_dim:
        raise HfInputsError(f"pixel_values: must be [patches, {vision.patch_dim}], got {pixels.shape}")
    if pixels.dtype.kind not in "biuf" and pixels.dtype.name != "bfloat16":
        raise HfInputsError(f"pixel_values: must hold numbers, got {pixels.dtype}")
    if pixels.dtype != np.uint8:
        pixels = pixels.astype(np.float32)
    grid = _array(inputs, "image_grid_thw", ndim=2)
    if grid.shape[1] != 3 or grid.min() < 1 or np.any(grid[:, 1:] % vision.spatial_merge_size):
        raise HfInputsError(
            f"image_grid_thw: must be [grids, 3], positive, rows and columns multiples of {vision.spatial_merge_size}, "
            f"got {grid.tolist()}"
        )
    if int(grid.prod(axis=1).sum()) != len(pixels):
        raise HfInputsError(
            f"image_grid_thw: describes {grid.prod(axis=1).sum()} patches, pixel_values has {len(pixels)}"
        )
    positions = _array(inputs, "patch_positions", shape=None, ndim=2)
    if positions is None:
        positions = block_positions(grid, merge_size=vision.spatial_merge_size)
    if positions.shape != (len(pixels), 3):
        raise HfInputsError(f"patch_positions: must be [{len(pixels)}, 3], got {positions.shape}")
    return pixels, grid, positions


def _deal(grid: np.ndarray, tokens_of_row: np.ndarray, merge_factor: int) -> list[range]:
    """Which grid rows belong to each batch row, by the image tokens that it holds."""
    tokens_of_grid = grid.prod(axis=1) // merge_factor
    if int(tokens_of_row.sum()) != int(tokens_of_grid.sum()):
        raise HfInputsError(
            f"input_ids: hold {tokens_of_row.sum()} image tokens, image_grid_thw stands for {tokens_of_grid.sum()}"
        )
    dealt, g = [], 0
    for r, wanted in enumerate(tokens_of_row.tolist()):
        first, got = g, 0
        while got < wanted:
            got += int(tokens_of_grid[g])
            g += 1
        if got != wanted:
            raise HfInputsError(
                f"input_ids: row {r} holds {wanted} image tokens, its grid rows {first} to {g - 1} stand for {got}"
            )
        dealt.append(range(first, g))
    return dealt


def _with_labels(rows: PackedRows, labels: np.ndarray) -> TrainBatch:
    """Targets by a shift of one; a pair of tokens of different segments, or with padding, has weight 0."""
    batch = TrainBatch(
        rows=rows,
        targets_bt=np.zeros(labels.shape, np.int32),
        weights_bt=np.zeros(labels.shape, np.float32),
    )
    for r, labels_t in enumerate(labels):
        counted = (labels_t != IGNORE_LABEL).astype(np.float32)
        batch.targets_bt[r], batch.weights_bt[r] = shift(np.where(counted, labels_t, 0).astype(np.int32), counted)
    segments = rows.segment_ids_bt
    same = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] != PADDING_SEGMENT)
    batch.weights_bt[:, :-1] *= same
    return batch
