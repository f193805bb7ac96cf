"""Records on disk to batches of packed rows, as a grain dataset whose iterator state resumes bit for bit.

Order of the pipeline::

    records -> shuffle per epoch -> repeat -> [host slice] -> plan (tokens, image headers) -> [mixture] -> packing
            -> rows of a batch -> [host slice] -> decode pixels -> [worker processes] -> HostBatch

Packing holds plans, not pixels, so a resumed run replays its packing window without decoding a picture.

How hosts share the work. With the first-fit packer and data repeated for ever, each host takes every n-th *record* and
packs for itself. Otherwise every host plans all records and takes its share of the *rows* of each batch. Finite epochs
(evaluation included) need that, for all hosts must see the same number of batches, or the last step would hang; the
best-fit packer needs it to balance the rows of a global batch.

A folder of packed rows (``DataConfig.packed``) replaces everything before the pixels.

This module and those behind it (``rows``, ``mixture``, ``packing_iter``, ``packed``) import grain, which imports jax
where it is installed.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import grain
from absl import flags

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import DataConfig, ImageConfig, VisionConfig
from mage_jax.data.mixture import Source, open_sources
from mage_jax.data.packed import PackedBatches, PackedFolder
from mage_jax.data.packing import PlacedImage, RowShape, empty_batch, fill_row
from mage_jax.data.rows import Planner, content_identity, planned_batches, row_shape
from mage_jax.data.samples import SamplePlan, check_vision, materialise
from mage_jax.types import PackedRows, TrainBatch


@dataclasses.dataclass(frozen=True)
class _Worker:
    """First thing that a worker process does. A stop request sent to the process group (Ctrl-C in a terminal) is for
    the trainer alone, which still needs this step's batch; and a worker whose trainer was killed must not live on."""

    parent: int

    def __call__(self, index: int, count: int) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        threading.Thread(target=self._watch, daemon=True).start()

    def _watch(self) -> None:
        while os.getppid() == self.parent:
            time.sleep(1.0)
        os._exit(1)


class LoaderError(ValueError):
    """The loader's settings contradict each other, or a state belongs to a loader with other settings."""


@dataclasses.dataclass(frozen=True)
class HostBatch:
    """What one host feeds to one step.

    Attributes:
      batch: numpy leaves, [local rows, ...], ``patches_bpc`` raw uint8.
      sample_ids: for each local row the ids of its samples, in segment order; empty for a padding row.
      tokens_used, patches_used: without padding, over the local rows.
    """

    batch: TrainBatch
    sample_ids: list[list[str]]
    tokens_used: int
    patches_used: int


@dataclasses.dataclass(frozen=True)
class _Ledger:
    """The part of a batch that is not arrays; a leaf to grain, so that only arrays go through shared memory."""

    sample_ids: list[list[str]]
    tokens_used: int
    patches_used: int


@dataclasses.dataclass(frozen=True)
class _Batcher:
    """A list of packed rows to the arrays of this host's share of them."""

    first_row: int
    num_rows: int
    image: ImageConfig
    vision: VisionConfig
    shape: RowShape

    def __call__(self, packed: Sequence[list[SamplePlan]]) -> dict[str, Any]:
        plans = list(packed[self.first_row : self.first_row + self.num_rows])
        plans += [[] for _ in range(self.num_rows - len(plans))]
        batch = empty_batch(self.num_rows, shape=self.shape)
        tokens_used = patches_used = 0
        for r, row in enumerate(plans):
            placed: dict[str, PlacedImage] = {}  # filled as the row is: what it has is not decoded again
            samples = (materialise(p, image=self.image, vision=self.vision, known=placed) for p in row)
            tokens, patches = fill_row(batch, r, samples, shape=self.shape, placed=placed)
            tokens_used += tokens
            patches_used += patches
        arrays = {f.name: getattr(batch.rows, f.name) for f in dataclasses.fields(PackedRows)}
        arrays |= {"targets_bt": batch.targets_bt, "weights_bt": batch.weights_bt}
        sample_ids = [[planned.sample_id for planned in row] for row in plans]
        return arrays | {"ledger": _Ledger(sample_ids, tokens_used, patches_used)}


def _host_batch(element: dict[str, Any]) -> HostBatch:
    rows = PackedRows(**{f.name: element[f.name] for f in dataclasses.fields(PackedRows)})
    batch = TrainBatch(rows=rows, targets_bt=element["targets_bt"], weights_bt=element["weights_bt"])
    ledger: _Ledger = element["ledger"]
    return HostBatch(batch, ledger.sample_ids, ledger.tokens_used, ledger.patches_used)


