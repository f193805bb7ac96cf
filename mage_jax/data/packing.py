"""Samples to packed rows: the one place where segments, positions, shifted targets and vision indices are made.

Pure numpy. The loader, reinforcement learning and the tests all build their rows here, so a shift can be wrong in one
place only.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, MutableMapping, Sequence

import numpy as np

from mage_jax.types import PADDING_SEGMENT, TEXT_TOKEN, ImageSpan, PackedRows, Sample, TrainBatch


class PackingError(ValueError):
    """A sample does not fit a row, or contradicts itself; the sample, its length and the limit are named."""


@dataclasses.dataclass(frozen=True)
class RowShape:
    """The fixed shape of every row.

    Attributes:
      tokens: T, tokens of a row.
      patches: P, patches of a row, a multiple of ``merge_factor``; 0 for rows without images.
      patch_dim: C, length of a patch vector.
      merge_factor: patches per visual token.
      image_token_id: the id that stands for one visual token.
      max_samples: samples in a row; 0 is no limit.
      patch_dtype: "uint8" for raw pixels, "float32" for normalised ones.
    """

    tokens: int
    patches: int
    patch_dim: int
    merge_factor: int
    image_token_id: int
    max_samples: int = 0
    patch_dtype: str = "uint8"

    def __post_init__(self) -> None:
        if self.patches % self.merge_factor:
            raise PackingError(f"RowShape.patches: {self.patches} is not a multiple of {self.merge_factor}")


def check_fits(sample_id: str, *, tokens: int, patches: int, shape: RowShape) -> None:
    """Raises ``PackingError`` if a sample of this size cannot stand in a row by itself."""
    for name, length, limit in (("tokens", tokens, shape.tokens), ("patches", patches, shape.patches)):
        if length > limit:
            raise PackingError(
                f"sample {sample_id!r} has {length} {name}, a row holds {limit}; "
                f"raise {name}_per_row, or shorten or drop the record"
            )
    if tokens == 0:
        raise PackingError(f"sample {sample_id!r} has no tokens")


def first_fit(samples: Iterable[Sample], *, shape: RowShape) -> list[list[Sample]]:
    """Each sample, in order, into the first row with room for its tokens and its patches; as many rows as it takes."""
    rows: list[list[Sample]] = []
    free: list[tuple[int, int]] = []
    for sample in samples:
        tokens, patches = len(sample.tokens), len(sample.patches)
        check_fits(sample.sample_id, tokens=tokens, patches=patches, shape=shape)
        for r, (free_tokens, free_patches) in enumerate(free):
            has_slot = not shape.max_samples or len(rows[r]) < shape.max_samples
            if has_slot and tokens <= free_tokens and patches <= free_patches:
                break
        else:
            r = len(rows)
            rows.append([])
            free.append((shape.tokens, shape.patches))
        rows[r].append(sample)
        free[r] = (free[r][0] - tokens, free[r][1] - patches)
    return rows


def shift(tokens: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(targets, weights) of one segment: position t predicts token t+1, with that token's weight.

    The last position has nothing to predict: weight 0. The weight of the first token is lost, for nothing predicts it.
    """
    targets = np.zeros(len(tokens), np.int32)
    shifted = np.zeros(len(tokens), np.float32)
    targets[:-1] = tokens[1:]
    shifted[:-1] = weights[1:]
    return targets, shifted


