"""Images to patches, bit for bit as the released preprocessor.

File or bytes -> RGB uint8 -> resize to multiples of 32 -> 16x16 patches in 2x2-block order -> normalised float32.
Nothing here needs jax. As a command::

    python -m mage_jax.data.image --image F --out got.npz

writes ``pixel_values`` float32 [P, 768], ``image_grid_thw`` int64 [1, 3] and ``patch_positions`` int64 [P, 3].
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import functools
import io
import math
import os
import pathlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import einops
import numpy as np
from PIL import Image, UnidentifiedImageError

from mage_jax.config import PIXEL_MEAN, PIXEL_STD, ConfigError, ImageConfig

PATCH_SIZE = 16
MERGE_SIZE = 2
CHANNELS = 3
MAX_ASPECT_RATIO = 200
# A small file can claim a huge picture: refused from the header, before anything is decoded. Pillow's warning level.
MAX_SOURCE_PIXELS = 89_478_485
# Plain raster formats only: Pillow would hand some others to external programs.
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM")
# More than 8 bits a channel would be clipped by the conversion to RGB, not scaled; of colour Pillow drops the low bits.
_DEEP_MODES = ("I", "F")
_PNG_DEPTH_AT = 24  # the byte of a PNG that holds the bits a channel: signature, chunk length, "IHDR", width, height
_TIFF_BITS_PER_SAMPLE = 258


class ImageError(ValueError):
    """An image cannot be used; the text names the file and the reason."""


@dataclasses.dataclass(frozen=True)
class ImageRef:
    """Where an image is: a file, or the encoded bytes themselves (``path`` then only names them in errors)."""

    path: str
    encoded: bytes | None = None

    def __str__(self) -> str:
        return self.path


def smart_resize(height: int, width: int, *, factor: int, min_pixels: int, max_pixels: int) -> tuple[int, int]:
    """(height, width) to resize to: multiples of ``factor``, area within [min_pixels, max_pixels], aspect nearly kept.

    The released rule, quirks included: halves round to even (80 -> 64 for factor 32), and a side below factor / 2
    rounds to 0, so that the "too small" branch runs and may *shrink* the other side (10 x 600 -> 32 x 448).

    Raises:
      ImageError: a side below 1, or an aspect ratio above 200.
    """
    if height < 1 or width < 1:
        raise ImageError(f"size {width}x{height} has no pixels")
    if max(height, width) / min(height, width) > MAX_ASPECT_RATIO:
        raise ImageError(f"size {width}x{height} has an aspect ratio above {MAX_ASPECT_RATIO}; crop the image")
    new_height = round(height / factor) * factor
    new_width = round(width / factor) * factor
    if new_height * new_width > max_pixels:
        beta = math.sqrt(height * width / max_pixels)
        new_height = max(factor, math.floor(height / beta / factor) * factor)
        new_width = max(factor, math.floor(width / beta / factor) * factor)
    elif new_height * new_width < min_pixels:
        beta = math.sqrt(min_pixels / (height * width))
        new_height = math.ceil(height * beta / factor) * factor
        new_width = math.ceil(width * beta / factor) * factor
    return new_height, new_width


def target_size(
    height: int,
    width: int,
    *,
    image: ImageConfig,
    patch_size: int = PATCH_SIZE,
    merge_size: int = MERGE_SIZE,
) -> tuple[int, int]:
    """``smart_resize`` with the factor and limits of the configs."""
    return smart_resize(
        height,
        width,
        factor=patch_size * merge_size,
        min_pixels=image.min_pixels,
        max_pixels=image.max_pixels,
    )


def _as_ref(source: ImageRef | str | os.PathLike[str]) -> ImageRef:
    return source if isinstance(source, ImageRef) else ImageRef(os.fspath(source))


@contextmanager
def _opened(source: ImageRef | str | os.PathLike[str]) -> Iterator[Image.Image]:
    """A Pillow image with its header read and checked; every failure inside the block becomes an ``ImageError``."""
    ref = _as_ref(source)
    try:
        with Image.open(ref.path if ref.encoded is None else io.BytesIO(ref.encoded), formats=FORMATS) as opened:
            width, height = opened.size
            if width < 1 or height < 1:
                raise ImageError(f"{ref}: size {width}x{height} has no pixels")
            if width * height > MAX_SOURCE_PIXELS:
                raise ImageError(f"{ref}: size {width}x{height} exceeds {MAX_SOURCE_PIXELS} pixels; scale it down")
            yield opened
    except ImageError as error:
        text = str(error)
        raise ImageError(text if text.startswith(str(ref)) else f"{ref}: {text}") from error.__cause__
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageError(f"{ref}: {error}") from error
    except UnidentifiedImageError as error:  # its text names a BytesIO where the image was given as bytes
        raise ImageError(f"{ref}: cannot be identified as an image; supported: {', '.join(FORMATS)}") from error
    except OSError as error:
        raise ImageError(f"{ref}: {error.strerror or error}") from error
    except (
        Exception
    ) as error:  # decoders fail on damaged files in many ways (SyntaxError, struct.error, IndexError, ...)
        raise ImageError(f"{ref}: cannot be decoded ({type(error).__name__}: {error})") from error


def _is_deep(opened: Image.Image) -> bool:
    """Whether a channel has more than 8 bits. Pillow gives 16-bit colour the mode of 8-bit colour: ask the header."""
    if opened.mode.split(";")[0] in _DEEP_MODES:
        return True
    if opened.format == "PNG":
        place = opened.fp.tell()
        opened.fp.seek(_PNG_DEPTH_AT)
        depth = opened.fp.read(1)[0]
        opened.fp.seek(place)
        return depth > 8
    if opened.format == "TIFF":
        return max(opened.tag_v2.get(_TIFF_BITS_PER_SAMPLE, (1,))) > 8
    if opened.format == "PPM":  # the decoder's arguments end in the largest value
        return any(isinstance(value, int) and value > 255 for tile in opened.tile for value in tile.args)
    return False


def read_size(source: ImageRef | str | os.PathLike[str]) -> tuple[int, int]:
    """(height, width) from the header alone. EXIF rotation is ignored, as in the released preprocessor."""
    with _opened(source) as opened:
        width, height = opened.size
    return height, width


def _load(source: ImageRef | str | os.PathLike[str]) -> Image.Image:
    """The decoded picture in mode RGB; see ``load_rgb``."""
    with _opened(source) as opened:
        if _is_deep(opened):
            raise ImageError(f"has pixel mode {opened.mode}, more than 8 bits a channel; convert it to 8-bit RGB")
        opened.load()
        return opened if opened.mode == "RGB" else opened.convert("RGB")


def load_rgb(source: ImageRef | str | os.PathLike[str]) -> np.ndarray:
    """uint8 [height, width, 3]. Alpha and palette transparency are dropped, not composited.

    Raises:
      ImageError: missing, truncated or damaged file, unknown format, no pixels or too many, over 8 bits a channel.
    """
    return np.asarray(_load(source))


def _resize(picture: Image.Image, height: int, width: int) -> Image.Image:
    if width != picture.width:
        picture = picture.resize((width, picture.height), Image.Resampling.BICUBIC)
    if height != picture.height:
        picture = picture.resize((width, height), Image.Resampling.BICUBIC)
    return picture


def resize_rgb(rgb: np.ndarray, height: int, width: int) -> np.ndarray:
    """Bicubic resize of uint8 [h, w, 3] to [height, width, 3], rounded to uint8 after each pass.

    Two explicit passes, width first: Pillow 13 swaps its own pass order for some sizes, which moves values by up to 25
    levels, and the released model was fed by the older order.
    """
    return np.asarray(_resize(Image.fromarray(rgb), height, width))


def patchify_uint8(rgb: np.ndarray, *, patch_size: int = PATCH_SIZE, merge_size: int = MERGE_SIZE) -> np.ndarray:
    """uint8 [H, W, 3] -> uint8 [P, 3 * patch_size**2], vectors (channel, y, x), patches in block order.

    Block order: block rows, block columns, then row and column inside a ``merge_size`` block, so that each visual token
    is made of ``merge_size**2`` consecutive rows. H and W must be multiples of ``patch_size * merge_size``.
    """
    height, width, _ = rgb.shape
    factor = patch_size * merge_size
    if height % factor or width % factor:
        raise ImageError(f"size {width}x{height} is not a multiple of {factor}; resize first")
    return einops.rearrange(
        rgb,
        "(bh mh y) (bw mw x) c -> (bh bw mh mw) (c y x)",
        mh=merge_size,
        mw=merge_size,
        y=patch_size,
        x=patch_size,
    )


@functools.cache
def _normalize_table() -> np.ndarray:
    """float32 [3, 256]: every value a channel can take, normalised in the reference's order of roundings."""
    scaled = (np.arange(256, dtype=np.float64) * (1 / 255)).astype(np.float32)
    mean_c, std_c = (np.asarray(v, np.float32)[:, None] for v in (PIXEL_MEAN, PIXEL_STD))
    return (scaled - mean_c) / std_c


