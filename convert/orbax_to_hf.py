"""Model folder, run folder or one step of a run to a Hugging Face folder, in constant memory.

python convert/orbax_to_hf.py --ckpt runs/sft --out exported

Tensor names, dtypes and files are those of the checkpoint that the model came from, unless given here.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from convert import cli
from mage_jax.config import DTYPES
from mage_jax.weights.hf_export import export_hf


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ckpt", required=True, help="model folder, run folder (newest step) or RUN/checkpoints/STEP")
    parser.add_argument("--out", required=True, help="Hugging Face folder to create")
    parser.add_argument("--max_shard_gb", type=cli.shard_gb, help="re-shard: largest file, in 10^9 bytes")
    parser.add_argument("--dtype", choices=DTYPES, help="cast every tensor")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    export_hf(args.ckpt, args.out, dtype=args.dtype, max_shard_gb=args.max_shard_gb, progress=not args.quiet)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    cli.run(main)
