"""Small models and random packed rows that several test files share."""

from __future__ import annotations

import dataclasses

import numpy as np

from mage_jax.config import ModelConfig, TextConfig, VisionConfig
from mage_jax.types import TEXT_TOKEN, PackedRows


def tiny_config(**changes) -> ModelConfig:
    """Two layers a tower, a vocabulary of 96: compiles in a second."""
    config = ModelConfig(
        vision=VisionConfig(
            hidden_size=64,
            num_layers=2,
            num_heads=2,
            mlp_size=96,
            patch_size=4,
            num_channels=3,
            spatial_merge_size=2,
            rope_theta=10_000.0,
            layer_norm_eps=1e-6,
            frame_window_size=4,
        ),
        text=TextConfig(
            hidden_size=48,
            num_layers=2,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            mlp_size=80,
            vocab_size=96,
            rope_theta=5_000_000.0,
            rms_norm_eps=1e-6,
            max_positions=4096,
        ),
        tied_embeddings=False,
        image_token_id=90,
        video_token_id=91,
        vision_start_token_id=92,
        vision_end_token_id=93,
        bos_token_id=94,
        eos_token_ids=(95,),
    )
    return dataclasses.replace(config, **changes)


def random_rows(
    config: ModelConfig,
    segments: list[list[tuple[int, list[tuple[int, int]]]]],
    *,
    tokens: int,
    patches: int,
    seed: int = 0,
) -> PackedRows:
    """Packed rows of random content.

    Args:
      config: geometry.
      segments: for each row its samples, each (text tokens, [(grid height, grid width), ...]).
      tokens: T.
      patches: P.
      seed: of the content.
    """
    rng = np.random.default_rng(seed)
    batch = len(segments)
    rows = PackedRows(
        tokens_bt=np.zeros((batch, tokens), np.int32),
        segment_ids_bt=np.zeros((batch, tokens), np.int32),
        positions_bt=np.zeros((batch, tokens), np.int32),
        vision_index_bt=np.full((batch, tokens), TEXT_TOKEN, np.int32),
        patches_bpc=np.zeros((batch, patches, config.vision.patch_dim), np.float32),
        patch_windows_bp=np.zeros((batch, patches), np.int32),
        patch_positions_bp3=np.zeros((batch, patches, 3), np.int32),
    )
    for b, samples in enumerate(segments):
        t = p = window = 0
        for number, (text, grids) in enumerate(samples, start=1):
            start = t
            for height, width in grids:
                count, window = height * width, window + 1
                rows.patches_bpc[b, p : p + count] = rng.normal(size=(count, config.vision.patch_dim))
                rows.patch_windows_bp[b, p : p + count] = window
                rows.patch_positions_bp3[b, p : p + count] = block_positions(height, width)
                rows.tokens_bt[b, t : t + count // 4] = config.image_token_id
                rows.vision_index_bt[b, t : t + count // 4] = p // 4 + np.arange(count // 4)
                t, p = t + count // 4, p + count
            rows.tokens_bt[b, t : t + text] = rng.integers(0, config.image_token_id, text)
            t += text
            rows.segment_ids_bt[b, start:t] = number
            rows.positions_bt[b, start:t] = np.arange(t - start)
    return rows


def block_positions(height: int, width: int) -> np.ndarray:
    """(0, row, column) of a grid in 2x2-block order, written independently of the library."""
    return np.array(
        [
            (0, 2 * i + di, 2 * j + dj)
            for i in range(height // 2)
            for j in range(width // 2)
            for di in (0, 1)
            for dj in (0, 1)
        ],
        np.int32,
    )
