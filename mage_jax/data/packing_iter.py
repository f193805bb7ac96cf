"""``best_fit`` as a grain dataset: plans in, global batches of rows of plans out, with an exact and small state.

The state holds no plan. It is the parent's state just before the oldest sample that is still held, and the numbers of
the held samples counted from there. Restoring draws those samples from the parent again, which renders text and reads
image headers but decodes no picture, and does so when the next batch is asked for.
"""

from __future__ import annotations

import collections
from collections.abc import Iterator
from typing import Any

import grain

from mage_jax.data.best_fit import BatchPacker, Item, Row
from mage_jax.data.packing import RowShape
from mage_jax.data.samples import SamplePlan

Batch = list[list[SamplePlan]]


class BestFitDataset(grain.IterDataset[Batch]):
    """Batches of ``rows`` rows; the last of a finite parent may have fewer.

    Args:
      parent: plans, each small enough for a row of ``shape``.
      shape: the budgets.
      rows: rows of a batch.
      window: pending samples that a row is chosen from.
      seed: of the packer's random fillings.
    """

    def __init__(self, parent: grain.IterDataset[SamplePlan], *, shape: RowShape, rows: int, window: int, seed: int):
        super().__init__(parent)
        self._settings = {
            "rows": rows,
            "window": window,
            "tokens": shape.tokens,
            "patches": shape.patches,
            "max_samples": shape.max_samples,
            "seed": seed,
        }

    def __iter__(self) -> Iterator[Batch]:
        return _BestFitIterator(iter(self._parent), self._settings)


class _BestFitIterator(grain.DatasetIterator[Batch]):
    def __init__(self, parent: grain.DatasetIterator, settings: dict[str, int]):
        super().__init__(parent)
        self._settings = settings
        self._to_replay: dict[str, Any] | None = None
        self._clear()

    def _clear(self) -> None:
        self._packer = BatchPacker(**self._settings)
        self._plans: dict[int, SamplePlan] = {}  # held samples, by number
        # (number, the parent's state before it was drawn), from the oldest held sample on.
        self._before: collections.deque[tuple[int, Any]] = collections.deque()
        self._drawn = 0
        self._ended = False

    def _draw(self) -> Item | None:
        """The next sample as an item, its plan kept; None at the end."""
        before = self._parent.get_state()
        try:
            planned = next(self._parent)
        except StopIteration:
            self._ended = True
            return None
        number = self._drawn
        self._drawn += 1
        self._before.append((number, before))
        self._plans[number] = planned
        tokens = len(planned.tokens)
        return Item(number, tokens, planned.num_patches, tokens**2, planned.distinct_images)

    def __next__(self) -> Batch:
        self._assert_not_closed()
        self._replay()
        while True:
            while not self._ended and self._packer.wants_samples:
                if (item := self._draw()) is not None:
                    self._packer.add(item)
            batch = self._packer.next_batch(ended=self._ended)
            if batch is not None:
                break
            if self._ended:
                raise StopIteration
        rows = [[self._plans.pop(number) for number in row.numbers] for row in batch]
        self._forget()
        return rows

    def _forget(self) -> None:
        while self._before and self._before[0][0] not in self._plans:
            self._before.popleft()

    def get_state(self) -> dict[str, Any]:
        if self._to_replay is not None:
            return self._to_replay
        first, parent = self._before[0] if self._before else (self._drawn, self._parent.get_state())
        return {
            "parent": parent,
            "drawn": self._drawn - first,
            "pending": [item.number - first for item in self._packer.packer.pending],
            "pool": [[number - first for number in row.numbers] for row in self._packer.pool],
            "rows_made": self._packer.packer.rows_made,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        self._to_replay = state

    def _replay(self) -> None:
        """Draws the samples that the state to restore held, and puts them where they were."""
        if self._to_replay is None:
            return
        state = self._to_replay
        self._clear()
        self._parent.set_state(state["parent"])
        held = set(state["pending"]).union(*state["pool"])
        items: dict[int, Item] = {}
        for number in range(state["drawn"]):
            item = self._draw()
            if item is None:
                raise RuntimeError("the data ended while a saved state was replayed: the records became fewer")
            if number in held:
                items[number] = item
            else:
                del self._plans[number]
        self._forget()
        for number in state["pending"]:
            self._packer.add(items[number])
        for numbers in state["pool"]:
            members = tuple(items[number] for number in numbers)
            self._packer.pool.append(Row(members, sum(item.cost for item in members)))
        self._packer.packer.rows_made = state["rows_made"]
        self._to_replay = None
