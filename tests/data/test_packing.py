"""The packer: nothing lost, budgets kept, packed content equal to separate content, targets inside segments."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.data.packing import PackingError, RowShape, build_batch, first_fit, pack, shift
from mage_jax.types import Sample

IMAGE = 9
SHAPE = RowShape(tokens=24, patches=32, patch_dim=6, merge_factor=4, image_token_id=IMAGE)


def _sample(sample_id, tokens, *, seed=0, windows=None):
    """A sample whose image tokens (id 9) carry random patches; the first and last weight are set on purpose."""
    rng = np.random.default_rng(seed)
    tokens = np.asarray(tokens, np.int32)
    count = 4 * int(np.sum(tokens == IMAGE))
    if windows is None:
        windows = np.arange(count) // 4 + 1
    return Sample(
        sample_id=sample_id,
        tokens=tokens,
        weights=rng.integers(0, 3, len(tokens)).astype(np.float32),
        patches=rng.integers(0, 256, (count, 6), dtype=np.uint8),
        patch_windows=np.asarray(windows, np.int32),
        patch_positions=rng.integers(0, 9, (count, 3)).astype(np.int32),
    )


_TOKENS = st.lists(st.sampled_from([1, 2, 3, IMAGE]), min_size=1, max_size=24).filter(
    lambda tokens: tokens.count(IMAGE) <= 8
)
_SAMPLES = st.lists(_TOKENS, max_size=12).map(
    lambda many: [_sample(f"s{i}", tokens, seed=i) for i, tokens in enumerate(many)]
)


def _segments(batch):
    """Every segment of a batch taken apart again: (row, tokens, positions, targets, weights, patches, windows, pos)."""
    rows = batch.rows
    for r in range(len(rows.tokens_bt)):
        for segment in range(1, rows.segment_ids_bt[r].max(initial=0) + 1):
            inside = np.flatnonzero(rows.segment_ids_bt[r] == segment)
            index = rows.vision_index_bt[r, inside]
            merged = index[index >= 0]
            patches = (merged[:, None] * 4 + np.arange(4)).reshape(-1)
            yield {
                "row": r,
                "inside": inside,
                "tokens": rows.tokens_bt[r, inside],
                "positions": rows.positions_bt[r, inside],
                "targets": batch.targets_bt[r, inside],
                "weights": batch.weights_bt[r, inside],
                "visual": index >= 0,
                "patches": rows.patches_bpc[r, patches],
                "windows": rows.patch_windows_bp[r, patches],
                "patch_positions": rows.patch_positions_bp3[r, patches],
            }


@given(_SAMPLES, st.integers(0, 3))
def test_packed_equals_separate(samples, max_samples):
    shape = RowShape(**{**SHAPE.__dict__, "max_samples": max_samples})
    packed_rows = first_fit(samples, shape=shape)
    placed = [sample for row in packed_rows for sample in row]
    assert sorted(s.sample_id for s in placed) == sorted(s.sample_id for s in samples)
    for row in packed_rows:
        assert sum(len(s.tokens) for s in row) <= shape.tokens
        assert sum(len(s.patches) for s in row) <= shape.patches
        assert not max_samples or len(row) <= max_samples

    batch = build_batch(packed_rows, shape=shape)
    segments = list(_segments(batch))
    assert len(segments) == len(placed)
    for got, sample in zip(segments, placed, strict=True):
        n = len(sample.tokens)
        np.testing.assert_array_equal(got["tokens"], sample.tokens)
        np.testing.assert_array_equal(got["inside"], got["inside"][0] + np.arange(n))  # contiguous
        np.testing.assert_array_equal(got["positions"], np.arange(n))
        np.testing.assert_array_equal(got["visual"], sample.tokens == IMAGE)
        np.testing.assert_array_equal(got["patches"], sample.patches)
        np.testing.assert_array_equal(got["patch_positions"], sample.patch_positions)
        # Windows are renumbered, but group the same patches, and no other sample of the row has them.
        same = sample.patch_windows[:, None] == sample.patch_windows
        np.testing.assert_array_equal(got["windows"][:, None] == got["windows"], same)
        # The target of a position is the next token of the same segment, with that token's weight.
        np.testing.assert_array_equal(got["targets"][:-1], sample.tokens[1:])
        np.testing.assert_array_equal(got["weights"][:-1], sample.weights[1:])
        assert got["weights"][-1] == 0
    for row in range(len(packed_rows)):
        windows = [set(s["windows"]) for s in segments if s["row"] == row]
        assert len(set().union(*windows)) == sum(map(len, windows)) and 0 not in set().union(*windows)


@given(_SAMPLES)
def test_padding_is_inert(samples):
    rows = first_fit(samples, shape=SHAPE)
    batch = build_batch(rows, shape=SHAPE, num_rows=len(rows) + 1)
    for r, row in enumerate([*rows, []]):
        t = sum(len(s.tokens) for s in row)
        p = sum(len(s.patches) for s in row)
        assert (batch.rows.segment_ids_bt[r] != 0).sum() == t and not batch.rows.segment_ids_bt[r, t:].any()
        assert not batch.weights_bt[r, t:].any()
        assert (batch.rows.vision_index_bt[r, t:] == -1).all()
        assert batch.rows.patch_windows_bp[r, :p].all() and not batch.rows.patch_windows_bp[r, p:].any()
        assert not batch.rows.patches_bpc[r, p:].any()


def test_dtypes_and_shapes():
    batch = pack([_sample("a", [1, IMAGE, 2])], shape=SHAPE, num_rows=2)
    expected = {
        "tokens_bt": ("int32", (2, 24)),
        "segment_ids_bt": ("int32", (2, 24)),
        "positions_bt": ("int32", (2, 24)),
        "vision_index_bt": ("int32", (2, 24)),
        "patches_bpc": ("uint8", (2, 32, 6)),
        "patch_windows_bp": ("int32", (2, 32)),
        "patch_positions_bp3": ("int32", (2, 32, 3)),
    }
    assert {k: (v.dtype.name, v.shape) for k, v in vars(batch.rows).items()} == expected
    assert batch.targets_bt.dtype == np.int32 and batch.weights_bt.dtype == np.float32


def test_a_row_by_hand():
    a, b = _sample("a", [5, IMAGE, IMAGE, 6], windows=[1] * 4 + [2] * 4), _sample("b", [7, IMAGE, 8], windows=[1] * 4)
    rows = pack([a, b], shape=SHAPE).rows
    assert rows.segment_ids_bt[0, :9].tolist() == [1, 1, 1, 1, 2, 2, 2, 0, 0]
    assert rows.positions_bt[0, :8].tolist() == [0, 1, 2, 3, 0, 1, 2, 0]
    assert rows.vision_index_bt[0, :8].tolist() == [-1, 0, 1, -1, -1, 2, -1, -1]
    assert rows.patch_windows_bp[0, :13].tolist() == [1] * 4 + [2] * 4 + [3] * 4 + [0]


def test_shift_drops_the_first_weight_and_pads_the_last():
    targets, weights = shift(np.array([4, 5, 6], np.int32), np.array([9, 1, 2], np.float32))
    assert targets.tolist() == [5, 6, 0] and weights.tolist() == [1, 2, 0]


@pytest.mark.parametrize(
    ("tokens", "reason"),
    [
        ([1] * 25, r"'long' has 25 tokens, a row holds 24"),
        ([IMAGE] * 9, r"'long' has 36 patches, a row holds 32"),
        ([], r"'long' has no tokens"),
    ],
)
def test_a_sample_longer_than_a_row_is_named(tokens, reason):
    with pytest.raises(PackingError, match=reason):
        pack([_sample("ok", [1]), _sample("long", tokens)], shape=SHAPE)


def test_contradictions_are_named():
    good = _sample("x", [1, IMAGE, 2])
    for field, value, reason in (
        ("weights", good.weights[:2], "weights: 2, but 3"),
        ("patch_windows", good.patch_windows[:3], "patch_windows: 3, but 4"),
        ("patch_positions", good.patch_positions[:3], "patch_positions: 3, but 4"),
        ("tokens", np.array([1, 2, 2], np.int32), "image tokens"),
        ("patches", good.patches.astype(np.float32), "patches are float32, rows hold uint8"),
        ("patches", good.patches[:, :5], "5 numbers, not 6"),
    ):
        bad = Sample(**{**vars(good), field: value})
        with pytest.raises(PackingError, match=f"sample 'x': .*{reason}"):
            pack([bad], shape=SHAPE)
    with pytest.raises(PackingError, match="2 packed rows do not fit a batch of 1"):
        pack([_sample("a", [1] * 20), _sample("b", [1] * 20)], shape=SHAPE, num_rows=1)
    with pytest.raises(PackingError, match="multiple of 4"):
        RowShape(tokens=8, patches=6, patch_dim=6, merge_factor=4, image_token_id=IMAGE)
    with pytest.raises(PackingError, match="'b' ends at token 40"):
        build_batch([[_sample("a", [1] * 20), _sample("b", [1] * 20)]], shape=SHAPE)
