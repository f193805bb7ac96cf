"""Messages to the packed rows that generation starts from: the same renderer, images and packing as training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mage_jax.agent.render import render
from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import ImageConfig, ModelConfig
from mage_jax.data import image as image_lib
from mage_jax.data.image import ImageRef
from mage_jax.data.packing import RowShape, build_batch
from mage_jax.types import PackedRows, Sample


def prompt_sample(
    messages: Sequence[Mapping[str, Any]],
    images: Sequence[ImageRef | str],
    *,
    tokenizer: Tokenizer,
    image: ImageConfig,
    model: ModelConfig,
    sample_id: str = "prompt",
) -> Sample:
    """One conversation that ends with the header of the turn to generate.

    Args:
      messages: as ``mage_jax.agent.render.render`` takes them.
      images: the pictures of the messages' image items, in order of appearance.
      tokenizer: the checkpoint's own.
      image: pixel limits.
      model: geometry.
      sample_id: a name for errors.

    Raises:
      ImageError: a picture cannot be read (the file is named).
      RenderError: messages and images do not fit together.
    """
    vision = model.vision
    vectors, grids = [np.zeros((0, vision.patch_dim), np.uint8)], []
    for ref in images:
        patches, grid = image_lib.image_patches(
            ref, image=image, patch_size=vision.patch_size, merge_size=vision.spatial_merge_size
        )
        vectors.append(patches)
        grids.append(grid)
    rendered = render(
        messages,
        tokenizer=tokenizer,
        image_token_counts=[int(np.prod(grid)) // vision.merge_factor for grid in grids],
        add_generation_prompt=True,
    )
    return Sample(
        sample_id=sample_id,
        tokens=rendered.tokens,
        weights=rendered.weights,
        patches=np.concatenate(vectors),
        patch_windows=image_lib.attention_windows(grids, frame_window=vision.frame_window_size),
        patch_positions=image_lib.block_positions(grids, merge_size=vision.spatial_merge_size),
    )


def prompt_rows(samples: Sequence[Sample], *, model: ModelConfig) -> PackedRows:
    """One row per prompt, as wide as the longest (numpy leaves)."""
    shape = RowShape(
        tokens=max(len(s.tokens) for s in samples),
        patches=max(len(s.patches) for s in samples),
        patch_dim=model.vision.patch_dim,
        merge_factor=model.vision.merge_factor,
        image_token_id=model.image_token_id,
    )
    return build_batch([[s] for s in samples], shape=shape).rows
