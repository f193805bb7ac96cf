"""The released processor's flat layout to packed rows."""

import dataclasses
import json
import pathlib

import numpy as np
import pytest

from mage_jax.config import VisionConfig
from mage_jax.data.hf_inputs import HfInputsError, from_hf_inputs
from mage_jax.data.image import block_positions

IMAGE = 9
VISION = VisionConfig(
    hidden_size=32,
    num_layers=1,
    num_heads=1,
    mlp_size=32,
    patch_size=2,
    num_channels=3,
    spatial_merge_size=2,
    rope_theta=10_000.0,
    layer_norm_eps=1e-6,
    frame_window_size=4,
)
MODEL_GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "model"
CASES = sorted(path.parent.name for path in MODEL_GOLDEN.glob("*/inputs.npz"))


def _inputs(ids, grid, **more):
    patches = int(np.prod(np.reshape(grid, (-1, 3)), axis=1).sum())
    rng = np.random.default_rng(0)
    return {
        "input_ids": np.asarray(ids, np.int64),
        "pixel_values": rng.normal(size=(patches, 12)).astype(np.float32),
        "image_grid_thw": np.asarray(grid, np.int64),
        "patch_positions": rng.integers(0, 50, (patches, 3)),
        **{key: np.asarray(value) for key, value in more.items()},
    }


def _convert(inputs):
    return from_hf_inputs(inputs, vision=VISION, image_token_id=IMAGE)


@pytest.mark.parametrize("case", CASES)
def test_golden_inputs_round_trip(case):
    config = json.loads((MODEL_GOLDEN / case / "config.json").read_text())
    inputs = dict(np.load(MODEL_GOLDEN / case / "inputs.npz"))
    got = from_hf_inputs(
        inputs, vision=dataclasses.replace(VISION, patch_size=16), image_token_id=config["image_token_id"]
    )
    np.testing.assert_array_equal(got.flatten_patches(got.rows.patches_bpc), inputs["pixel_values"])
    np.testing.assert_array_equal(got.flatten_patches(got.rows.patch_positions_bp3), inputs["patch_positions"])
    np.testing.assert_array_equal(got.rows.positions_bt, inputs["position_ids"])
    assert got.rows.segment_ids_bt.min() == 1
    expected = np.load(MODEL_GOLDEN / case / "expected.npz")
    if "cu_seqlens" in expected:
        sizes = np.bincount(got.rows.patch_windows_bp[0])[1:]
        np.testing.assert_array_equal(np.cumsum(sizes), expected["cu_seqlens"][1:])


def test_left_padded_batch():
    """Row 0 has one image after padding, row 1 none, row 2 two of different sizes."""
    ids = [[0, 0, 1, 9, 2, 3], [0, 0, 0, 0, 4, 5], [9, 9, 1, 9, 9, 6]]
    mask = [[0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]]
    inputs = _inputs(ids, [[1, 2, 2], [1, 2, 4], [2, 2, 2]], attention_mask=mask)
    got = _convert(inputs)
    rows = got.rows
    assert rows.segment_ids_bt.tolist() == mask
    assert rows.positions_bt.tolist() == [[1, 1, 0, 1, 2, 3], [1, 1, 1, 1, 0, 1], [0, 1, 2, 3, 4, 5]]
    assert rows.vision_index_bt.tolist() == [[-1, -1, -1, 0, -1, -1], [-1] * 6, [0, 1, -1, 2, 3, -1]]
    assert rows.patches_bpc.shape == (3, 16, 12)
    np.testing.assert_array_equal(rows.patches_bpc[0, :4], inputs["pixel_values"][:4])
    np.testing.assert_array_equal(rows.patches_bpc[2], inputs["pixel_values"][4:])
    assert rows.patch_windows_bp[0].tolist() == [1] * 4 + [0] * 12
    assert not rows.patch_windows_bp[1].any()
    assert rows.patch_windows_bp[2].tolist() == [1] * 8 + [2] * 8
    np.testing.assert_array_equal(got.flatten_patches(rows.patches_bpc), inputs["pixel_values"])
    merged = rows.patches_bpc.reshape(3, 4, 48)
    np.testing.assert_array_equal(got.flatten_merged(merged), inputs["pixel_values"].reshape(5, 48))
    assert got.batch is None


def test_position_ids_are_taken_as_given():
    positions = [[7, 8, 3]]
    got = _convert({"input_ids": np.array([[1, 2, 3]]), "position_ids": np.array(positions)})
    assert got.rows.positions_bt.tolist() == positions


@pytest.mark.parametrize("empty", [True, False])
def test_text_only(empty):
    inputs = {"input_ids": np.array([[1, 2], [3, 4]])}
    if empty:
        inputs |= {"pixel_values": np.zeros((0, 12), np.float32), "image_grid_thw": np.zeros((0, 3), np.int64)}
        inputs |= {"patch_positions": np.zeros((0, 3), np.int64)}
    got = _convert(inputs)
    assert got.rows.patches_bpc.shape == (2, 0, 12)
    assert got.flatten_patches(np.zeros((2, 0, 5))).shape == (0, 5)
    assert got.flatten_merged(np.zeros((2, 0, 7))).shape == (0, 7)
    assert got.rows.positions_bt.tolist() == [[0, 1], [0, 1]]


