"""Batches with supervised targets, and a tiny run configuration, shared by the training tests."""

from __future__ import annotations

import dataclasses

import numpy as np

from mage_jax.config import DataConfig, OptimizerConfig, TrainConfig
from mage_jax.data.loader import HostBatch
from mage_jax.params import declare, flatten, unflatten
from mage_jax.types import TrainBatch
from tests.helpers import random_rows, tiny_config

# (text tokens, image grids) of eight samples of different length and supervision.
SAMPLES = [
    (9, [(4, 6)]),
    (5, []),
    (7, [(2, 4), (4, 2)]),
    (12, []),
    (3, [(4, 4)]),
    (15, [(2, 2)]),
    (6, []),
    (10, [(4, 4)]),
]


def with_targets(rows, *, seed: int = 0, zero: bool = False) -> TrainBatch:
    """Next-token targets inside each segment; weights in {0, 0.5, 1}, a function of the sample and not of its place."""
    tokens, segments = rows.tokens_bt, rows.segment_ids_bt
    targets, weights = np.zeros_like(tokens), np.zeros(tokens.shape, np.float32)
    has_next = np.zeros(tokens.shape, bool)
    has_next[:, :-1] = (segments[:, :-1] == segments[:, 1:]) & (segments[:, :-1] > 0)
    targets[:, :-1] = tokens[:, 1:]
    textual = np.zeros(tokens.shape, bool)
    textual[:, :-1] = rows.vision_index_bt[:, 1:] < 0
    used = has_next & textual
    weights[used] = np.random.default_rng(seed + 1).choice([0.0, 0.5, 1.0], p=[0.5, 0.2, 0.3], size=used.sum())
    return TrainBatch(rows=rows, targets_bt=targets, weights_bt=weights * (not zero))


def packed_batch(model=None, *, samples=SAMPLES, seed: int = 0, rows: int = 4, zero: bool = False) -> TrainBatch:
    """``samples`` over ``rows`` rows; the same content for the same seed whatever ``rows`` is."""
    model = model or tiny_config()
    per_row = -(-len(samples) // rows)
    layout = [list(samples[i : i + per_row]) for i in range(0, len(samples), per_row)]
    layout += [[] for _ in range(rows - len(layout))]
    batch = random_rows(model, layout, tokens=48 * max(1, per_row // 2), patches=64 * max(1, per_row // 2), seed=seed)
    return with_targets(batch, seed=seed, zero=zero)


def tiny_train_config(**changes) -> TrainConfig:
    """A run of ``tiny_config`` that warms up in two steps."""
    config = TrainConfig(
        name="tiny",
        model=tiny_config(),
        steps=8,
        data=DataConfig(tokenizer="toy", rows=4, tokens_per_row=48, patches_per_row=64),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=2),
        log_every=1,
    )
    return dataclasses.replace(config, **changes)


def random_params(model, *, seed: int = 0):
    """Parameters at their usual scale, from numpy: the real initialiser takes seconds to compile."""
    rng = np.random.default_rng(seed)
    flat = {}
    for path, spec in flatten(declare(model)).items():
        scale = 1 / np.sqrt(spec.fan_in) if spec.fan_in else 0.02
        flat[path] = (scale * rng.normal(size=spec.shape) + (spec.init == "ones")).astype(np.float32)
    return unflatten(flat)


class SyntheticDataset:
    """Batches that are a function of their number, with a grain-like iterator; ends after ``length`` if given."""

    def __init__(self, config: TrainConfig, *, length: int | None = None, edit=lambda number, batch: batch):
        self.config, self.length, self.edit = config, length, edit
        self.drawn: list[int] = []

    def __iter__(self):
        return _SyntheticIterator(self)


class _SyntheticIterator:
    def __init__(self, dataset: SyntheticDataset):
        self._dataset, self._next = dataset, 0

    def __iter__(self):
        return self

    def __next__(self) -> HostBatch:
        number = self._next
        if number == self._dataset.length:
            raise StopIteration
        self._next += 1
        self._dataset.drawn.append(number)
        rows = self._dataset.config.data.rows
        batch = packed_batch(self._dataset.config.model, rows=rows, seed=number)
        batch = self._dataset.edit(number, batch)
        ids = [[f"sample-{number}-{row}"] for row in range(rows)]
        return HostBatch(batch, ids, int((batch.rows.segment_ids_bt > 0).sum()), 0)

    def close(self):
        pass

    def get_state(self):
        return {"next": self._next}

    def set_state(self, state):
        self._next = state["next"]


def datasets_of(training, evaluating=None):
    """The ``datasets`` argument of ``train`` for fixed datasets."""
    return lambda config, *, evaluation: evaluating if evaluation else training
