"""Images to patches: bit-equal to the reference, and clear errors for unusable files."""

import hashlib
import io
import json
import pathlib
import subprocess
import sys
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mage_jax.config import ImageConfig
from mage_jax.data import image as image_lib
from mage_jax.data.image import ImageError, ImageRef

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "preproc"
INDEX = json.loads((GOLDEN / "index.json").read_text())
TABLE = json.loads((GOLDEN / "smart_resize_table.json").read_text())
CONFIG = ImageConfig()
LIMITS = {"factor": 32, "min_pixels": 3136, "max_pixels": 4_000_000}


def _png(path, size=(64, 64), mode="RGB"):
    Image.new(mode, size).save(path)
    return path


@pytest.mark.parametrize("name", INDEX["images"])
def test_pixels_equal_the_reference_bit_for_bit(name):
    entry = INDEX["images"][name]
    expected = entry["variants"]["convert"]
    path = GOLDEN / entry["file"]
    arrays = image_lib.preprocess(path, image=CONFIG)
    pixels = arrays["pixel_values"]
    assert pixels.dtype == np.float32 and list(pixels.shape) == expected["pixel_values_shape"]
    assert hashlib.sha256(pixels.tobytes()).hexdigest() == expected["pixel_values_sha256_f32"]
    assert arrays["image_grid_thw"].tolist() == [expected["image_grid_thw"]]
    assert image_lib.read_size(path) == (entry["height"], entry["width"])
    rgb = image_lib.load_rgb(path)
    assert hashlib.sha256(rgb.tobytes()).hexdigest() == expected["input_rgb_sha256_u8"]
    resized = image_lib.resize_rgb(rgb, expected["resized_height"], expected["resized_width"])
    assert hashlib.sha256(resized.tobytes()).hexdigest() == expected["resized_rgb_sha256_u8"]


def test_one_pillow_resize_would_not_do():
    """Shows that the goldens see the pass order: the wide noise image differs when Pillow 13 chooses it."""
    rgb = image_lib.load_rgb(GOLDEN / INDEX["images"]["img2_400x30_rgb_wide_noise"]["file"])
    taller = np.asarray(Image.fromarray(rgb).resize((480, 24), Image.Resampling.BICUBIC))
    assert np.abs(image_lib.resize_rgb(rgb, 24, 480).astype(int) - taller).max() > 0


@pytest.mark.parametrize(("height", "width", "expected"), TABLE["rows_h_w_result"])
def test_smart_resize_table(height, width, expected):
    limits = {key: TABLE[key] for key in LIMITS}
    if isinstance(expected, str):
        with pytest.raises(ImageError, match=f"{width}x{height}"):
            image_lib.smart_resize(height, width, **limits)
    else:
        assert list(image_lib.smart_resize(height, width, **limits)) == expected


def test_smart_resize_quirks():
    assert image_lib.smart_resize(80, 48, **LIMITS) == (64, 64)  # halves round to even
    assert image_lib.smart_resize(10, 600, **LIMITS) == (32, 448)  # a side that rounds to 0 shrinks the other
    with pytest.raises(ImageError, match="no pixels"):
        image_lib.smart_resize(0, 10, **LIMITS)
    with pytest.raises(ImageError, match="aspect"):
        image_lib.smart_resize(1, 201, **LIMITS)
    assert image_lib.smart_resize(1, 200, **LIMITS)[0] == 32


@given(st.integers(1, 3000), st.integers(1, 3000))
def test_smart_resize_properties(height, width):
    if max(height, width) / min(height, width) > 200:
        return
    result = image_lib.smart_resize(height, width, **LIMITS)
    assert all(side > 0 and side % 32 == 0 for side in result)


