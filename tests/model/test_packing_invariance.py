"""Packed samples do not see each other, and a sample's result does not depend on how it is packed."""

import jax
import numpy as np
import pytest

from mage_jax.config import ComputeConfig
from mage_jax.model.layers import unstack_layers
from mage_jax.model.mage_vl import forward, logits
from mage_jax.params import init_params
from tests.helpers import random_rows, tiny_config

CONFIG = tiny_config()
PARAMS = init_params(CONFIG, jax.random.key(0))
SAMPLES = [(9, [(4, 6)]), (5, []), (7, [(2, 4), (4, 2)])]
IMPLS = [ComputeConfig(attention="xla"), ComputeConfig(attention="xla_chunked", attention_chunk=8)]


def run(rows, compute=IMPLS[0], params=PARAMS):
    out = jax.jit(lambda p, r: forward(p, r, config=CONFIG, compute=compute))(params, rows)
    return np.asarray(logits(params, out.hidden_btd, compute=compute))


def slices(rows):
    return [rows.segment_ids_bt[0] == i + 1 for i in range(3)]


@pytest.mark.parametrize("compute", IMPLS)
def test_changing_one_sample_moves_no_other(compute):
    rows = random_rows(CONFIG, [SAMPLES], tokens=48, patches=64)
    before = run(rows, compute)
    first, second, third = slices(rows)
    tokens = np.where(first & (rows.vision_index_bt[0] < 0), (rows.tokens_bt[0] + 1) % 80, rows.tokens_bt[0])
    patches = np.where((rows.patch_windows_bp[0] == 1)[:, None], 3.0, rows.patches_bpc[0])
    after = run(rows.replace(tokens_bt=tokens[None], patches_bpc=patches[None].astype(np.float32)), compute)
    np.testing.assert_array_equal(after[0, second | third], before[0, second | third])
    assert np.abs(after[0, first] - before[0, first]).max() > 0.1


@pytest.mark.parametrize("compute", IMPLS)
def test_packed_equals_separate(compute):
    packed = random_rows(CONFIG, [SAMPLES], tokens=48, patches=64)
    separate = random_rows(CONFIG, [[s] for s in SAMPLES], tokens=20, patches=32)
    want = run(packed, compute)[0]
    # The generator draws patches before text, in order, so the same seed gives the same content either way.
    np.testing.assert_array_equal(
        packed.tokens_bt[0, packed.segment_ids_bt[0] > 0], separate.tokens_bt[separate.segment_ids_bt > 0]
    )
    got = run(separate, compute)[separate.segment_ids_bt > 0]
    np.testing.assert_allclose(got, want[packed.segment_ids_bt[0] > 0], atol=2e-5)


def test_a_mask_that_ignores_segments_would_be_seen():
    packed = random_rows(CONFIG, [SAMPLES], tokens=48, patches=64)
    one_segment = packed.replace(segment_ids_bt=np.minimum(packed.segment_ids_bt, 1))
    used = packed.segment_ids_bt[0] > 1
    assert np.abs(run(one_segment)[0, used] - run(packed)[0, used]).max() > 0.05


def test_images_do_not_attend_to_each_other():
    rows = random_rows(CONFIG, [SAMPLES], tokens=48, patches=64)
    merged = np.minimum(rows.patch_windows_bp, 2)
    assert np.abs(run(rows.replace(patch_windows_bp=merged)) - run(rows)).max() > 1e-3


def test_two_turns_may_share_one_image():
    rows = random_rows(CONFIG, [[(6, [(4, 4)]), (6, [(4, 4)])]], tokens=24, patches=32)
    twice = rows.replace(patches_bpc=np.concatenate([rows.patches_bpc[:, :16]] * 2, axis=1))
    shared = rows.replace(
        vision_index_bt=np.where(rows.vision_index_bt >= 4, rows.vision_index_bt - 4, rows.vision_index_bt),
        patches_bpc=rows.patches_bpc[:, :16],
        patch_windows_bp=rows.patch_windows_bp[:, :16],
        patch_positions_bp3=rows.patch_positions_bp3[:, :16],
    )
    np.testing.assert_allclose(run(shared), run(twice), atol=1e-5)


@pytest.mark.parametrize("remat", ["full", "dots"])
def test_rematerialisation_changes_nothing(remat):
    rows = random_rows(CONFIG, [SAMPLES], tokens=48, patches=64)

    def loss(params, compute):
        return forward(params, rows, config=CONFIG, compute=compute).hidden_btd.sum()

    want = jax.jit(jax.grad(lambda p: loss(p, ComputeConfig())))(PARAMS)
    got = jax.jit(jax.grad(lambda p: loss(p, ComputeConfig(remat=remat))))(PARAMS)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5 * max(1.0, float(np.abs(b).max())))


def test_unstacked_layers_compute_the_same():
    rows = random_rows(CONFIG, [SAMPLES], tokens=48, patches=64)
    np.testing.assert_allclose(run(rows, params=unstack_layers(PARAMS)), run(rows), atol=1e-5)


def test_text_only_rows_need_no_patches():
    rows = random_rows(CONFIG, [[(12, [])]], tokens=16, patches=0)
    padded = random_rows(CONFIG, [[(12, [])]], tokens=16, patches=16)
    np.testing.assert_allclose(run(rows), run(padded), atol=1e-6)


def test_bfloat16_policy_stays_close_and_keeps_float32_where_it_matters():
    rows = random_rows(CONFIG, [SAMPLES], tokens=48, patches=64)
    compute = ComputeConfig(compute_dtype="bfloat16")
    out = forward(PARAMS, rows, config=CONFIG, compute=compute, capture=True)
    assert out.hidden_btd.dtype == "bfloat16" and out.captured["vision_rope_angles"].dtype == "float32"
    used = rows.segment_ids_bt[0] > 0
    got, want = np.asarray(logits(PARAMS, out.hidden_btd, compute=compute))[0, used], run(rows)[0, used]
    assert got.dtype == np.float32
    assert np.sqrt(np.mean((got - want) ** 2)) < 0.03 * np.sqrt(np.mean(want**2)) + 0.01


def test_uint8_patches_are_normalised_as_the_preprocessor_does():
    from mage_jax.model.vision import normalize_pixels

    pixels = np.tile(np.arange(256, dtype=np.uint8)[None, :, None], (1, 1, CONFIG.vision.patch_dim))
    got = np.asarray(normalize_pixels(pixels, CONFIG.vision)).reshape(256, 3, -1)
    scaled = (np.arange(256) * np.float64(1 / 255)).astype(np.float32)
    for c, (mean, std) in enumerate(
        zip((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711), strict=True)
    ):
        want = (scaled - np.float32(mean)) / np.float32(std)
        np.testing.assert_allclose(got[:, c], np.repeat(want[:, None], got.shape[-1], 1), atol=3e-7)