def normalize_patches(patches: np.ndarray) -> np.ndarray:
    """uint8 [..., C] patch vectors -> float32 [..., C], bit-equal to the released preprocessor's ``pixel_values``."""
    table = _normalize_table()
    channels = len(table)
    by_channel = patches.reshape(*patches.shape[:-1], channels, patches.shape[-1] // channels)
    out = np.empty(by_channel.shape, np.float32)
    for c in range(channels):
        out[..., c, :] = table[c][by_channel[..., c, :]]
    return out.reshape(patches.shape)


def block_positions(grid_thw: np.ndarray | list[tuple[int, int, int]], *, merge_size: int = MERGE_SIZE) -> np.ndarray:
    """int32 [P, 3]: (frame, row, column) of each patch of each grid row, in block order, restarting per grid row."""
    parts = [np.zeros((0, 3), np.int32)]
    for t, h, w in np.asarray(grid_thw).reshape(-1, 3).tolist():
        grid = np.stack(np.meshgrid(np.arange(t), np.arange(h), np.arange(w), indexing="ij"), axis=-1)
        parts.append(
            einops.rearrange(grid, "t (bh mh) (bw mw) k -> (t bh bw mh mw) k", mh=merge_size, mw=merge_size).astype(
                np.int32
            )
        )
    return np.concatenate(parts)


def attention_windows(grid_thw: np.ndarray | list[tuple[int, int, int]], *, frame_window: int) -> np.ndarray:
    """int32 [P]: attention window of each patch, 1, 2, ... (0 is left for padding).

    One window per grid row; a row with more than ``frame_window`` frames is cut into windows of that many frames and a
    remainder (6 frames -> 4 + 2). Windows never cross grid rows, so images are independent.
    """
    sizes = []
    for t, h, w in np.asarray(grid_thw).reshape(-1, 3).tolist():
        sizes += [min(frame_window, t - first) * h * w for first in range(0, t, frame_window)]
    return np.repeat(np.arange(1, len(sizes) + 1, dtype=np.int32), sizes)


def _grid(ref: ImageRef, height: int, width: int, **how: Any) -> tuple[int, int, int]:
    try:
        new_height, new_width = target_size(height, width, **how)
    except ImageError as error:
        raise ImageError(f"{ref}: {error}") from None
    return 1, new_height // how["patch_size"], new_width // how["patch_size"]


def read_grid(
    source: ImageRef | str | os.PathLike[str],
    *,
    image: ImageConfig,
    patch_size: int = PATCH_SIZE,
    merge_size: int = MERGE_SIZE,
) -> tuple[int, int, int]:
    """The patch grid (1, rows, columns) that ``image_patches`` will give, from the header alone."""
    height, width = read_size(source)
    return _grid(_as_ref(source), height, width, image=image, patch_size=patch_size, merge_size=merge_size)


def image_patches(
    source: ImageRef | str | os.PathLike[str],
    *,
    image: ImageConfig,
    patch_size: int = PATCH_SIZE,
    merge_size: int = MERGE_SIZE,
) -> tuple[np.ndarray, tuple[int, int, int]]:
    """(uint8 [P, C] patch vectors, grid (1, H / patch_size, W / patch_size)) of one image file.

    Raises:
      ImageError: see ``load_rgb`` and ``smart_resize``; the file is named.
    """
    picture = _load(source)  # stays Pillow's until it is resized: each copy of a screenshot is 6 MB
    width, height = picture.size
    grid = _grid(_as_ref(source), height, width, image=image, patch_size=patch_size, merge_size=merge_size)
    resized = np.asarray(_resize(picture, grid[1] * patch_size, grid[2] * patch_size))
    return patchify_uint8(resized, patch_size=patch_size, merge_size=merge_size), grid


def preprocess(source: ImageRef | str | os.PathLike[str], *, image: ImageConfig) -> dict[str, np.ndarray]:
    """The released processor's three arrays for one image (names, dtypes and shapes of the module docstring)."""
    patches, grid = image_patches(source, image=image)
    return {
        "pixel_values": normalize_patches(patches),
        "image_grid_thw": np.asarray([grid], np.int64),
        "patch_positions": block_positions([grid]).astype(np.int64),
    }


def save_npz(path: pathlib.Path, arrays: dict[str, np.ndarray]) -> None:
    """Writes beside the target, then renames: a reader never sees half a file."""
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder; name a file in it", str(path))
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        try:
            with open(temporary, "wb") as file:
                np.savez(file, **arrays)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:  # the name that the user gave, not the hidden one
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def main(argv: list[str] | None = None) -> int:
    """The command; returns the exit code: 0, or 1 with one line on stderr."""
    defaults = ImageConfig()
    parser = argparse.ArgumentParser(description="Preprocess one image into the arrays that the model takes.")
    parser.add_argument("--image", required=True, help="the image file")
    parser.add_argument("--out", required=True, help="the .npz to write")
    parser.add_argument("--min_pixels", type=int, default=defaults.min_pixels)
    parser.add_argument("--max_pixels", type=int, default=defaults.max_pixels)
    args = parser.parse_args(argv)
    try:
        image = dataclasses.replace(defaults, min_pixels=args.min_pixels, max_pixels=args.max_pixels)
        arrays = preprocess(args.image, image=image)
        save_npz(pathlib.Path(args.out), arrays)
    except (ImageError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
