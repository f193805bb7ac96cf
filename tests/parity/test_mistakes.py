"""The parity check sees every known mistake, and compares only what counts."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from convert import check_parity
from tests.parity.helpers import (
    GOLDEN,
    arguments,
    table,
    without_greedy,
)
from tests.parity.mistakes import SABOTAGE


@pytest.fixture(scope="module")
def plain_run(tmp_path_factory):
    """The command on the tensors of one forward pass.

    Where most mistakes show it runs operation by operation: a sabotaged run then shares all compiled operations but
    its own, while a program compiled as a whole is compiled anew for each.
    """
    expected = {}

    def run(name: str) -> int:
        if name not in expected:
            expected[name] = without_greedy(GOLDEN / name, tmp_path_factory.mktemp(name))
        out = tmp_path_factory.mktemp("out") / "got.npz"
        with jax.disable_jit(name == "G_video"):
            return check_parity.main(arguments(GOLDEN / name, out, expected[name]))

    return run


def test_operation_by_operation_nothing_is_missed(plain_run, capsys):
    """Of the other cases, the tests further up say so."""
    assert plain_run("G_video") == 0
    assert "MISS" not in capsys.readouterr().out


@pytest.mark.parametrize("mistake", SABOTAGE)
def test_a_miss_is_a_miss(mistake, plain_run, monkeypatch, capsys):
    name, floor, install = SABOTAGE[mistake]
    install(monkeypatch.setattr)
    assert plain_run(name) == 1
    difference, tolerance, verdict = table(capsys.readouterr().out)["packed_logits" if name[0] == "P" else "logits"]
    assert verdict == "MISS" and difference > tolerance
    assert difference > floor


def test_only_what_counts_is_compared():
    """Padding does not count, whichever way it is marked, nor in tensors that merely have the same sizes."""
    want = {"logits": np.zeros((4, 5)), "vision_layer_0": np.zeros((4, 5)), "cu_seqlens": np.arange(3)}
    got = {"logits": np.zeros((4, 5)), "vision_layer_0": np.zeros((4, 5)), "cu_seqlens": np.arange(3)}
    got["logits"][0] = 1
    passed = lambda extra, mask=None: [v.passed for v in check_parity.compare(got, want | extra, attention_mask=mask)]
    assert passed({}) == [False, True, True]
    assert passed({"valid": np.array([0, 1, 1, 1])}) == [True, True, True]
    assert passed({}, np.array([[0, 1, 1, 1]])) == [True, True, True]
    got["vision_layer_0"][0] = 1
    assert passed({"valid": np.array([0, 1, 1, 1])}) == [True, False, True]
    got["cu_seqlens"][1] = 2
    assert passed({"valid": np.ones(4)}) == [False, False, False]


@pytest.mark.parametrize(
    ("got", "passes"),
    [
        (np.full(3, 1e-4), True),
        (np.full(3, 1.01e-4), False),
        (np.full(3, np.nan), False),
        (np.zeros(4), False),
        (None, False),
    ],
)
def test_the_verdict(got, passes):
    found = {} if got is None else {"logits": got}
    (verdict,) = check_parity.compare(found, {"logits": np.zeros(3)})
    assert verdict.passed == passes
