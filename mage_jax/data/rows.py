"""Records to global batches of rows, still without pixels: what the loader decodes and ``pack`` writes to disk."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np
from grain import experimental as grain_experimental

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import DataConfig, ImageConfig, VisionConfig
from mage_jax.data.mixture import Source, fingerprint, plans
from mage_jax.data.packing import RowShape, check_fits
from mage_jax.data.packing_iter import BestFitDataset
from mage_jax.data.parse import Record
from mage_jax.data.samples import SamplePlan, plan


def row_shape(data: DataConfig, *, vision: VisionConfig, image_token_id: int) -> RowShape:
    """The rows that a config asks for, with raw uint8 patches."""
    return RowShape(
        tokens=data.tokens_per_row,
        patches=data.patches_per_row,
        patch_dim=vision.patch_dim,
        merge_factor=vision.merge_factor,
        image_token_id=image_token_id,
        max_samples=data.max_samples_per_row,
    )


@dataclasses.dataclass(frozen=True)
class Planner:
    """A record to a plan that fits a row; called by threads."""

    tokenizer: Tokenizer
    image: ImageConfig
    vision: VisionConfig
    shape: RowShape

    def __call__(self, record: Record) -> SamplePlan:
        planned = plan(record, tokenizer=self.tokenizer, image=self.image, vision=self.vision)
        tokens, patches = len(planned.tokens), planned.num_patches
        check_fits(f"{record.id} ({record.where})", tokens=tokens, patches=patches, shape=self.shape)
        return planned


def _sizes(planned: SamplePlan) -> dict[str, Any]:
    """For grain's packer, which copies what it packs: bytes of the right lengths. The plan rides along as it is."""
    return {
        "tokens": np.zeros(len(planned.tokens), np.int8),
        "patches": np.zeros(planned.num_patches, np.int8),
        "plan": planned,
    }


def _plans_of_row(packed: dict[str, Any]) -> list[SamplePlan]:
    return list(packed["plan"])


def _as_list(rows: Sequence[list[SamplePlan]]) -> list[list[SamplePlan]]:
    return list(rows)


def planned_batches(
    data: DataConfig,
    sources: Sequence[Source],
    planner: Planner,
    *,
    shuffle_seed: int | None,
    seed: int,
    epochs: int,
    workers: int,
    rows: int,
    host: int = 0,
    hosts: int = 1,
) -> grain.IterDataset[list[list[SamplePlan]]]:
    """Batches of ``rows`` rows, each a list of plans in segment order; the last of a finite source may have fewer.

    Args:
      data: the packer and its settings; rows, epochs, shuffling and workers are taken from the other arguments.
      sources: at least one, none empty.
      planner: makes plans that fit the planner's shape.
      shuffle_seed: None for file order.
      seed: of the packer.
      epochs: passes over each source, 0 for no end.
      workers: processes among which the result will be sliced.
      rows: rows of a batch.
      host, hosts: takes every ``hosts``-th record of each source, beginning with ``host``.
    """
    shape = planner.shape
    dataset = plans(sources, planner, shuffle_seed=shuffle_seed, epochs=epochs, host=host, hosts=hosts)
    if data.packer == "best_fit":
        # A window larger than the data would mix epochs, and plan every record many times before the first step.
        window = min(data.window, sum(len(source.records) for source in sources) // max(1, workers))
        return BestFitDataset(dataset, shape=shape, rows=rows, window=window, seed=seed)
    dataset = grain_experimental.FirstFitPackIterDataset(
        dataset.map(_sizes),
        length_struct={"tokens": shape.tokens, "patches": shape.patches},
        num_packing_bins=data.packing_bins,
        seed=seed,
        shuffle_bins=shuffle_seed is not None,  # early rows of a window are fuller than late ones
        meta_features=("plan",),
        max_sequences_per_bin=shape.max_samples or None,
    )
    return dataset.map(_plans_of_row).batch(rows, drop_remainder=False, batch_fn=_as_list)


def content_identity(
    data: DataConfig,
    sources: Sequence[Source],
    *,
    tokenizer: Tokenizer,
    image: ImageConfig,
    shuffle_seed: int | None,
    seed: int,
    epochs: int,
) -> dict[str, Any]:
    """What the content and order of the rows depend on, besides workers and hosts; JSON-serialisable."""
    best_fit = data.packer == "best_fit"
    return {
        "packer": data.packer,
        "records": fingerprint(sources),
        "tokenizer": tokenizer.fingerprint,
        "min_pixels": image.min_pixels,
        "max_pixels": image.max_pixels,
        "shuffle": shuffle_seed is not None,
        "seed": seed if best_fit else shuffle_seed,
        "epochs": epochs,
        "rows": data.rows,
        "tokens_per_row": data.tokens_per_row,
        "patches_per_row": data.patches_per_row,
        "max_samples_per_row": data.max_samples_per_row,
        **({"window": data.window} if best_fit else {"packing_bins": data.packing_bins}),
    }
