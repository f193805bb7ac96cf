"""What a checkpoint holds: names, shapes, dtypes, counts, totals per tower, and on request the range of values.

python convert/inspect_ckpt.py PATH [--stats] [--json]

PATH is a Hugging Face folder, a model folder, a run folder or one of its steps.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from convert import cli
from mage_jax.weights.hf_import import HfWeights, open_hf
from mage_jax.weights.model_dir import read_model_file, resolve
from mage_jax.weights.orbax_store import StoreReader, check_store

PIECE = 16 << 20  # values read at a time


@dataclasses.dataclass
class Row:
    """One tensor (Hugging Face) or one parameter (model and run folders)."""

    name: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    count: int
    nbytes: int
    min: float | None = None
    max: float | None = None
    rms: float | None = None
    nonfinite: int | None = None

    @property
    def tower(self) -> str:
        head = self.path.partition(".")[0]
        return "lm_head" if head.startswith("lm_head") else head


class Stats:
    """Range and root mean square of values that come in pieces."""

    def __init__(self) -> None:
        self.low, self.high, self.squares, self.count, self.nonfinite = math.inf, -math.inf, 0.0, 0, 0

    def add(self, values: np.ndarray) -> None:
        values = values.reshape(-1).astype(np.float32)
        finite = np.isfinite(values)
        if not finite.all():
            self.nonfinite += int(values.size - finite.sum())
            values = values[finite]
        if values.size:
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
            self.squares += float(np.sum(np.square(values, dtype=np.float64)))
            self.count += values.size

    def fill(self, row: Row) -> None:
        row.nonfinite = self.nonfinite
        if self.count:
            row.min, row.max, row.rms = self.low, self.high, math.sqrt(self.squares / self.count)


def _hf_rows(weights: HfWeights) -> list[Row]:
    rows = []
    for tensor in weights.files.tensors.values():
        slot = weights.slots[tensor.name]
        dtype = weights.dtypes[slot.path].name
        rows.append(Row(tensor.name, slot.path, tensor.shape, dtype, slot.count, tensor.nbytes))
    return rows


def _hf_pieces(weights: HfWeights) -> Iterator[tuple[str, np.ndarray]]:
    with weights.files:
        for tensor in weights.files.tensors.values():
            dtype = weights.dtypes[weights.slots[tensor.name].path]
            count = tensor.nbytes // dtype.itemsize
            for start in range(0, count, PIECE):
                values = np.empty(min(PIECE, count - start), dtype)
                weights.files.read_into(tensor, values, start=start * dtype.itemsize)
                yield tensor.name, values


def inspect(path: str | Path, *, stats: bool = False, progress: bool = False) -> dict[str, Any]:
    """Describes a checkpoint.

    Returns:
      ``kind``, ``checkpoint``, ``step``, ``tensors`` (list of ``Row``), ``towers`` and ``total`` (tensors, parameters,
      bytes each).

    Raises:
      WeightsError: not a checkpoint, or damaged.
    """
    found = resolve(path)
    if found.kind == "hf":
        weights = open_hf(found.checkpoint)
        rows = _hf_rows(weights)
        pieces = _hf_pieces(weights)
    else:
        config, _ = read_model_file(found.root)
        reader = StoreReader(found.checkpoint)
        check_store(reader, config)
        rows = [
            Row(p, p, shape, dtype.name, math.prod(shape), math.prod(shape) * dtype.itemsize)
            for p, (shape, dtype) in reader.arrays.items()
        ]
        pieces = ((name, values) for name, _, values in reader.stream())
    if stats:
        gathered = {row.name: Stats() for row in rows}
        with tqdm(total=sum(row.count for row in rows), unit_scale=True, disable=not progress) as bar:
            for name, values in pieces:
                gathered[name].add(values)
                bar.update(values.size)
        for row in rows:
            gathered[row.name].fill(row)
    towers = {tower: _total([r for r in rows if r.tower == tower]) for tower in dict.fromkeys(r.tower for r in rows)}
    return {
        "kind": found.kind,
        "checkpoint": str(found.checkpoint),
        "step": found.step,
        "tensors": rows,
        "towers": towers,
        "total": _total(rows),
    }


def _total(rows: Sequence[Row]) -> dict[str, int]:
    return {"tensors": len(rows), "parameters": sum(r.count for r in rows), "bytes": sum(r.nbytes for r in rows)}


def table(report: dict[str, Any], *, stats: bool) -> str:
    """The report as aligned text."""
    header = ["name", *(["parameter"] if report["kind"] == "hf" else []), "shape", "dtype", "count"]
    header += ["min", "max", "rms", "nonfinite"] if stats else []
    lines = [header]
    for row in report["tensors"]:
        shape = "x".join(map(str, row.shape))
        line = [row.name, *([row.path] if report["kind"] == "hf" else []), shape, row.dtype, f"{row.count:,}"]
        if stats:
            line += ["-" if v is None else f"{v:.4g}" for v in (row.min, row.max, row.rms)] + [str(row.nonfinite)]
        lines.append(line)
    widths = [max(len(line[i]) for line in lines) for i in range(len(header))]
    text = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    text.append("")
    for name, total in [*report["towers"].items(), ("total", report["total"])]:
        text.append(
            f"{name:<10}{total['tensors']:>6} tensors {total['parameters']:>16,} parameters {total['bytes']:>16,} bytes"
        )
    step = f", step {report['step']}" if report["step"] is not None else ""
    return "\n".join([f"{report['checkpoint']} ({report['kind']}{step})", *text])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", metavar="PATH")
    parser.add_argument("--stats", action="store_true", help="read all values: min, max, rms, non-finite count")
    parser.add_argument("--json", action="store_true", help="machine-readable output")
    args = parser.parse_args(argv)
    report = inspect(args.path, stats=args.stats, progress=sys.stderr.isatty())
    if args.json:
        print(json.dumps({**report, "tensors": [dataclasses.asdict(row) for row in report["tensors"]]}, indent=1))
    else:
        print(table(report, stats=args.stats))


if __name__ == "__main__":
    cli.run(main)
