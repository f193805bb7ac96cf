"""``preprocessor_config.json`` of a Hugging Face folder to ``ImageConfig`` and back.

Only the pixel limits may differ between checkpoints here. Patch size and merge size must agree with the model's
geometry, and the normalisation must be the released one (it is part of the model): anything else is an error.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import numpy as np

from mage_jax.config import PIXEL_MEAN, PIXEL_STD, ImageConfig, VisionConfig

FILE = "preprocessor_config.json"
BICUBIC = 3  # PIL's number


class PreprocessorError(ValueError):
    """The file is unreadable, or asks for preprocessing that this model does not do; file and field are named."""


def to_hf(image: ImageConfig, vision: VisionConfig) -> dict[str, Any]:
    """The fields of a ``preprocessor_config.json``."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": vision.patch_size,
        "merge_size": vision.spatial_merge_size,
        "temporal_patch_size": 1,
        "min_pixels": image.min_pixels,
        "max_pixels": image.max_pixels,
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": BICUBIC,
        "rescale_factor": 1 / 255,
        "image_mean": list(PIXEL_MEAN),
        "image_std": list(PIXEL_STD),
    }


def load(folder: str | os.PathLike[str], *, vision: VisionConfig) -> ImageConfig:
    """Image limits of a checkpoint's folder; the released defaults where it has no ``preprocessor_config.json``.

    Raises:
      PreprocessorError: see the class.
    """
    path = pathlib.Path(folder) / FILE
    if not path.is_file():
        return ImageConfig()
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise PreprocessorError(f"{path}: cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise PreprocessorError(f"{path}: must hold an object")
    wanted = to_hf(ImageConfig(), vision)
    for field in ("patch_size", "merge_size", "temporal_patch_size", "resample"):
        if values.get(field, wanted[field]) != wanted[field]:
            raise PreprocessorError(f"{path}: {field}: is {values[field]!r}, the model needs {wanted[field]!r}")
    for field in ("do_resize", "do_rescale", "do_normalize"):
        if values.get(field, True) is not True:
            raise PreprocessorError(f"{path}: {field}: must be true")
    for field in ("image_mean", "image_std", "rescale_factor"):
        found = values.get(field, wanted[field])
        if np.shape(found) != np.shape(wanted[field]) or not np.allclose(found, wanted[field], rtol=0, atol=1e-6):
            raise PreprocessorError(f"{path}: {field}: is {found!r}, the model needs {wanted[field]!r}")
    return _limits(values, path)


def _limits(values: dict[str, Any], path: pathlib.Path) -> ImageConfig:
    """min/max_pixels win over ``size``, as in the reference processor."""
    size = values.get("size") if isinstance(values.get("size"), dict) else {}
    default = ImageConfig()
    limits = {}
    for field, edge in (("min_pixels", "shortest_edge"), ("max_pixels", "longest_edge")):
        value = values.get(field)
        value = size.get(edge, getattr(default, field)) if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise PreprocessorError(f"{path}: {field}: must be a positive integer, got {value!r}")
        limits[field] = value
    try:
        return ImageConfig(**limits)
    except ValueError as error:
        raise PreprocessorError(f"{path}: {error}") from error
