"""The best-fit packer: nothing lost or repeated, budgets kept, nothing starves, deterministic; full and even rows."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_jax.data.best_fit import BatchPacker, BestFitError, Item, RowPacker, batch_of_like_cost

TOKENS, PATCHES = 64, 40


def _item(number, tokens, images=()):
    """``images``: keys; each image is 8 patches."""
    distinct = tuple((key, 8) for key in dict.fromkeys(images))
    return Item(number, tokens, 8 * len(distinct), tokens**2, distinct)


def _row_patches(row):
    return sum(dict(image for item in row.items for image in item.images).values())


# Few keys, so that samples of a row often share; up to five images, which is a row's patches exactly.
_ITEMS = st.lists(
    st.tuples(st.integers(1, TOKENS), st.lists(st.sampled_from("abcdefgh"), max_size=5)), max_size=40
).map(lambda sizes: [_item(i, tokens, images) for i, (tokens, images) in enumerate(sizes)])


def _pack(items, **settings):
    """All batches, pulled as the loader pulls them, and for each the number of samples drawn until then."""
    packer = BatchPacker(tokens=TOKENS, patches=PATCHES, **settings)
    waiting, ended, batches, drawn = iter(items), False, [], 0
    while True:
        while not ended and packer.wants_samples:
            item = next(waiting, None)
            ended = item is None
            if item is not None:
                packer.add(item)
                drawn += 1
        batch = packer.next_batch(ended=ended)
        if batch is None and ended:
            return batches
        if batch is not None:
            batches.append((batch, drawn))


@given(_ITEMS, st.integers(1, 4), st.integers(1, 20), st.integers(0, 3), st.integers(0, 5))
@settings(deadline=None)
def test_nothing_lost_and_budgets_kept(items, rows, window, max_samples, seed):
    settings = {"rows": rows, "window": window, "max_samples": max_samples, "seed": seed}
    batches = [batch for batch, _ in _pack(items, **settings)]
    placed = [number for batch in batches for row in batch for number in row.numbers]
    assert sorted(placed) == list(range(len(items)))
    for batch in batches[:-1]:
        assert len(batch) == rows
    for row in itertools.chain(*batches):
        assert row.items and sum(item.tokens for item in row.items) <= TOKENS
        assert _row_patches(row) <= PATCHES
        assert not max_samples or len(row.items) <= max_samples
        assert row.cost == sum(item.tokens**2 for item in row.items)
        assert row.numbers == sorted(row.numbers)
    again = [[row.numbers for row in batch] for batch, _ in _pack(items, **settings)]
    assert again == [[row.numbers for row in batch] for batch in batches]


@given(_ITEMS.filter(len), st.integers(0, 3))
@settings(deadline=None)
def test_nothing_starves_in_the_window(items, max_samples):
    """Each row takes the oldest pending sample, however many others keep coming."""
    packer = RowPacker(tokens=TOKENS, patches=PATCHES, max_samples=max_samples)
    more = itertools.count(len(items))
    for item in items:
        packer.add(item)
    for _ in range(2 * len(items)):
        oldest = packer.pending[0].number
        row = packer.next_row()
        assert oldest in row.numbers
        for _ in row.items:  # as many new ones, of a size that fits well
            packer.add(_item(next(more), 16))


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=30), st.integers(1, 8))
def test_a_batch_is_a_run_of_like_costs_with_the_oldest(costs, rows):
    chosen = batch_of_like_cost(costs, rows=rows)
    assert chosen == sorted(set(chosen)) and 0 in chosen and len(chosen) == min(rows, len(costs))
    inside = [costs[i] for i in chosen]
    outside = [cost for i, cost in enumerate(costs) if i not in chosen]
    if len(costs) > rows:
        assert not [cost for cost in outside if min(inside) < cost < max(inside)]


def test_a_row_waits_a_bounded_number_of_batches():
    """One heavy sample among light ones: its row has no peer, and leaves all the same."""
    items = [_item(i, 64 if i == 10 else 8) for i in range(600)]
    batches = _pack(items, rows=2, window=16)
    wait = [drawn for batch, drawn in batches for row in batch if 10 in row.numbers]
    assert wait[0] < 10 + 16 + 2 * 2 * 2 * 8


def test_shared_pictures_count_once():
    """Ten samples of one screenshot: by plain sums two rows of patches, together one."""
    items = [_item(i, 6, images=("screen", f"own{i}") if i < 2 else ("screen",)) for i in range(10)]
    (batch, _), *rest = _pack(items, rows=1, window=16)
    assert not rest and len(batch) == 1 and _row_patches(batch[0]) == 24


def test_companions_are_brought_together():
    """Pairs of samples that share all their pictures, far apart in the window: most end in one row."""
    images = [tuple(f"{pair}{letter}" for letter in "xy") for pair in range(16)]
    items = [_item(i, 20, images=images[i % 16]) for i in range(32)]
    rows = [row for batch, _ in _pack(items, rows=1, window=32) for row in batch]
    together = sum(len({n % 16 for n in row.numbers}) < len(row.numbers) for row in rows)
    assert together >= len(rows) // 2


def test_patches_may_be_the_scarce_budget():
    rng = np.random.default_rng(0)
    packer = BatchPacker(rows=4, window=128, tokens=10_000, patches=4_000)
    sizes = rng.integers((100, 200), (900, 1500), (4_000, 2))
    rows, sent = [], 0
    while True:
        while packer.wants_samples and sent < len(sizes):
            tokens, patches = map(int, sizes[sent])
            packer.add(Item(sent, tokens, patches, tokens**2))
            sent += 1
        batch = packer.next_batch(ended=sent == len(sizes))
        if batch is None and sent == len(sizes):
            break
        rows += batch or ()
    assert sizes[:, 1].sum() / (len(rows) * 4_000) > 0.985


def test_agent_data_fill_rows_evenly():
    """The distribution of tests/bench/bench_packing.py, fewer samples: over 99.3% full, rows of like cost."""
    rng = np.random.default_rng(1)
    for budget in (131_072, 98_304):
        packer = BatchPacker(rows=16, window=256, tokens=32_768, patches=budget)
        used, ratios = [], []
        for number in range(3_000):
            tokens, shots = (
                (int(rng.integers(2_200, 3_001)), 1) if number % 2 else (int(rng.integers(7_000, 10_001)), 3)
            )
            packer.add(Item(number, tokens, 8_160 * shots, tokens**2))
            batch = None if packer.wants_samples else packer.next_batch()
            if batch:
                used += [sum(item.tokens for item in row.items) / 32_768 for row in batch]
                costs = [row.cost for row in batch]
                ratios.append(max(costs) / np.mean(costs))
        assert len(used) > 300 and np.mean(used) > 0.998
        assert np.mean(ratios) < 1.1


def test_refusals():
    packer = RowPacker(tokens=TOKENS, patches=PATCHES)
    for item, reason in (
        (Item(7, 65, 0, 1), "sample 7 has 65 tokens and 0 patches; a row holds 64 and 40"),
        (Item(8, 1, 41, 1), "sample 8 has 1 tokens and 41 patches"),
        (Item(9, 0, 0, 0), "sample 9 has 0 tokens"),
    ):
        with pytest.raises(BestFitError, match=reason):
            packer.add(item)
    with pytest.raises(BestFitError, match="no sample is pending"):
        packer.next_row()
    with pytest.raises(BestFitError, match="rows 0"):
        BatchPacker(rows=0, window=1, tokens=1, patches=0)
    with pytest.raises(BestFitError, match="tokens 0"):
        RowPacker(tokens=0, patches=0)
