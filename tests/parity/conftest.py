"""Fixtures of the parity tests."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

import jax
import pytest

from convert import check_parity
from tests.parity.helpers import (
    arguments,
)
from tests.parity.make_cases import cases, make_case


@pytest.fixture(scope="module", autouse=True)
def quick_compiles():
    """Nearly all of the time here is compiling programs that run once."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="session")
def made(tmp_path_factory):
    """Folder of a made case by its name; each is made once."""
    root, known = tmp_path_factory.mktemp("cases"), cases(seeds=3)

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else make_case(known[name], root / name)

    return folder


@pytest.fixture(scope="session")
def checked(made, tmp_path_factory):
    """(exit status, stdout, computed tensors) of a made case by its name; each runs once."""
    known = {}

    def result(name: str):
        if name not in known:
            out, stdout = tmp_path_factory.mktemp("checked") / "got.npz", io.StringIO()
            with contextlib.redirect_stdout(stdout):
                status = check_parity.main(arguments(made(name), out))
            known[name] = status, stdout.getvalue(), check_parity.read_npz(out)
        return known[name]

    return result
