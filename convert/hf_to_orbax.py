"""Hugging Face folder to model folder (orbax), bit for bit, in constant memory.

python convert/hf_to_orbax.py --hf Mage-VL --out models/mage-vl
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from convert import cli
from mage_jax.weights.hf_import import import_hf


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hf", required=True, help="folder with config.json and safetensors files")
    parser.add_argument("--out", required=True, help="model folder to create")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    args = parser.parse_args(argv)
    import_hf(args.hf, args.out, progress=not args.quiet)
    print(f"wrote {args.out}")


if __name__ == "__main__":
    cli.run(main)