def segment_bounds(segment_ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int32 (start, end), shaped like ``segment_ids`` [..., T]: each token's segment is ``[start, end)`` of its row.

    What an attention kernel needs instead of ids: ``start[q] <= k <= q`` is the causal mask, ``start[q] <= k < end[q]``
    the bidirectional one. A padding token is a segment of its own (start = its index, end = its index + 1), so both are
    nondecreasing along a row and no query is without a key. A segment must be contiguous, as the packer makes it.
    """
    segment_ids = np.asarray(segment_ids)
    length = segment_ids.shape[-1]
    index = np.arange(length, dtype=np.int32)
    begins = segment_ids == PADDING_SEGMENT
    begins[..., 1:] |= segment_ids[..., 1:] != segment_ids[..., :-1]
    begins[..., :1] = True
    start = np.maximum.accumulate(np.where(begins, index, 0), axis=-1).astype(np.int32)
    # A segment ends where the next one begins; the last one at the end of the row.
    following = np.full(segment_ids.shape, length, np.int32)
    following[..., :-1] = np.where(begins[..., 1:], index[1:], length)
    end = np.flip(np.minimum.accumulate(np.flip(following, -1), axis=-1), -1)
    return start, np.ascontiguousarray(end, np.int32)


def _check_sample(sample: Sample, *, shape: RowShape) -> None:
    visual = sum(span.num_patches for span in sample.images) if sample.images else len(sample.patches)
    lengths = {
        "weights": (len(sample.weights), len(sample.tokens)),
        "patch_windows": (len(sample.patch_windows), len(sample.patches)),
        "patch_positions": (len(sample.patch_positions), len(sample.patches)),
        "image tokens x merge factor": (
            int(np.count_nonzero(sample.tokens == shape.image_token_id)) * shape.merge_factor,
            visual,
        ),
    }
    for name, (got, expected) in lengths.items():
        if got != expected:
            raise PackingError(f"sample {sample.sample_id!r}: {name}: {got}, but {expected} expected")
    if len(sample.patches) and sample.patches.dtype != shape.patch_dtype:
        raise PackingError(
            f"sample {sample.sample_id!r}: patches are {sample.patches.dtype}, rows hold {shape.patch_dtype}"
        )
    if len(sample.patches) and sample.patches.shape[1] != shape.patch_dim:
        raise PackingError(
            f"sample {sample.sample_id!r}: patch vectors have {sample.patches.shape[1]} numbers, not {shape.patch_dim}"
        )


def empty_batch(num_rows: int, *, shape: RowShape) -> TrainBatch:
    """``num_rows`` rows of padding only (numpy)."""
    tokens = (num_rows, shape.tokens)
    patches = (num_rows, shape.patches)
    rows = PackedRows(
        tokens_bt=np.zeros(tokens, np.int32),
        segment_ids_bt=np.full(tokens, PADDING_SEGMENT, np.int32),
        positions_bt=np.zeros(tokens, np.int32),
        vision_index_bt=np.full(tokens, TEXT_TOKEN, np.int32),
        patches_bpc=np.zeros((*patches, shape.patch_dim), shape.patch_dtype),
        patch_windows_bp=np.zeros(patches, np.int32),
        patch_positions_bp3=np.zeros((*patches, 3), np.int32),
    )
    return TrainBatch(rows=rows, targets_bt=np.zeros(tokens, np.int32), weights_bt=np.zeros(tokens, np.float32))


@dataclasses.dataclass(frozen=True)
class PlacedImage:
    """An image that a row holds: its first patch in the row, and how many."""

    first: int
    num_patches: int


def _new_images(sample: Sample, placed: MutableMapping[str, PlacedImage]) -> list[ImageSpan]:
    """The spans whose patches this row does not hold yet, each key once."""
    new: dict[str, ImageSpan] = {}
    for span in sample.images:
        known = placed.get(span.key) or new.get(span.key)
        if known is not None and known.num_patches != span.num_patches:
            raise PackingError(
                f"sample {sample.sample_id!r}: image {span.key} has {span.num_patches} patches, "
                f"{known.num_patches} where the row has it already"
            )
        if known is None and span.first < 0:
            raise PackingError(f"sample {sample.sample_id!r}: image {span.key} is left out, but its row has it not")
        if known is None:
            new[span.key] = span
    return list(new.values())


def fill_row(
    batch: TrainBatch,
    row: int,
    samples: Iterable[Sample],
    *,
    shape: RowShape,
    placed: MutableMapping[str, PlacedImage] | None = None,
) -> tuple[int, int]:
    """Writes samples one after another into an empty row of a numpy batch, in place; returns (tokens, patches) used.

    Images with equal keys are written once, and their visual tokens share the patches (``vision_index_bt`` repeats).
    ``samples`` may be a generator that decodes as it goes: one sample's pixels exist at a time. It can look into
    ``placed``, filled here with each image as it is written, to leave out what the row has already.
    """
    rows = batch.rows
    placed = {} if placed is None else placed
    t = p = windows = 0
    for segment, sample in enumerate(samples, start=1):
        _check_sample(sample, shape=shape)
        # Unnamed images are one nameless span: all patches, shared with nobody.
        everything = ImageSpan("", len(sample.patches), 0)
        new = _new_images(sample, placed) if sample.images else [everything]
        t_end, p_end = t + len(sample.tokens), p + sum(span.num_patches for span in new)
        if t_end > shape.tokens or p_end > shape.patches:
            raise PackingError(
                f"sample {sample.sample_id!r} ends at token {t_end} and patch {p_end} of row {row}, "
                f"which holds {shape.tokens} and {shape.patches}"
            )
        rows.tokens_bt[row, t:t_end] = sample.tokens
        rows.segment_ids_bt[row, t:t_end] = segment
        rows.positions_bt[row, t:t_end] = np.arange(t_end - t)
        batch.targets_bt[row, t:t_end], batch.weights_bt[row, t:t_end] = shift(sample.tokens, sample.weights)
        whole = PlacedImage(p, everything.num_patches)
        for span in new:
            if span.num_patches:
                source, target = slice(span.first, span.first + span.num_patches), slice(p, p + span.num_patches)
                rows.patches_bpc[row, target] = sample.patches[source]
                own = sample.patch_windows[source]
                rows.patch_windows_bp[row, target] = own - own.min() + 1 + windows
                rows.patch_positions_bp3[row, target] = sample.patch_positions[source]
                windows += int(own.max() - own.min()) + 1
            if sample.images:
                placed[span.key] = PlacedImage(p, span.num_patches)
            p += span.num_patches
        shown = [placed[span.key] for span in sample.images] if sample.images else [whole]
        merged = [
            np.arange(i.first // shape.merge_factor, (i.first + i.num_patches) // shape.merge_factor) for i in shown
        ]
        rows.vision_index_bt[row, t:t_end][sample.tokens == shape.image_token_id] = np.concatenate(merged)
        t = t_end
    return t, p


def build_batch(rows: Sequence[Iterable[Sample]], *, shape: RowShape, num_rows: int | None = None) -> TrainBatch:
    """One numpy ``TrainBatch`` [B, ...] of the given rows, filled up with empty rows to ``num_rows``.

    Raises:
      PackingError: more rows than ``num_rows``, a row that overflows, or a sample whose parts contradict each other.
    """
    num_rows = len(rows) if num_rows is None else num_rows
    if len(rows) > num_rows:
        raise PackingError(f"{len(rows)} packed rows do not fit a batch of {num_rows}")
    batch = empty_batch(num_rows, shape=shape)
    for r, samples in enumerate(rows):
        fill_row(batch, r, samples, shape=shape)
    return batch


def pack(samples: Iterable[Sample], *, shape: RowShape, num_rows: int | None = None) -> TrainBatch:
    """First-fit packs samples and builds the batch: ``build_batch(first_fit(samples))``.

    Raises:
      PackingError: a sample longer than a row (named, with both numbers), or more rows needed than ``num_rows``.
    """
    return build_batch(first_fit(samples, shape=shape), shape=shape, num_rows=num_rows)
