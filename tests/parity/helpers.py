"""What the parity tests share: where references are, and how to read the printed table."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np

from convert import check_parity

ROOT = Path(__file__).resolve().parents[2]
COMMAND = ROOT / "convert" / "check_parity.py"
GOLDEN = ROOT / "tests" / "golden" / "model"
GOLDENS = ("A_square", "B_rect", "C_multi", "F_sharded", "G_video", "P_packing")
GREEDY = ("greedy_ids", "greedy_logits", "greedy_margins")


def save(path: Path, arrays: dict[str, np.ndarray]) -> Path:
    np.savez(path, **arrays)
    return path


def without_greedy(folder: Path, out: Path) -> Path:
    """The expected tensors of one forward pass; a decode loop costs a second compilation."""
    expected = check_parity.read_npz(folder / "expected.npz")
    return save(out / "expected.npz", {name: value for name, value in expected.items() if name not in GREEDY})


def arguments(folder: Path, out: Path, expected: Path | None = None) -> list[str]:
    expected = expected or folder / "expected.npz"
    return [f"--hf={folder}", f"--inputs={folder / 'inputs.npz'}", f"--out={out}", f"--expected={expected}"]


def table(text: str) -> dict[str, tuple[float, float, str]]:
    """The printed lines: name -> (difference, tolerance, verdict)."""
    lines = re.findall(r"^(\S+) +(\S+) +(\S+)  (ok|MISS)\b", text, re.MULTILINE)
    return {name: (float(difference), float(tolerance), verdict) for name, difference, tolerance, verdict in lines}


def stated_tolerance(name: str, want: np.ndarray) -> float:
    if want.size == 0 or np.issubdtype(want.dtype, np.integer):
        return 0.0
    if name == "vision_rope_angles":
        return 1e-5
    if name.startswith("grad:"):
        return 2e-4 * np.abs(want).max()
    return 1e-4 * max(1.0, np.sqrt(np.mean(np.square(want, dtype=np.float64))))