def test_block_order_and_vector_order():
    """Pixel (y, x) of channel c carries its own address, so any swap of axes shows."""
    y, x, c = np.meshgrid(np.arange(64), np.arange(96), np.arange(3), indexing="ij")
    code = (y * 1000 + x) * 10 + c
    patches = image_lib.patchify_uint8(code)
    positions = image_lib.block_positions([(1, 4, 6)])
    assert positions[:6].tolist() == [[0, 0, 0], [0, 0, 1], [0, 1, 0], [0, 1, 1], [0, 0, 2], [0, 0, 3]]
    for vector, (_, row, column) in zip(patches, positions, strict=True):
        block = code[row * 16 : row * 16 + 16, column * 16 : column * 16 + 16]
        np.testing.assert_array_equal(vector, block.transpose(2, 0, 1).reshape(-1))


def test_patchify_needs_whole_blocks():
    with pytest.raises(ImageError, match="48x64"):
        image_lib.patchify_uint8(np.zeros((64, 48, 3), np.uint8))


def test_uint8_patches_normalise_to_the_same_floats():
    rng = np.random.default_rng(0)
    patches = rng.integers(0, 256, (5, 768), dtype=np.uint8)
    scaled = (patches.reshape(5, 3, 256).astype(np.float64) * (1 / 255)).astype(np.float32)
    mean, std = (
        np.asarray(v, np.float32)[:, None]
        for v in ((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
    )
    expected = ((scaled - mean) / std).reshape(5, 768)
    got = image_lib.normalize_patches(patches)
    assert got.dtype == np.float32 and got.tobytes() == expected.tobytes()
    assert image_lib.normalize_patches(patches[:0]).shape == (0, 768)


@pytest.mark.parametrize(
    ("grid", "sizes"),
    [
        ([[1, 4, 6], [1, 6, 4], [1, 8, 8]], [24, 24, 64]),
        ([[6, 4, 6]], [96, 48]),
        ([[4, 2, 2], [5, 2, 2]], [16, 16, 4]),
        ([[1, 4, 6]] * 3, [24, 24, 24]),
        ([], []),
    ],
)
def test_attention_windows(grid, sizes):
    windows = image_lib.attention_windows(grid, frame_window=4)
    assert windows.dtype == np.int32
    assert windows.tolist() == [i for i, size in enumerate(sizes, start=1) for _ in range(size)]


@pytest.mark.parametrize("name", ["img4_210x150_rgba", "x5_120x90_palette_transparent", "x6_100x70_gray_alpha"])
def test_alpha_is_dropped_not_composited(name):
    entry = INDEX["images"][name]
    pixels = image_lib.preprocess(GOLDEN / entry["file"], image=CONFIG)["pixel_values"]
    composited = entry["variants"]["composite_white"]["pixel_values_sha256_f32"]
    assert hashlib.sha256(pixels.tobytes()).hexdigest() != composited


def test_encoded_bytes_work_like_a_file(tmp_path):
    path = GOLDEN / INDEX["images"]["img4_210x150_rgba"]["file"]
    ref = ImageRef("inline", path.read_bytes())
    assert image_lib.read_size(ref) == image_lib.read_size(path)
    np.testing.assert_array_equal(
        image_lib.image_patches(ref, image=CONFIG)[0], image_lib.image_patches(path, image=CONFIG)[0]
    )


def test_missing_folder_empty_and_foreign_files(tmp_path):
    (tmp_path / "empty.png").touch()
    (tmp_path / "text.png").write_text("hello")
    (tmp_path / "page.eps").write_text("%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    for name in ("none.png", "", "empty.png", "text.png", "page.eps"):
        with pytest.raises(ImageError, match=str(tmp_path / name)):
            image_lib.load_rgb(tmp_path / name)


@pytest.mark.parametrize("suffix", ["png", "jpg", "bmp", "webp", "gif"])
def test_truncated_files(tmp_path, suffix):
    rgb = np.random.default_rng(0).integers(0, 256, (90, 70, 3), dtype=np.uint8)
    path = tmp_path / f"a.{suffix}"
    Image.fromarray(rgb).save(path)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ImageError, match=str(path)):
        image_lib.load_rgb(path)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_damaged_png_is_an_image_error_or_an_image(data):
    buffer = io.BytesIO()
    Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3)).save(buffer, "PNG")
    damaged = bytearray(buffer.getvalue())
    for position, value in data.draw(
        st.lists(st.tuples(st.integers(0, len(damaged) - 1), st.integers(0, 255)), max_size=6)
    ):
        damaged[position] = value
    try:
        image_lib.load_rgb(ImageRef("damaged", bytes(damaged)))
    except ImageError as error:
        assert str(error).startswith("damaged: ")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_a_header_that_claims_too_much_is_refused_unread(tmp_path):
    path = _png(tmp_path / "bomb.png")
    raw = bytearray(path.read_bytes())
    for width, height in ((60_000, 60_000), (10_000, 10_000), (0, 64)):
        raw[16:24] = width.to_bytes(4, "big") + height.to_bytes(4, "big")
        raw[29:33] = zlib.crc32(raw[12:29]).to_bytes(4, "big")
        path.write_bytes(raw)
        for read in (image_lib.read_size, image_lib.load_rgb):
            with pytest.raises(ImageError, match=str(path)):
                read(path)


