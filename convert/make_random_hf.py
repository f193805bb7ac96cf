"""A Hugging Face folder with random bfloat16 weights of the released geometry, written in constant memory.

python convert/make_random_hf.py --out random-4b --size 4b

For trying converters, loaders and memory plans without the released weights. The 4b size has the release's 696 tensors,
4,741,793,792 parameters, 9,483,587,584 bytes in two files and an index.
"""

from __future__ import annotations

import argparse
import json
import sys
import zlib
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
from tqdm import tqdm

from configs.models import mage_vl_4b, toy
from convert import cli
from mage_jax.weights.atomic import atomic_folder
from mage_jax.weights.hf_config import write_hf_config
from mage_jax.weights.hf_export import plan_files
from mage_jax.weights.safetensors_io import INDEX_FILE
from mage_jax.weights.safetensors_write import FileSpec, SafetensorsWriter, TensorSpec

SIZES = {"4b": mage_vl_4b, "toy": toy}
PIECE = 16 << 20  # values generated at a time


def random_values(rng: np.random.Generator, count: int, *, norm: bool) -> np.ndarray:
    """uint16 [count] bit patterns of bfloat16: near 1 for norm scales, else both signs with an rms of about 0.014."""
    bits = rng.integers(0, 1 << 16, count, dtype=np.uint16)
    if norm:
        return (bits & 0x0007) | 0x3F80  # 1.0 to 1.05
    return (bits & 0x81FF) + np.uint16(0x76 << 7)  # +-1.x times 2^-9 to 2^-6


def write_weights(writer: SafetensorsWriter, tensors: Sequence[TensorSpec], *, seed: int, progress: bool) -> None:
    """Fills every tensor; a tensor's values depend on seed and name only."""
    with tqdm(total=sum(t.nbytes for t in tensors), unit="B", unit_scale=True, disable=not progress) as bar:
        for tensor in tensors:
            rng = np.random.Generator(np.random.SFC64([seed, zlib.crc32(tensor.name.encode())]))
            norm = len(tensor.shape) == 1 and tensor.name.endswith("weight")
            for start in range(0, tensor.nbytes // 2, PIECE):
                values = random_values(rng, min(PIECE, tensor.nbytes // 2 - start), norm=norm)
                writer.write(tensor.name, values, start=start * 2)
                bar.update(values.nbytes)


def make_random_hf(
    out: str | Path, *, size: str = "4b", seed: int = 0, max_shard_gb: float | None = None, progress: bool = False
) -> None:
    """Creates the folder.

    Raises:
      WeightsError: ``out`` exists.
      OSError: the disk is full.
    """
    model = SIZES[size]()
    files, index = plan_files(model, None, dtype=None, max_shard_gb=max_shard_gb)
    tensors = [tensor for file in files for tensor in file.tensors]
    gate = FileSpec("streammind_gate.safetensors", (TensorSpec("gate.proj.weight", "BF16", (64, 64)),))
    with atomic_folder(Path(out), need_bytes=sum(t.nbytes for t in tensors)) as folder:
        with SafetensorsWriter(folder, [*files, gate]) as writer:
            write_weights(writer, [*tensors, *gate.tensors], seed=seed, progress=progress)
        if index is not None:
            (folder / INDEX_FILE).write_text(index)
        write_hf_config(folder, model)
        preprocessor = {"patch_size": model.vision.patch_size, "merge_size": model.vision.spatial_merge_size}
        (folder / "preprocessor_config.json").write_text(json.dumps(preprocessor, indent=2) + "\n")
        (folder / "README.md").write_text("Random weights, for tests only.\n")
        (folder / "extra").mkdir()
        (folder / "extra" / "notes.txt").write_text("Files in subfolders are carried over as well.\n")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", required=True, help="folder to create")
    parser.add_argument("--size", choices=SIZES, default="4b")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max_shard_gb", type=cli.shard_gb, help="largest file, in 10^9 bytes (default 5)")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    make_random_hf(args.out, size=args.size, seed=args.seed, max_shard_gb=args.max_shard_gb, progress=not args.quiet)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    cli.run(main)
