"""Segment bounds, and images that samples of one row share."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.data.packing import (
    PackingError,
    PlacedImage,
    RowShape,
    build_batch,
    empty_batch,
    fill_row,
    segment_bounds,
)
from mage_jax.types import ImageSpan, Sample

IMAGE = 9
SHAPE = RowShape(tokens=24, patches=24, patch_dim=6, merge_factor=4, image_token_id=IMAGE)


def _bounds_by_hand(ids):
    start, end = [], []
    for t, segment in enumerate(ids):
        inside = [i for i, other in enumerate(ids) if other == segment] if segment else [t]
        start.append(inside[0])
        end.append(inside[-1] + 1)
    return start, end


@given(st.lists(st.lists(st.integers(1, 5), max_size=5), min_size=1, max_size=4))
def test_segment_bounds(rows):
    """Also the two properties that kernels build on: nondecreasing, and each token inside its own bounds."""
    ids = np.zeros((len(rows), 26), np.int32)
    for r, lengths in enumerate(rows):
        flat = np.repeat(np.arange(1, len(lengths) + 1), lengths)
        ids[r, : len(flat)] = flat
    start, end = segment_bounds(ids)
    assert start.dtype == end.dtype == np.int32 and start.shape == end.shape == ids.shape
    index = np.arange(26)
    for r in range(len(ids)):
        assert (start[r].tolist(), end[r].tolist()) == _bounds_by_hand(ids[r].tolist())
        np.testing.assert_array_equal(segment_bounds(ids[r]), (start[r], end[r]))
        assert (np.diff(start[r]) >= 0).all() and (np.diff(end[r]) >= 0).all()
        assert (start[r] <= index).all() and (index < end[r]).all()


def test_segment_bounds_by_example():
    start, end = segment_bounds(np.asarray([[1, 1, 2, 0, 0], [0, 0, 0, 0, 0], [3, 3, 3, 3, 3]]))
    np.testing.assert_array_equal(start, [[0, 0, 2, 3, 4], [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(end, [[2, 2, 3, 4, 5], [1, 2, 3, 4, 5], [5, 5, 5, 5, 5]])
    assert segment_bounds(np.zeros((2, 0), np.int32))[0].shape == (2, 0)


def _sample(sample_id, tokens, images):
    """``images``: (key, patches, first) spans; the patches of key k are all equal to ord(k)."""
    stored = [(key, patches) for key, patches, first in dict.fromkeys(images) if first >= 0]
    count = sum(patches for _, patches in stored)
    return Sample(
        sample_id=sample_id,
        tokens=np.asarray(tokens, np.int32),
        weights=np.zeros(len(tokens), np.float32),
        patches=np.repeat([[ord(key)] * 6 for key, _ in stored] or np.zeros((0, 6)), [n for _, n in stored], axis=0)
        .reshape(count, 6)
        .astype(np.uint8),
        patch_windows=np.repeat(np.arange(1, len(stored) + 1), [n for _, n in stored]).astype(np.int32),
        patch_positions=np.zeros((count, 3), np.int32),
        images=tuple(ImageSpan(*image) for image in images),
    )


def test_equal_keys_share_patches():
    first = _sample("a", [1, 9, 9, 9], [("x", 4, 0), ("y", 8, 4)])
    second = _sample("b", [9, 9, 1, 9], [("y", 8, 0), ("z", 4, 8)])
    batch = build_batch([[first, second]], shape=SHAPE)
    np.testing.assert_array_equal(batch.rows.vision_index_bt[0, :9], [-1, 0, 1, 2, 1, 2, -1, 3, -1])
    np.testing.assert_array_equal(batch.rows.patch_windows_bp[0], [1] * 4 + [2] * 8 + [3] * 4 + [0] * 8)
    assert batch.rows.patches_bpc[0, :16, 0].tobytes() == b"xxxxyyyyyyyyzzzz"
    # The same row when the second sample leaves out what the row has.
    lean = _sample("b", [9, 9, 1, 9], [("y", 8, -1), ("z", 4, 0)])
    again, placed = empty_batch(1, shape=SHAPE), {}
    assert fill_row(again, 0, [first, lean], shape=SHAPE, placed=placed) == (8, 16)
    assert placed == {"x": PlacedImage(0, 4), "y": PlacedImage(4, 8), "z": PlacedImage(12, 4)}
    for name, value in vars(batch.rows).items():
        np.testing.assert_array_equal(getattr(again.rows, name), value)


def test_one_image_twice_in_a_sample():
    sample = _sample("a", [9, 9, 1, 9, 9], [("x", 8, 0), ("x", 8, 0)])
    batch = build_batch([[sample]], shape=SHAPE)
    np.testing.assert_array_equal(batch.rows.vision_index_bt[0, :5], [0, 1, -1, 0, 1])
    assert np.count_nonzero(batch.rows.patch_windows_bp) == 8


def test_sharing_makes_room():
    """Four samples of 16 patches each in a row of 24: they show the same image."""
    samples = [_sample(f"s{i}", [9] * 4, [("x", 16, 0)]) for i in range(4)]
    assert np.count_nonzero(build_batch([samples], shape=SHAPE).rows.patch_windows_bp) == 16
    strangers = [dataclasses.replace(s, images=()) for s in samples]
    with pytest.raises(PackingError, match="'s1' ends at token 8 and patch 32"):
        build_batch([strangers], shape=SHAPE)


def test_contradictions_are_named():
    whole = _sample("a", [9, 9], [("x", 8, 0)])
    for samples, reason in (
        ([_sample("b", [9, 9], [("x", 8, -1)])], "'b': image x is left out, but its row has it not"),
        ([whole, _sample("b", [9], [("x", 4, -1)])], "'b': image x has 4 patches, 8 where the row has it already"),
        ([_sample("b", [9], [("x", 8, 0)])], "'b': image tokens x merge factor: 4, but 8 expected"),
    ):
        with pytest.raises(PackingError, match=reason):
            build_batch([samples], shape=SHAPE)