class _HostBatchIterator(grain.DatasetIterator[HostBatch]):
    def __init__(self, parent: grain.DatasetIterator, identity: dict[str, Any]):
        super().__init__(parent)
        self._identity = identity

    def __next__(self) -> HostBatch:
        self._assert_not_closed()
        return _host_batch(next(self._parent))

    def get_state(self) -> dict[str, Any]:
        return {"identity": dict(self._identity), "iterator": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        saved = {"packer": "first_fit", **state.get("identity", {})}  # the only one there was
        for key, value in self._identity.items():
            if saved.get(key) != value:
                raise LoaderError(
                    f"the saved data state has {key} {saved.get(key)!r}, this loader has {value!r}: "
                    "the order of records would differ; resume with the same settings"
                )
        self._parent.set_state(state["iterator"])


class _HostBatchDataset(grain.IterDataset[HostBatch]):
    """Makes ``HostBatch``es and stamps the iterator's state with what the order of records depends on."""

    def __init__(self, parent: grain.IterDataset, identity: dict[str, Any]):
        super().__init__(parent)
        self._identity = identity

    def __iter__(self) -> Iterator[HostBatch]:
        return _HostBatchIterator(iter(self._parent), self._identity)


def packed_settings(data: DataConfig, *, tokenizer: Tokenizer, image: ImageConfig) -> dict[str, Any]:
    """What packed rows and the config that reads them must have in common."""
    return {
        "tokenizer": tokenizer.fingerprint,
        "min_pixels": image.min_pixels,
        "max_pixels": image.max_pixels,
        "rows": data.rows,
        "tokens_per_row": data.tokens_per_row,
        "patches_per_row": data.patches_per_row,
    }


def _check_sources(sources: Sequence[Source], *, workers: int, field: str) -> None:
    for source in sources:
        name = f"DataConfig.{field}" if not source.name else source.field
        if not len(source.records):
            raise LoaderError(f"{name}: holds no records ({', '.join(source.records.paths) or 'no files'})")
        if workers > len(source.records):
            raise LoaderError(
                f"DataConfig.workers: {workers} workers for {len(source.records)} records in {name}; use fewer"
            )


def check_settings(
    data: DataConfig, *, vision: VisionConfig, tokenizer: Tokenizer, image_token_id: int, host: int, hosts: int
) -> None:
    """Raises ``LoaderError`` where the model, the tokenizer and the hosts contradict each other."""
    check_vision(vision)
    if not 0 <= host < hosts:
        raise LoaderError(f"process_index: must be from 0 to {hosts - 1}, got {host}")
    if data.rows % hosts:
        raise LoaderError(f"DataConfig.rows: {data.rows} is not divisible by process_count {hosts}")
    if tokenizer.special_ids.image_pad != image_token_id:
        raise LoaderError(
            f"image_token_id: the model has {image_token_id}, the tokenizer {tokenizer.source} has "
            f"{tokenizer.special_ids.image_pad}; they do not belong together"
        )


def make_loader(
    data: DataConfig,
    *,
    vision: VisionConfig,
    tokenizer: Tokenizer,
    image_token_id: int,
    seed: int,
    image: ImageConfig | None = None,
    process_index: int = 0,
    process_count: int = 1,
    eval: bool = False,
) -> grain.IterDataset[HostBatch]:
    """The loader of one host.

    Args:
      data: records or mixture, row shape, packing and epochs. ``data.rows`` is the global number of rows of a batch.
      vision: patch geometry and frame window.
      tokenizer: must have the model's image token.
      image_token_id: the model's.
      seed: of the shuffles; taken modulo 2**32.
      image: resize limits; ``data.image`` if None.
      process_index, process_count: this host among those that share each batch.
      eval: read ``data.eval_records`` once, in order, without worker processes.

    Returns:
      A dataset of ``HostBatch``; its iterator has ``get_state`` and ``set_state`` (JSON-serialisable), and ``close``,
      which ends worker processes. With finite epochs the last batch is filled up with empty rows: every record is
      seen exactly once per epoch.

    Raises:
      LoaderError: settings that contradict each other, or no records.
      PackedError: packed rows that are incomplete, or of other settings.
      RecordError, PackingError: a bad record (on opening or when it is reached), or one longer than a row.
    """
    image = data.image if image is None else image
    check_settings(
        data, vision=vision, tokenizer=tokenizer, image_token_id=image_token_id, host=process_index, hosts=process_count
    )
    shuffle, epochs, workers = (False, 1, 0) if eval else (data.shuffle, data.epochs, data.workers)
    shape = row_shape(data, vision=vision, image_token_id=image_token_id)
    seed %= 2**32
    shuffle_seed = seed if shuffle else None
    local_rows = data.rows // process_count
    first_row = process_index * local_rows
    if data.packed and not eval:
        folder = PackedFolder.open(data.packed)
        folder.check(packed_settings(data, tokenizer=tokenizer, image=image))
        batches = PackedBatches(folder, rows=data.rows, first=first_row, count=local_rows)
        if workers > len(batches):
            raise LoaderError(f"DataConfig.workers: {workers} workers for {len(batches)} packed batches; use fewer")
        first_row = 0  # of what is read
        dataset = grain.MapDataset.source(batches)
        if shuffle:
            dataset = dataset.shuffle(seed=seed)
        dataset = dataset.repeat(epochs or None).to_iter_dataset(
            grain.ReadOptions(num_threads=2, prefetch_buffer_size=2)
        )
        identity = {
            **packed_settings(data, tokenizer=tokenizer, image=image),
            "packer": "packed",
            "records": folder.fingerprint,
            "shuffle": shuffle,
            "seed": shuffle_seed,
            "epochs": epochs,
        }
    else:
        sources = open_sources(data, evaluation=eval)
        _check_sources(sources, workers=workers, field="eval_records" if eval else "records")
        split_rows = epochs > 0 or data.packer == "best_fit"
        first_row = first_row if split_rows else 0
        dataset = planned_batches(
            data,
            sources,
            Planner(tokenizer, image, vision, shape),
            shuffle_seed=shuffle_seed,
            seed=seed,
            epochs=epochs,
            workers=workers,
            rows=data.rows if split_rows else local_rows,
            host=0 if split_rows else process_index,
            hosts=1 if split_rows else process_count,
        )
        identity = content_identity(
            data, sources, tokenizer=tokenizer, image=image, shuffle_seed=shuffle_seed, seed=seed, epochs=epochs
        )
    dataset = dataset.map(_Batcher(first_row, local_rows, image, vision, shape))
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads its flags when it starts workers; a library caller has none
            flags.FLAGS.mark_as_parsed()
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers), _Worker(os.getpid()))
    identity |= {"workers": workers, "process_index": process_index, "process_count": process_count}
    return _HostBatchDataset(dataset, identity)