def test_deep_and_thin_images_name_the_file(tmp_path):
    deep = tmp_path / "deep.png"
    Image.fromarray(np.full((40, 40), 1000, np.uint16)).save(deep)
    with pytest.raises(ImageError, match=r"deep\.png.*8 bits"):
        image_lib.load_rgb(deep)
    with pytest.raises(ImageError, match=r"thin\.png.*aspect"):
        image_lib.image_patches(_png(tmp_path / "thin.png", (1000, 2)), image=CONFIG)


@pytest.mark.parametrize("mode", ["1", "L", "P", "CMYK", "YCbCr"])
def test_other_modes_become_rgb(tmp_path, mode):
    path = tmp_path / ("a.jpg" if mode in ("CMYK", "YCbCr") else "a.png")
    assert image_lib.load_rgb(_png(path, (20, 10), mode)).shape == (10, 20, 3)


def test_command_writes_the_three_arrays(tmp_path, capsys):
    path = GOLDEN / INDEX["images"]["img4_210x150_rgba"]["file"]
    out = tmp_path / "got.npz"
    assert image_lib.main(["--image", str(path), "--out", str(out)]) == 0
    assert list(tmp_path.iterdir()) == [out]
    with np.load(out) as got:
        assert {k: (v.dtype.name, v.shape) for k, v in got.items()} == {
            "pixel_values": ("float32", (140, 768)),
            "image_grid_thw": ("int64", (1, 3)),
            "patch_positions": ("int64", (140, 3)),
        }
    assert image_lib.main(["--image", str(path), "--out", str(out), "--max_pixels", "4096"]) == 0
    with np.load(out) as got:
        assert len(got["pixel_values"]) * 256 <= 4096


def test_command_reports_bad_input_in_one_line(tmp_path, capsys):
    for args in (
        ["--image", str(tmp_path / "none.png"), "--out", str(tmp_path / "o.npz")],
        ["--image", str(_png(tmp_path / "a.png")), "--out", str(tmp_path / "none" / "o.npz")],
        ["--image", str(tmp_path / "a.png"), "--out", str(tmp_path / "o.npz"), "--min_pixels", "-1"],
    ):
        assert image_lib.main(args) == 1
        error = capsys.readouterr().err
        assert error.startswith("error: ") and error.count("\n") == 1
    assert not (tmp_path / "o.npz").exists()


def test_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "mage_jax.data.image", "--image", "nope.png", "--out", str(tmp_path / "o.npz")]
    done = subprocess.run(command, cwd=GOLDEN.parents[2], capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("error: nope.png")


def test_the_room_runs_without_jax():
    agent = ("tokenizer", "toy_tokenizer", "render")
    data = ("image", "parse", "records", "samples", "packing", "hf_inputs")
    modules = [f"mage_jax.agent.{name}" for name in agent] + [f"mage_jax.data.{name}" for name in data]
    code = (
        f"import sys, {', '.join(modules)}; print([m for m in ('jax', 'flax', 'grain', 'torch') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=GOLDEN.parents[2], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
