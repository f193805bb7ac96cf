"""Record sets to one stream of plans: shuffle, epochs, host slices, and several sources drawn by weight.

**How a mixture draws.** The next sample comes from the source that is furthest behind its weight, so that after n draws
each source has had its share of n to within one sample or so: no randomness, nothing to save but counts. Each source
keeps an iterator and a state of its own, and its own shuffle, seeded by its name: adding a source, or changing a
weight, leaves the order inside the others alone.

**How a mixture ends.** With ``epochs`` 0 no source ends. Otherwise each source is read exactly ``epochs`` times: one
that has been drops out, the others go on in the proportion of their weights, and the mixture ends with its last source.
Weights then decide when a source is read, not how often.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import grain

from mage_jax.config import DataConfig
from mage_jax.data.parse import Record
from mage_jax.data.records import RecordSet
from mage_jax.data.samples import SamplePlan

READ_THREADS, READ_AHEAD = 4, 32  # over all sources; order does not depend on them


@dataclasses.dataclass(frozen=True)
class Source:
    """An opened record set: ``name`` is "" for the only source of a loader without a mixture."""

    name: str
    records: RecordSet
    weight: float

    def seed(self, seed: int) -> int:
        """The source's own shuffle seed."""
        if not self.name:
            return seed
        return (seed + int.from_bytes(hashlib.blake2b(self.name.encode(), digest_size=4).digest())) % 2**32

    @property
    def field(self) -> str:
        """How errors call it."""
        return f"DataConfig.mixture[{self.name}]" if self.name else "DataConfig.records"


def open_sources(data: DataConfig, *, evaluation: bool) -> list[Source]:
    """The record sets that a config names.

    Raises:
      RecordError: a bad file or line.
    """
    if evaluation:
        return [Source("", RecordSet(data.eval_records), 1.0)]
    if not data.mixture:
        return [Source("", RecordSet(data.records), 1.0)]
    return [Source(s.name, RecordSet(s.records), s.weight) for s in data.mixture]


def fingerprint(sources: Sequence[Source]) -> Any:
    """What a data state remembers of its sources; JSON-serialisable."""
    if len(sources) == 1 and not sources[0].name:
        return sources[0].records.fingerprint
    return [[source.name, source.weight, source.records.fingerprint] for source in sources]


@dataclasses.dataclass(frozen=True)
class _Named:
    """Plans of a source, their samples called ``name/id``."""

    name: str
    planner: Callable[[Record], SamplePlan]

    def __call__(self, record: Record) -> SamplePlan:
        planned = self.planner(record)
        return dataclasses.replace(planned, sample_id=f"{self.name}/{planned.sample_id}")


def plans(
    sources: Sequence[Source],
    planner: Callable[[Record], SamplePlan],
    *,
    shuffle_seed: int | None,
    epochs: int,
    host: int = 0,
    hosts: int = 1,
) -> grain.IterDataset[SamplePlan]:
    """The stream of plans.

    Args:
      sources: at least one, none empty.
      planner: a record to a plan; called by threads.
      shuffle_seed: None for file order.
      epochs: passes over each source, 0 for no end.
      host, hosts: takes every ``hosts``-th record of each source, beginning with ``host``.
    """
    threads, ahead = (max(1, total // len(sources)) for total in (READ_THREADS, READ_AHEAD))
    streams = []
    for source in sources:
        stream = grain.MapDataset.source(source.records)
        if shuffle_seed is not None:
            stream = stream.shuffle(seed=source.seed(shuffle_seed))
        stream = stream.repeat(epochs or None)
        if hosts > 1:
            stream = stream.slice(slice(host, None, hosts))
        stream = stream.map(_Named(source.name, planner) if source.name else planner)
        streams.append(stream.to_iter_dataset(grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)))
    return streams[0] if len(streams) == 1 else MixedDataset(streams, [source.weight for source in sources])


class MixedDataset(grain.IterDataset[Any]):
    """Several datasets as one, drawn by weight; see the module's docstring for the order and the end."""

    def __init__(self, parents: Sequence[grain.IterDataset], weights: Sequence[float]):
        super().__init__(parents)
        self._weights = tuple(weights)

    def __iter__(self) -> grain.DatasetIterator[Any]:
        return _MixedIterator([iter(parent) for parent in self._parents], self._weights)


class _MixedIterator(grain.DatasetIterator[Any]):
    def __init__(self, parents: Sequence[grain.DatasetIterator], weights: Sequence[float]):
        super().__init__(parents)
        self._weights = weights
        self._counts = [0] * len(parents)
        self._ended = [False] * len(parents)

    def __next__(self) -> Any:
        self._assert_not_closed()
        while not all(self._ended):
            live = [i for i, ended in enumerate(self._ended) if not ended]
            source = min(live, key=lambda i: ((self._counts[i] + 0.5) / self._weights[i], i))
            try:
                element = next(self._parents[source])
            except StopIteration:
                self._ended[source] = True
                continue
            self._counts[source] += 1
            return element
        raise StopIteration

    def get_state(self) -> dict[str, Any]:
        return {
            "sources": [parent.get_state() for parent in self._parents],
            "counts": list(self._counts),
            "ended": [int(ended) for ended in self._ended],
        }

    def set_state(self, state: dict[str, Any]) -> None:
        for parent, saved in zip(self._parents, state["sources"], strict=True):
            parent.set_state(saved)
        self._counts = list(state["counts"])
        self._ended = [bool(ended) for ended in state["ended"]]
