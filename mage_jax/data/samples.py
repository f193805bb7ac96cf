"""A record to a ``Sample``, in two steps, so that packing and resuming never decode a picture.

``plan`` renders the tokens and reads only image headers; ``materialise`` decodes. The packer's window and a replayed
iterator hold plans: a few small arrays and references.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import os
from collections.abc import Container

import numpy as np

from mage_jax.agent.render import RenderError, render
from mage_jax.agent.tokenizer import Tokenizer, TokenizerError
from mage_jax.config import ImageConfig, VisionConfig
from mage_jax.data import image as image_lib
from mage_jax.data.image import ImageError, ImageRef
from mage_jax.data.parse import Record, RecordError
from mage_jax.types import ImageSpan, Sample


@dataclasses.dataclass(frozen=True)
class PlannedImage:
    """An image and the patch grid (1, rows, columns) that it will have."""

    ref: ImageRef
    grid: tuple[int, int, int]

    @property
    def num_patches(self) -> int:
        return self.grid[0] * self.grid[1] * self.grid[2]

    @functools.cached_property
    def key(self) -> str:
        """Names the pixels: equal for the same file, and for the same bytes inside records."""
        if self.ref.encoded is None:
            return os.path.normpath(self.ref.path)
        return f"blake2b:{hashlib.blake2b(self.ref.encoded, digest_size=16).hexdigest()}"


@dataclasses.dataclass(frozen=True)
class SamplePlan:
    """A sample without its pixels. ``tokens`` int32 [T], ``weights`` float32 [T], ``where`` file:line."""

    sample_id: str
    where: str
    tokens: np.ndarray
    weights: np.ndarray
    images: tuple[PlannedImage, ...]

    @functools.cached_property
    def distinct_images(self) -> tuple[tuple[str, int], ...]:
        """(key, patches) of each different image, in order of first appearance: what a row has to hold."""
        return tuple({image.key: image.num_patches for image in self.images}.items())

    @property
    def num_patches(self) -> int:
        """Patches that a row of this sample alone holds; an image shown twice counts once."""
        return sum(patches for _, patches in self.distinct_images)


def check_vision(vision: VisionConfig) -> None:
    """Images have three channels here, whatever the model could take."""
    if vision.num_channels != image_lib.CHANNELS:
        raise ImageError(f"VisionConfig.num_channels: images have {image_lib.CHANNELS}, got {vision.num_channels}")


def plan(record: Record, *, tokenizer: Tokenizer, image: ImageConfig, vision: VisionConfig) -> SamplePlan:
    """Renders a record; image token counts come from the images' headers.

    Raises:
      RecordError: an image is missing or unusable, or the messages cannot be rendered; file, line and reason are named.
    """
    planned = []
    for i, ref in enumerate(record.images):
        if ref.encoded is None and not os.path.isfile(ref.path):
            raise RecordError(
                f"{record.where}: images[{i}]: no file {ref.path}; a relative path starts at the JSONL's folder"
            )
        try:
            grid = image_lib.read_grid(
                ref, image=image, patch_size=vision.patch_size, merge_size=vision.spatial_merge_size
            )
        except ImageError as error:
            raise RecordError(f"{record.where}: images[{i}]: {error}") from error
        planned.append(PlannedImage(ref, grid))
    try:
        rendered = render(
            record.messages,
            tokenizer=tokenizer,
            image_token_counts=[p.num_patches // vision.merge_factor for p in planned],
        )
    except (RenderError, TokenizerError) as error:
        raise RecordError(f"{record.where}: {error}") from error
    return SamplePlan(record.id, record.where, rendered.tokens, rendered.weights, tuple(planned))


def materialise(planned: SamplePlan, *, image: ImageConfig, vision: VisionConfig, known: Container[str] = ()) -> Sample:
    """Decodes the images of a plan to raw uint8 patch vectors [P, C] (the model normalises them).

    Each distinct image is decoded once; those whose key is in ``known`` (the row has them) are not decoded at all.

    Raises:
      RecordError: an image is damaged, or changed its size since it was planned.
    """
    patches = [np.zeros((0, vision.patch_dim), np.uint8)]
    spans: dict[str, ImageSpan] = {}
    grids = []
    for i, planned_image in enumerate(planned.images):
        key = planned_image.key
        if key in spans:
            continue
        if key in known:
            spans[key] = ImageSpan(key, planned_image.num_patches, -1)
            continue
        try:
            vectors, grid = image_lib.image_patches(
                planned_image.ref, image=image, patch_size=vision.patch_size, merge_size=vision.spatial_merge_size
            )
        except ImageError as error:
            raise RecordError(f"{planned.where}: images[{i}]: {error}") from error
        if grid != planned_image.grid:
            raise RecordError(
                f"{planned.where}: images[{i}]: {planned_image.ref} changed while in use: "
                f"patch grid {planned_image.grid} in its header, {grid} decoded"
            )
        spans[key] = ImageSpan(key, planned_image.num_patches, sum(map(len, patches)))
        patches.append(vectors)
        grids.append(grid)
    # The frequent sample with one picture is spared a copy of its pixels.
    joined = patches[1] if len(patches) == 2 else np.concatenate(patches)
    return Sample(
        sample_id=planned.sample_id,
        tokens=planned.tokens,
        weights=planned.weights,
        patches=joined,
        patch_windows=image_lib.attention_windows(grids, frame_window=vision.frame_window_size),
        patch_positions=image_lib.block_positions(grids, merge_size=vision.spatial_merge_size),
        images=tuple(spans[planned_image.key] for planned_image in planned.images),
    )


def make_sample(record: Record, *, tokenizer: Tokenizer, image: ImageConfig, vision: VisionConfig) -> Sample:
    """``plan`` and ``materialise`` at once."""
    planned = plan(record, tokenizer=tokenizer, image=image, vision=vision)
    return materialise(planned, image=image, vision=vision)
