"""Small Hugging Face folders, damaged on request. Golden cases are read-only: tests work on copies."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import jax
import numpy as np
import safetensors.numpy

from mage_jax.params import flatten

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "model"
SINGLE, SHARDED = "A_square", "F_sharded"
INDEX = "model.safetensors.index.json"
KEEP = ("config", "generation_config", "model")  # starts of the file names that tests need


def copy_case(case: str, target: Path) -> Path:
    """A writable copy of a golden folder's config and weights."""
    target.mkdir(parents=True)
    for path in sorted((GOLDEN / case).iterdir()):
        if path.name.startswith(KEEP):
            shutil.copyfile(path, target / path.name)
    return target


def edit_json(path: Path, *, remove: str = "", **changes: Any) -> None:
    """Sets (dots written as double underscores) or removes (dotted) fields of a JSON file."""
    values = json.loads(path.read_text())
    for key, value in changes.items():
        *parents, leaf = key.split("__")
        node = values
        for parent in parents:
            node = node[parent]
        node[leaf] = value
    if remove:
        *parents, leaf = remove.split(".")
        node = values
        for parent in parents:
            node = node[parent]
        del node[leaf]
    path.write_text(json.dumps(values, indent=2))


def rewrite(folder: Path, change: Any, *, file: str = "model.safetensors") -> None:
    """Applies ``change`` to the dict of tensors of a file and writes it back with the reference library."""
    tensors = safetensors.numpy.load_file(folder / file)
    safetensors.numpy.save_file(change(tensors), folder / file, metadata={"format": "pt"})


def read_raw(path: Path) -> tuple[dict[str, Any], bytes]:
    """A file's header dict and its data bytes."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def write_raw(path: Path, header: Any, data: bytes) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def tree_bytes(folder: Path) -> dict[str, bytes]:
    """Relative path -> content of every file below a folder."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def assert_same_params(a: Any, b: Any) -> None:
    """Bit equality of two parameter trees, dtypes included."""
    flat_a, flat_b = flatten(a), flatten(b)
    assert set(flat_a) == set(flat_b)
    for path, left in flat_a.items():
        left, right = np.asarray(jax.device_get(left)), np.asarray(jax.device_get(flat_b[path]))
        assert left.dtype == right.dtype and left.shape == right.shape, path
        assert left.tobytes() == right.tobytes(), path
