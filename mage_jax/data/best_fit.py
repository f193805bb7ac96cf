"""Best-fit packing over a window, online: which samples share a row, and which rows share a global batch.

Pure numpy, knows nothing of records, pixels or grain: a sample is a number with a size. Three ideas:

* **The oldest pending sample seeds each row**, so nothing starves: a sample is in a row after at most as many rows as
  samples were pending before it.
* **The last gap is searched, not guessed.** A few random fillings of the row are cut back by one or two samples, and
  every pair of pending samples is looked up for the gap (sorted sizes and a binary search each: all pairs at once).
* **A row should be a fair sample of its window.** Among fillings that are about equally full, the one wins whose
  attention cost and patches are nearest to what a row of the window has on average. Rows then cost alike (every chip
  waits for the heaviest row), and the window keeps its mix instead of collecting what no row wants.

Lengths that differ wildly (one sample as long as a row) cannot give equal rows; so rows wait in a small pool, and a
batch is taken from rows of neighbouring cost. Everything depends on the order of arrival, the seed and the settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence

import numpy as np

TRIES = 8  # random fillings of a row
CUTS = 3  # each is cut back by 0, 1, ... samples before its gap is searched
NEIGHBOURS = 2  # partners tried for each sample of a pair: the best fit may be in use or have too many patches
POOL_BATCHES = 2  # batches' worth of rows that wait to be grouped by cost
# What a share of the row left empty is weighed against: relative distance from the window's mean row.
COST_WEIGHT = 0.02
PATCH_WEIGHT = 0.02


class BestFitError(ValueError):
    """A sample cannot stand in a row, or settings make no sense; the number or setting is named."""


@dataclasses.dataclass(frozen=True)
class Item:
    """A pending sample: its number of arrival and what it takes.

    Attributes:
      number: order of arrival.
      tokens, patches: what it takes of the two budgets when it stands alone.
      cost: attention cost, tokens squared.
      images: (key, patches) of each distinct image; equal keys in one row are encoded once. Empty: nothing is shared.
    """

    number: int
    tokens: int
    patches: int
    cost: int
    images: tuple[tuple[Hashable, int], ...] = ()


@dataclasses.dataclass(frozen=True)
class Row:
    """A packed row: its samples in order of segments, and the sum of their costs."""

    items: tuple[Item, ...]
    cost: int

    @property
    def numbers(self) -> list[int]:
        return [item.number for item in self.items]


class _Filling:
    """A row in the making: members (indices into the window), free budgets, keys of the images it holds."""

    def __init__(self, tokens: int, patches: int):
        self.members: list[int] = []
        self.free_tokens, self.free_patches = tokens, patches
        self.keys: set[Hashable] = set()

    def patches_of(self, item: Item) -> int:
        """What the item would add: images that the row holds already cost nothing."""
        if not self.keys or not item.images:
            return item.patches
        return item.patches - sum(patches for key, patches in item.images if key in self.keys)

    def take(self, index: int, item: Item) -> bool:
        patches = self.patches_of(item)
        if item.tokens > self.free_tokens or patches > self.free_patches:
            return False
        self.members.append(index)
        self.free_tokens -= item.tokens
        self.free_patches -= patches
        self.keys.update(key for key, _ in item.images)
        return True


class RowPacker:
    """Rows out of a window of pending samples.

    Args:
      tokens, patches: budgets of a row.
      max_samples: samples in a row, 0 for no limit.
      seed: of the random fillings.
    """

    def __init__(self, *, tokens: int, patches: int, max_samples: int = 0, seed: int = 0):
        if tokens < 1 or patches < 0 or max_samples < 0:
            raise BestFitError(f"tokens {tokens}, patches {patches}, max_samples {max_samples}: out of range")
        self.tokens, self.patches = tokens, patches
        self.max_samples = max_samples or 2**31
        self.seed = seed
        self.rows_made = 0  # with the pending samples, the whole state
        self.pending: list[Item] = []  # in order of arrival

    def add(self, item: Item) -> None:
        """Raises ``BestFitError`` if the sample cannot stand in a row by itself, or is empty."""
        if not 0 < item.tokens <= self.tokens or not 0 <= item.patches <= self.patches:
            raise BestFitError(
                f"sample {item.number} has {item.tokens} tokens and {item.patches} patches; "
                f"a row holds {self.tokens} and {self.patches}"
            )
        self.pending.append(item)

    def next_row(self) -> Row:
        """Takes the next row out of the pending samples (at least one)."""
        if not self.pending:
            raise BestFitError("no sample is pending")
        members = sorted(self._choose())
        items = tuple(self.pending[index] for index in members)
        for index in reversed(members):
            del self.pending[index]
        self.rows_made += 1
        return Row(items, sum(item.cost for item in items))

    def _choose(self) -> list[int]:
        everything = _Filling(self.tokens, self.patches)
        if len(self.pending) <= self.max_samples and all(
            everything.take(index, item) for index, item in enumerate(self.pending)
        ):
            return everything.members
        sizes = np.asarray([(i.tokens, i.patches, i.cost) for i in self.pending], np.int64)
        demand = sizes.sum(axis=0)
        rows = max(demand[0] / self.tokens, demand[1] / self.patches if self.patches else 0.0)
        fillings = self._cut_fillings(samples_per_row=len(self.pending) / rows)
        best = self._search(fillings, sizes, targets=demand / rows)
        self._top_up(best)
        return best.members

    def _cut_fillings(self, *, samples_per_row: float) -> list[_Filling]:
        """Random rows around the oldest sample, each cut back a little. The first is in order of arrival."""
        count = len(self.pending)
        rng = np.random.default_rng((self.seed, self.rows_made))
        draws = rng.integers(1, count, (TRIES, int(2 * samples_per_row) + 8)).tolist() if count > 1 else []
        companions = self._companions()
        found: dict[tuple[int, ...], _Filling] = {}
        for number, drawn in enumerate(draws):
            # Samples that share a picture with the seed come first in half of the tries: it is then encoded once.
            order = [*(companions if number % 2 else ()), *(range(1, count) if number == 0 else drawn)]
            members = [0]
            whole = _Filling(self.tokens, self.patches)
            whole.take(0, self.pending[0])
            for index in order:
                if len(members) == self.max_samples:
                    break
                if index in members:
                    continue
                if not whole.take(index, self.pending[index]):
                    break
                members.append(index)
            for cut in range(CUTS):
                kept = tuple(members[: max(1, len(members) - cut)])
                if kept not in found:
                    filling = _Filling(self.tokens, self.patches)
                    for index in kept:
                        filling.take(index, self.pending[index])
                    found[kept] = filling
        if not found:
            alone = _Filling(self.tokens, self.patches)
            alone.take(0, self.pending[0])
            found[(0,)] = alone
        return list(found.values())

    def _companions(self) -> list[int]:
        keys = {key for key, _ in self.pending[0].images}
        if not keys:
            return []
        return [
            index for index, item in enumerate(self.pending) if index and any(key in keys for key, _ in item.images)
        ]

    def _search(self, fillings: Sequence[_Filling], sizes: np.ndarray, *, targets: np.ndarray) -> _Filling:
        """The filling, completed by the best none, one or two samples.

        The search runs along the scarcer budget: tokens, unless the window's patches would need more rows.
        """
        scarce = 0 if targets[0] * max(self.patches, 1) >= targets[1] * self.tokens else 1
        budget = (self.tokens, self.patches)
        order = np.argsort(sizes[:, scarce], kind="stable")
        # Entry 0 is "no sample": pairs then cover single samples and nothing at all.
        sorted_sizes = np.concatenate([np.zeros((1, 3), np.int64), sizes[order]])
        main, other, cost = sorted_sizes[:, scarce], sorted_sizes[:, 1 - scarce], sorted_sizes[:, 2]
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(1, len(order) + 1)

        width, count = len(main), len(fillings)
        used = np.zeros((count, width), bool)
        for f, filling in enumerate(fillings):
            used[f, place[filling.members]] = True
        free = np.asarray([(f.free_tokens, f.free_patches) for f in fillings], np.int64)
        room = np.asarray([min(2, self.max_samples - len(f.members)) for f in fillings])[:, None]
        base_cost = np.asarray([sizes[f.members, 2].sum() for f in fillings])[:, None]
        free_main, free_other = free[:, scarce, None], free[:, 1 - scarce, None]
        first = np.arange(width)
        partner = np.searchsorted(main, free_main - main, side="right") - 1
        best_score, best = np.inf, (0, 0, 0)
        for _ in range(NEIGHBOURS):
            second = np.maximum(partner, 0)
            left_main = free_main - main - main[second]
            left_other = free_other - other - other[second]
            allowed = (partner >= 0) & (left_other >= 0) & ~used & ~np.take_along_axis(used, second, 1)
            allowed &= (second != first) | (first == 0)
            allowed &= (first > 0) * 1 + (second > 0) <= room
            left = (left_main, left_other) if scarce == 0 else (left_other, left_main)
            score = left_main / budget[scarce]
            score = score + COST_WEIGHT * np.abs((base_cost + cost + cost[second]) / max(targets[2], 1) - 1)
            if targets[1]:
                score = score + PATCH_WEIGHT * np.abs((self.patches - left[1]) / targets[1] - 1)
            score = np.where(allowed, score, np.inf)
            at = int(np.argmin(score))
            f, i = divmod(at, width)
            if score[f, i] < best_score:
                best_score, best = score[f, i], (f, i, int(second[f, i]))
            partner = partner - 1
        f, *pair = best
        for position in pair:
            if position:
                index = int(order[position - 1])
                fillings[f].take(index, self.pending[index])
        return fillings[f]

    def _top_up(self, filling: _Filling) -> None:
        """Whatever still fits, largest first: matters for samples much shorter than a row, and for shared images."""
        members = set(filling.members)
        small = [i for i, item in enumerate(self.pending) if item.tokens <= filling.free_tokens and i not in members]
        for index in sorted(small, key=lambda i: (-self.pending[i].tokens, i)):
            if len(filling.members) == self.max_samples:
                return
            filling.take(index, self.pending[index])


class BatchPacker:
    """Global batches out of a stream of samples: a window of pending samples, and a pool of rows grouped by cost.

    Args:
      rows: rows of a batch.
      window: pending samples that a row is chosen from; the pool's rows come on top (``held`` counts both).
      tokens, patches, max_samples, seed: see ``RowPacker``.
    """

    def __init__(self, *, rows: int, window: int, tokens: int, patches: int, max_samples: int = 0, seed: int = 0):
        if rows < 1 or window < 1:
            raise BestFitError(f"rows {rows} and window {window} must be positive")
        self.rows, self.window = rows, window
        self.packer = RowPacker(tokens=tokens, patches=patches, max_samples=max_samples, seed=seed)
        self.pool: list[Row] = []  # in order of making

    @property
    def wants_samples(self) -> bool:
        return len(self.packer.pending) < self.window

    @property
    def held(self) -> int:
        """Samples taken in and not yet given out."""
        return len(self.packer.pending) + sum(len(row.items) for row in self.pool)

    def add(self, item: Item) -> None:
        self.packer.add(item)

    def next_batch(self, *, ended: bool = False) -> list[Row] | None:
        """One step: a batch, or None if more samples are wanted first (or, when ``ended``, nothing is left).

        Call it when ``wants_samples`` is false, or with ``ended`` when no more will come: then the last batch may have
        fewer than ``rows`` rows.
        """
        while len(self.pool) < self.rows * POOL_BATCHES:
            if not self.packer.pending or (self.wants_samples and not ended):
                if not ended:
                    return None
                break
            self.pool.append(self.packer.next_row())
        if not self.pool:
            return None
        chosen = batch_of_like_cost([row.cost for row in self.pool], rows=self.rows)
        batch = [self.pool[index] for index in chosen]
        for index in reversed(chosen):
            del self.pool[index]
        return batch


def batch_of_like_cost(costs: Sequence[int], *, rows: int) -> list[int]:
    """Indices (ascending) of ``rows`` rows next to each other in cost, the oldest (index 0) among them.

    Of all such runs, the one with the smallest heaviest-to-mean cost; all indices if there are not more than ``rows``.
    The oldest always leaves, so a row waits for at most as many batches as rows stood before it.
    """
    if len(costs) <= rows:
        return list(range(len(costs)))
    order = np.argsort(np.asarray(costs), kind="stable")
    ranked = np.asarray(costs, np.float64)[order]
    oldest = int(np.flatnonzero(order == 0)[0])
    starts = range(max(0, oldest - rows + 1), min(oldest, len(costs) - rows) + 1)
    start = min(starts, key=lambda s: ranked[s + rows - 1] / ranked[s : s + rows].mean())
    return sorted(order[start : start + rows].tolist())