def test_frames_and_long_clips():
    per_frame = _convert(_inputs([[9, 9, 9]], [[1, 2, 2]] * 3))
    assert per_frame.rows.patch_windows_bp.tolist() == [[1] * 4 + [2] * 4 + [3] * 4]
    clip = _convert(_inputs([[9] * 6], [[6, 2, 2]]))
    assert clip.rows.patch_windows_bp.tolist() == [[1] * 16 + [2] * 8]


def test_positions_of_patches_are_kept_or_made():
    inputs = _inputs([[9, 9]], [[1, 2, 4]])
    np.testing.assert_array_equal(_convert(inputs).rows.patch_positions_bp3[0], inputs["patch_positions"])
    del inputs["patch_positions"]
    np.testing.assert_array_equal(_convert(inputs).rows.patch_positions_bp3[0], block_positions([(1, 2, 4)]))


@pytest.mark.parametrize(
    ("segments", "more", "expected"),
    [
        ([0, 0, 1, 1], {"position_ids": [[0, 1, 0, 1]]}, [1, 1, 2, 2]),  # counts from 0
        ([0, 0, 1, 1], {"position_ids": [[1, 1, 0, 1]]}, [0, 0, 1, 1]),  # left padding
        ([1, 1, 2, 0], {"position_ids": [[0, 1, 0, 1]]}, [1, 1, 2, 0]),  # right padding
        ([1, 1, 2, 0], {}, [1, 1, 2, 0]),
        ([0, 0, 1, 1], {"attention_mask": [[1, 1, 1, 1]]}, [1, 1, 2, 2]),
        ([0, 0, 1, 1], {"attention_mask": [[0, 0, 1, 1]]}, [0, 0, 1, 1]),
        ([0, 0, 1, 0], {"attention_mask": [[1, 1, 1, 0]]}, [1, 1, 2, 0]),
    ],
)
def test_segments_counted_from_one_or_zero(segments, more, expected):
    inputs = {"input_ids": np.array([[1, 2, 3, 4]]), "segment_ids": np.array([segments])}
    got = _convert(inputs | {key: np.asarray(value) for key, value in more.items()})
    assert got.rows.segment_ids_bt.tolist() == [expected]


def test_default_positions_restart_in_segments():
    got = _convert({"input_ids": np.array([[1, 2, 3, 4, 5]]), "segment_ids": np.array([[1, 1, 2, 2, 0]])})
    assert got.rows.positions_bt.tolist() == [[0, 1, 0, 1, 1]]


def test_labels_are_shifted_and_never_cross_segments():
    inputs = {
        "input_ids": np.array([[1, 2, 3, 4, 5, 6]]),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 0]]),
        "labels": np.array([[-100, 2, 3, 4, 5, 6]]),
    }
    batch = _convert(inputs).batch
    assert batch.weights_bt.tolist() == [[1, 1, 0, 1, 0, 0]]
    assert batch.targets_bt[0][batch.weights_bt[0] > 0].tolist() == [2, 3, 5]
    assert batch.weights_bt.dtype == np.float32 and batch.targets_bt.dtype == np.int32


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"input_ids": [[9, 1]]}, r"hold 1 image tokens, image_grid_thw stands for 2"),
        ({"input_ids": [[9], [9]]}, r"row 0 holds 1 image tokens, its grid rows 0 to 0 stand for 2"),
        ({"input_ids": [9, 9]}, "input_ids: must have 2 dimensions"),
        ({"input_ids": [[9.0, 9.0]]}, "input_ids: must hold integers"),
        ({"attention_mask": [[1]]}, r"attention_mask: must have the shape \(1, 2\)"),
        ({"segment_ids": [[-1, 1]]}, "segment_ids: must not be negative"),
        ({"image_grid_thw": [[1, 2, 2]]}, "describes 4 patches, pixel_values has 8"),
        ({"image_grid_thw": [[1, 1, 8]]}, "image_grid_thw: must be"),
        ({"image_grid_thw": [[0, 2, 4]]}, "image_grid_thw: must be"),
        ({"image_grid_thw": None}, "image_grid_thw: is missing"),
        ({"pixel_values": np.zeros((8, 13))}, r"pixel_values: must be \[patches, 12\]"),
        ({"pixel_values": None}, "pixel_values: is missing"),
        ({"patch_positions": np.zeros((7, 3), int)}, r"patch_positions: must be \[8, 3\]"),
        ({"input_ids": None}, "input_ids: is missing"),
    ],
)
def test_contradictions(change, reason):
    inputs = _inputs([[9, 9]], [[1, 2, 4]]) | {
        key: value if value is None else np.asarray(value) for key, value in change.items()
    }
    with pytest.raises(HfInputsError, match=reason):
        _convert(inputs)


def test_image_tokens_without_any_pixels():
    with pytest.raises(HfInputsError, match="hold 1 image tokens, image_grid_thw stands for 0"):
        _convert({"input_ids": np.array([[9, 1]])})
