"""Conversion speed and memory next to a plain copy of the same files.

python convert/bench_convert.py --size 4b --dir /scratch

Every step runs in its own process and is timed from process start to exit, imports included. Each starts with its
input evicted from the page cache and earlier writes flushed, and ends with its output fsynced, so what is measured is a
cold read and a durable write of the whole model. Plain copies run before, between and after the conversions; the ratio
is to their median. Needs three times the model's size on the disk, and removes what it made.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from convert import cli
from convert.make_random_hf import SIZES, make_random_hf
from mage_jax.weights.atomic import atomic_folder, copy_tree

HERE = Path(__file__).resolve().parent


def evict(folder: Path) -> None:
    """Drops a folder's files from the page cache; their dirty pages are written first."""
    os.sync()
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def peak_rss() -> int:
    """Bytes of memory this process held at most."""
    return int(re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def step(name: str, source: Path, target: Path) -> dict[str, float | str]:
    """Runs one step in a new process: seconds, CPU seconds, peak RSS in bytes."""
    evict(source)
    command = [sys.executable, __file__, "--step", name, str(source), str(target)]
    before = time.perf_counter()
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    seconds = time.perf_counter() - before
    if result.returncode:
        raise OSError(f"step {name} failed:\n{result.stderr[-2000:]}")
    return {"name": name, "seconds": seconds, **json.loads(result.stdout.splitlines()[-1])}


def run_step(name: str, source: str, target: str) -> None:
    """The body of one step, in its process."""
    if name == "copy":
        with atomic_folder(Path(target), copied=Path(source)) as folder:
            copy_tree(Path(source), folder)
    elif name == "hf_to_orbax":
        from convert.hf_to_orbax import main

        main(["--hf", source, "--out", target, "--quiet"])
    else:
        from convert.orbax_to_hf import main

        main(["--ckpt", source, "--out", target, "--quiet"])
    times = os.times()
    print(json.dumps({"rss": peak_rss(), "cpu": times.user + times.system}))


def same_files(a: Path, b: Path) -> int:
    """Compares two folders byte for byte and returns the number of bytes.

    Raises:
      ValueError: a file is missing on one side or differs.
    """
    names = [sorted(str(p.relative_to(root)) for p in root.rglob("*") if p.is_file()) for root in (a, b)]
    if names[0] != names[1]:
        raise ValueError(f"{a} and {b} hold different files: {sorted(set(names[0]) ^ set(names[1]))}")
    total = 0
    for name in names[0]:
        with (a / name).open("rb") as left, (b / name).open("rb") as right:
            while True:
                pieces = left.read(1 << 24), right.read(1 << 24)
                if pieces[0] != pieces[1]:
                    raise ValueError(f"{b / name} differs from {a / name} near byte {left.tell()}")
                if not pieces[0]:
                    break
                total += len(pieces[0])
    return total


def bench(work: Path, *, size: str) -> list[dict[str, float | str]]:
    """Runs all steps in ``work`` and prints the table."""
    hf, orbax, back, copy = work / "hf", work / "orbax", work / "back", work / "copy"
    print(f"making random {size} weights", flush=True)
    make_random_hf(hf, size=size, progress=sys.stderr.isatty())
    total = sum(p.stat().st_size for p in hf.rglob("*") if p.is_file())
    rows = []
    plan = [("copy", hf, copy), ("hf_to_orbax", hf, orbax), ("copy", hf, copy), ("orbax_to_hf", orbax, back)]
    for name, source, target in [*plan, ("copy", hf, copy)]:
        rows.append(step(name, source, target))
        print(f"  {name}: {rows[-1]['seconds']:.1f} s", flush=True)
        if name == "copy":
            shutil.rmtree(copy)
        elif name == "orbax_to_hf":
            shutil.rmtree(orbax)  # three times the model's size are enough
    base = statistics.median(row["seconds"] for row in rows if row["name"] == "copy")
    print(f"{total / 1e9:.3f} GB, cold page cache, output fsynced; times include process start")
    print(f"{'step':<14}{'seconds':>9}{'cpu s':>8}{'GB/s':>8}{'peak RSS MiB':>15}{'ratio to copy':>15}")
    for row in rows:
        print(
            f"{row['name']:<14}{row['seconds']:>9.1f}{row['cpu']:>8.1f}{total / 1e9 / row['seconds']:>8.3f}"
            f"{row['rss'] / 2**20:>15.0f}{row['seconds'] / base:>15.2f}"
        )
    print(f"bit equality of {same_files(hf, back)} bytes after the round trip: verified")
    return rows


def main(argv: Sequence[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["--step"]:
        return run_step(*argv[1:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument(
        "--dir", help="where to work; must exist, a new folder in it is removed afterwards (default: the system's)"
    )
    args = parser.parse_args(argv)
    if args.dir is not None and not Path(args.dir).is_dir():
        problem = "is not a folder" if Path(args.dir).exists() else "does not exist; create it first"
        parser.error(f"argument --dir: {args.dir} {problem}")
    with tempfile.TemporaryDirectory(dir=args.dir, prefix="bench_convert-") as work:
        bench(Path(work), size=args.size)


if __name__ == "__main__":
    cli.run(main)
