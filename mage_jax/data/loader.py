"""Records on disk to batches of packed rows, as a grain dataset whose iterator state resumes bit for bit.

Order of the pipeline::

    records -> shuffle per epoch -> repeat -> [host slice] -> plan (tokens, image headers) -> first-fit packing
            -> rows of a batch -> [host slice] -> decode pixels -> [worker processes] -> HostBatch

Packing holds plans, not pixels, so a resumed run replays its packing window without decoding a picture.

How hosts share the work depends on whether the data end. Repeated for ever, each host takes every n-th *record* and
packs for itself. With finite epochs (evaluation included) every host plans all records and takes its share of the
*rows* of each batch: all hosts then see the same number of batches, without which the last step would hang.

This is the one module of the room that imports grain, which imports jax where it is installed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import grain
import numpy as np
from absl import flags
from grain import experimental as grain_experimental

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import DataConfig, ImageConfig, VisionConfig
from mage_jax.data.packing import RowShape, check_fits, empty_batch, fill_row
from mage_jax.data.parse import Record
from mage_jax.data.records import RecordSet
from mage_jax.data.samples import SamplePlan, check_vision, materialise, plan
from mage_jax.types import PackedRows, TrainBatch

# Threads that render records and read image headers ahead of the packer. Order does not depend on them.
_READ = grain.ReadOptions(num_threads=4, prefetch_buffer_size=32)


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
class _Planner:
    tokenizer: Tokenizer
    image: ImageConfig
    vision: VisionConfig
    shape: RowShape

    def __call__(self, record: Record) -> dict[str, Any]:
        planned = plan(record, tokenizer=self.tokenizer, image=self.image, vision=self.vision)
        tokens, patches = len(planned.tokens), planned.num_patches
        check_fits(f"{record.id} ({record.where})", tokens=tokens, patches=patches, shape=self.shape)
        # The packer copies what it packs, so it is given bytes of the right lengths; the plan rides along as it is.
        return {"tokens": np.zeros(tokens, np.int8), "patches": np.zeros(patches, np.int8), "plan": planned}


@dataclasses.dataclass(frozen=True)
class _Batcher:
    """A list of packed rows to the arrays of this host's share of them."""

    first_row: int
    num_rows: int
    image: ImageConfig
    vision: VisionConfig
    shape: RowShape

    def __call__(self, packed: Sequence[dict[str, Any]]) -> dict[str, Any]:
        plans: list[list[SamplePlan]] = [list(row["plan"]) for row in packed]
        plans = plans[self.first_row : self.first_row + self.num_rows]
        plans += [[] for _ in range(self.num_rows - len(plans))]
        batch = empty_batch(self.num_rows, shape=self.shape)
        tokens_used = patches_used = 0
        for r, row in enumerate(plans):
            samples = (materialise(planned, image=self.image, vision=self.vision) for planned in row)
            tokens, patches = fill_row(batch, r, samples, shape=self.shape)
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
        saved = state.get("identity", {})
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


def _check(
    data: DataConfig, *, vision: VisionConfig, tokenizer: Tokenizer, image_token_id: int, host: int, hosts: int
) -> None:
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
      data: records, row shape, packing and epochs. ``data.rows`` is the global number of rows of a batch.
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
      RecordError, PackingError: a bad record (on opening or when it is reached), or one longer than a row.
    """
    image = data.image if image is None else image
    _check(
        data, vision=vision, tokenizer=tokenizer, image_token_id=image_token_id, host=process_index, hosts=process_count
    )
    field, paths = ("eval_records", data.eval_records) if eval else ("records", data.records)
    records = RecordSet(paths)
    if not len(records):
        raise LoaderError(f"DataConfig.{field}: holds no records ({', '.join(paths) or 'no files'})")
    shuffle, epochs, workers = (False, 1, 0) if eval else (data.shuffle, data.epochs, data.workers)
    if workers > len(records):
        raise LoaderError(f"DataConfig.workers: {workers} workers for {len(records)} records; use fewer")
    shape = RowShape(
        tokens=data.tokens_per_row,
        patches=data.patches_per_row,
        patch_dim=vision.patch_dim,
        merge_factor=vision.merge_factor,
        image_token_id=image_token_id,
        max_samples=data.max_samples_per_row,
    )
    seed %= 2**32
    split_rows = epochs > 0

    dataset = grain.MapDataset.source(records)
    if shuffle:
        dataset = dataset.shuffle(seed=seed)
    dataset = dataset.repeat(epochs or None)
    if not split_rows and process_count > 1:
        dataset = dataset.slice(slice(process_index, None, process_count))
    dataset = dataset.map(_Planner(tokenizer, image, vision, shape)).to_iter_dataset(_READ)
    dataset = grain_experimental.FirstFitPackIterDataset(
        dataset,
        length_struct={"tokens": shape.tokens, "patches": shape.patches},
        num_packing_bins=data.packing_bins,
        seed=seed,
        shuffle_bins=shuffle,  # early rows of a window are fuller than late ones
        meta_features=("plan",),
        max_sequences_per_bin=data.max_samples_per_row or None,
    )
    local_rows = data.rows // process_count
    batcher = _Batcher(process_index * local_rows if split_rows else 0, local_rows, image, vision, shape)
    dataset = dataset.batch(data.rows if split_rows else local_rows, drop_remainder=False, batch_fn=batcher)
    if workers:
        if not flags.FLAGS.is_parsed():  # grain reads its flags when it starts workers; a library caller has none
            flags.FLAGS.mark_as_parsed()
        dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers=workers))
    identity = {
        "records": records.fingerprint,
        "tokenizer": tokenizer.fingerprint,
        "min_pixels": image.min_pixels,
        "max_pixels": image.max_pixels,
        "shuffle": shuffle,
        "seed": seed if shuffle else None,
        "epochs": epochs,
        "workers": workers,
        "process_index": process_index,
        "process_count": process_count,
        "rows": data.rows,
        "tokens_per_row": data.tokens_per_row,
        "patches_per_row": data.patches_per_row,
        "max_samples_per_row": data.max_samples_per_row,
        "packing_bins": data.packing_bins,
    }
    return _HostBatchDataset(dataset, identity)
