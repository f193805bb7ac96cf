"""How full packed rows are, how alike they cost, and how fast they are packed: ours beside grain's own packers.

The samples are sizes only (no text, no pixels): half grounding samples of 2,200 to 3,000 tokens with one full-HD
screenshot, half agent turns of 7,000 to 10,000 tokens with three; a screenshot is 8,160 patches (2,040 of the tokens).
Every packer sees the same samples in the same order, online. Columns: share of token positions used; heaviest over mean
attention cost (sum of squared segment lengths) of a global batch, mean over batches and the worst one; most samples
held at a time; samples a second on one core. Needs no more than requirements.txt.

    .venv/bin/python tests/bench/bench_packing.py [--samples 200000] [--patches 131072 98304] [--rows 64] [--window 256]
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import os
import time
from collections.abc import Iterator

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import grain
import numpy as np
from grain import experimental as grain_experimental

from mage_jax.data.best_fit import BatchPacker, Item

TOKENS = 32_768
SCREENSHOT = 8_160  # patches of 1920x1080, after rounding its sides to multiples of 32
GROUNDING, TURN = (2_200, 3_000), (7_000, 10_000)  # tokens, both ends included
GRAIN = {
    "grain first fit": grain_experimental.FirstFitPackIterDataset,
    "grain best fit": grain_experimental.BestFitPackIterDataset,
}


@dataclasses.dataclass(frozen=True)
class Figures:
    """One line of the table; ``used`` and the ratios are fractions."""

    name: str
    patches: int
    used: float
    mean_ratio: float
    worst_ratio: float
    held: int
    seconds: float
    samples: int


def sample_sizes(count: int, *, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(tokens, patches), int64 [count]."""
    rng = np.random.default_rng(seed)
    is_turn = rng.permutation(count) % 2 == 0  # exactly half and half
    tokens = np.where(
        is_turn, rng.integers(*TURN, count, endpoint=True), rng.integers(*GROUNDING, count, endpoint=True)
    )
    return tokens, np.where(is_turn, 3 * SCREENSHOT, SCREENSHOT)


def figures(name: str, rows: list[list[int]], tokens: np.ndarray, *, batch: int, **rest) -> Figures:
    """Checks that every sample is in one row, and measures. The incomplete batch at the end has no ratio."""
    placed = np.concatenate([np.asarray(row) for row in rows])
    assert np.array_equal(np.sort(placed), np.arange(len(tokens))), f"{name}: samples lost or repeated"
    sums = np.asarray([tokens[row].sum() for row in rows])
    assert sums.max() <= TOKENS
    costs = np.asarray([(tokens[row] ** 2).sum() for row in rows], np.float64)
    whole = costs[: len(costs) // batch * batch].reshape(-1, batch)
    ratios = whole.max(axis=1) / whole.mean(axis=1)
    used = sums.sum() / (len(rows) * TOKENS)
    return Figures(name, used=used, mean_ratio=ratios.mean(), worst_ratio=ratios.max(), samples=len(tokens), **rest)


def ours(tokens: np.ndarray, patches: np.ndarray, *, budget: int, batch: int, window: int) -> Figures:
    begin = time.process_time()
    packer = BatchPacker(rows=batch, window=window, tokens=TOKENS, patches=budget)
    waiting: Iterator[Item] = (
        Item(i, t, p, t * t) for i, (t, p) in enumerate(zip(tokens.tolist(), patches.tolist(), strict=True))
    )
    rows, held, ended = [], 0, False
    while True:
        while not ended and packer.wants_samples:
            item = next(waiting, None)
            ended = item is None
            if item is not None:
                packer.add(item)
        held = max(held, packer.held)
        made = packer.next_batch(ended=ended)
        if made is None and ended:
            break
        rows += [row.numbers for row in made or ()]
    seconds = time.process_time() - begin
    for row in rows:
        assert patches[row].sum() <= budget
    return figures("ours, best fit", rows, tokens, batch=batch, patches=budget, held=held, seconds=seconds)


def of_grain(name: str, tokens: np.ndarray, patches: np.ndarray, *, budget: int, batch: int, bins: int) -> Figures:
    """Grain's packer as the loader uses it: bytes of the right lengths, the sample's number along with them."""

    def element(i: int) -> dict:
        return {"tokens": np.zeros(tokens[i], np.int8), "patches": np.zeros(patches[i], np.int8), "number": i}

    begin = time.process_time()
    source = grain.MapDataset.range(len(tokens)).map(element)
    dataset = GRAIN[name](
        source.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)),
        length_struct={"tokens": TOKENS, "patches": budget},
        num_packing_bins=bins,
        shuffle_bins=True,
        meta_features=("number",),
    )
    rows = [list(row["number"]) for row in dataset]
    seconds = time.process_time() - begin
    samples_a_row = len(tokens) / len(rows)
    held = int(bins * samples_a_row)
    name = f"{name}, {bins} bins"
    return figures(name, rows, tokens, batch=batch, patches=budget, held=held, seconds=seconds)


def table(lines: list[Figures]) -> str:
    head = ("packer", "patches/row", "used", "heaviest/mean", "worst", "held", "samples/s")
    text = [f"{head[0]:<28}{head[1]:>12}{head[2]:>10}{head[3]:>15}{head[4]:>8}{head[5]:>7}{head[6]:>11}"]
    for f in lines:
        text.append(
            f"{f.name:<28}{f.patches:>12,}{f.used:>10.2%}{f.mean_ratio:>15.3f}{f.worst_ratio:>8.3f}{f.held:>7,}"
            f"{f.samples / f.seconds:>11,.0f}"
        )
    return "\n".join(text)


def main(argv: list[str] | None = None) -> list[Figures]:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--patches", type=int, nargs="+", default=[131_072, 98_304])
    parser.add_argument("--rows", type=int, default=64, help="rows of a global batch")
    parser.add_argument("--window", type=int, default=256, help="pending samples of our packer")
    parser.add_argument("--bins", type=int, nargs="+", default=[16, 256], help="rows that grain's packers keep open")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    tokens, patches = sample_sizes(args.samples, seed=args.seed)
    shots = int(patches.sum()) // SCREENSHOT
    print(
        f"{args.samples:,} samples, {tokens.mean():,.0f} tokens and {shots / args.samples:.2f} screenshots on average"
    )
    print(f"rows of {TOKENS:,} tokens, batches of {args.rows} rows, window {args.window}")
    lines = []
    for budget in args.patches:
        lines.append(ours(tokens, patches, budget=budget, batch=args.rows, window=args.window))
        for name, bins in itertools.product(GRAIN, args.bins):
            lines.append(of_grain(name, tokens, patches, budget=budget, batch=args.rows, bins=bins))
    print(table(lines))
    return lines


if __name__ == "__main__":
    main()
