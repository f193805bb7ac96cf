"""The parity check passes what is right, at the stated tolerances.

Stored references come from another implementation; made cases (make_cases.py) from the float64 oracle in
tests/reference.py, which is itself held against the stored ones here.
"""

from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest

from convert import check_parity
from tests.parity.helpers import (
    COMMAND,
    GOLDEN,
    GOLDENS,
    GREEDY,
    arguments,
    save,
    stated_tolerance,
    table,
    without_greedy,
)
from tests.parity.make_cases import CASES, cases
from tests.reference import Reference


@pytest.mark.parametrize("name", GOLDENS)
def test_the_oracle_agrees_with_the_stored_references(name):
    folder = GOLDEN / name
    inputs, expected = (check_parity.read_npz(folder / f"{part}.npz") for part in ("inputs", "expected"))
    got = Reference(folder).tensors(inputs, greedy=len(expected.get("greedy_ids", ())))
    if name == "B_rect":
        expected["loss"] = check_parity.read_npz(folder / "grads.npz")["loss"]
    for verdict in check_parity.compare(got, expected, attention_mask=inputs.get("attention_mask")):
        # The reference computed in float32 and this in float64, so half the room must be enough.
        assert verdict.passed and verdict.difference <= verdict.tolerance / 2, verdict


# Two programs more each for decoding, so by default only one of them decodes.
DECODING = [pytest.param(name, marks=[] if name == "A_square" else [pytest.mark.slow]) for name in GOLDENS[:-1]]


@pytest.mark.parametrize("name", DECODING)
def test_a_stored_reference_is_met_with_greedy_decoding(name, tmp_path, capsys):
    assert check_parity.main(arguments(GOLDEN / name, tmp_path / "got.npz")) == 0
    assert set(GREEDY) <= set(table(capsys.readouterr().out))


@pytest.mark.parametrize("name", GOLDENS[1:])
def test_a_stored_reference_is_met_at_the_stated_tolerances(name, tmp_path, capsys):
    folder, out = GOLDEN / name, tmp_path / "got.npz"
    expected = check_parity.read_npz(without_greedy(folder, tmp_path))
    if name == "B_rect":
        grads = check_parity.read_npz(folder / "grads.npz")
        save(tmp_path / "grads.npz", grads)  # beside the expected file, where they are looked for
        expected |= {name: grads[name] for name in grads if name != "labels"}
        assert "loss" in expected and sum(name.startswith("grad:") for name in expected) == 14
    assert check_parity.main(arguments(folder, out, tmp_path / "expected.npz")) == 0
    printed, got = table(capsys.readouterr().out), check_parity.read_npz(out)
    assert set(printed) == set(expected) <= set(got)
    for key, want in expected.items():
        difference, tolerance, _ = printed[key]
        assert tolerance == pytest.approx(stated_tolerance(key, want), rel=2e-3), key
        assert np.abs(got[key].astype(np.float64) - want).max() == pytest.approx(difference, rel=2e-3), key


QUICK = set(CASES) - {"packed_labels"}
DRAWS = [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in cases(seeds=3)]


@pytest.mark.parametrize("name", DRAWS)
def test_a_made_case_is_met(checked, name):
    status, stdout, _ = checked(name)
    assert status == 0, stdout
    printed = table(stdout)
    logits = "packed_logits" if name.startswith("packed") else "logits"
    assert {"cu_seqlens", "inputs_embeds", "dec_layer_0", "dec_layer_1", "dec_last_hidden", logits} <= set(printed)
    assert {"vision_patch_embed", "vision_layer_1", "merged_features"} <= set(printed)


def test_the_oracle_cuts_long_rows_into_windows(made):
    """Guards the case that no stored reference covers: two rows, each with its own remainder."""
    bounds = check_parity.read_npz(made("windows_6_and_9") / "expected.npz")["cu_seqlens"]
    assert np.diff(bounds).tolist() == [4 * 4, 2 * 4, 4 * 4, 4 * 4, 1 * 4]


def test_a_batch_row_equals_its_own_run(made):
    """Padding, and the pictures of other rows, leave no trace in a row."""
    folder = made("left_padded_batch")
    inputs, batched = (check_parity.read_npz(folder / f"{part}.npz") for part in ("inputs", "expected"))
    patches = {0: slice(0, 16), 1: slice(0, 0), 2: slice(16, None)}
    grids = {0: slice(0, 1), 1: slice(0, 0), 2: slice(1, None)}
    for row in range(3):
        mask = inputs["attention_mask"][row] == 1
        alone = {
            "input_ids": inputs["input_ids"][row][mask][None],
            "image_grid_thw": inputs["image_grid_thw"][grids[row]],
        }
        alone |= {name: inputs[name][patches[row]] for name in ("pixel_values", "patch_positions")}
        got = Reference(folder).tensors(alone, greedy=4)
        np.testing.assert_allclose(got["logits"], batched["logits"][row][mask], atol=1e-10)
        np.testing.assert_array_equal(got["greedy_ids"], batched["greedy_ids"][row])


@pytest.mark.parametrize("case", ["golden", "made"])
def test_the_command(case, made, tmp_path):
    """The one is right; of the other, one number is changed by little more than the tolerance."""
    folder = GOLDEN / "F_sharded" if case == "golden" else made("sparse_positions")
    expected = without_greedy(folder, tmp_path)
    if case == "made":
        changed = check_parity.read_npz(expected)
        changed["merged_features"][3, 5] += 1.2e-4
        save(expected, changed)
    out = tmp_path / "got.npz"
    done = subprocess.run(
        [sys.executable, COMMAND, *arguments(folder, out, expected)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )
    printed = table(done.stdout)
    assert done.stderr == ""
    assert len(printed) == len(check_parity.read_npz(expected)) and set(printed) <= set(check_parity.read_npz(out))
    missed = [name for name, (_, _, verdict) in printed.items() if verdict == "MISS"]
    assert (done.returncode, missed) == ((0, []) if case == "golden" else (1, ["merged_features"]))


@pytest.mark.slow
@pytest.mark.parametrize("name", GOLDENS)
def test_the_command_on_every_stored_reference(name, tmp_path):
    done = subprocess.run(
        [sys.executable, COMMAND, *arguments(GOLDEN / name, tmp_path / "got.npz")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


CHECKED = (
    "visual.embeddings.patch_embedding.weight",
    "visual.layernorm_pre.weight",
    "visual.encoder.layers.0.self_attn.qkv.weight",
    "visual.encoder.layers.1.mlp.fc1.bias",
    "visual.merger.ln_q.bias",
    "visual.merger.mlp.0.weight",
    "language_model.embed_tokens.weight",
    "language_model.layers.0.self_attn.k_norm.weight",
    "language_model.layers.0.self_attn.v_proj.weight",
    "language_model.layers.1.mlp.gate_proj.weight",
    "language_model.norm.weight",
)


@pytest.mark.parametrize("name", ["labels", pytest.param("packed_labels", marks=pytest.mark.slow)])
def test_gradients_are_the_slopes_of_the_oracle(made, checked, name):
    """Central differences in float64, at the steepest and at random entries of tensors of every kind."""
    (_, _, got), inputs = checked(name), check_parity.read_npz(made(name) / "inputs.npz")
    reference, rng, step = Reference(made(name)), np.random.default_rng(0), 1e-4
    assert got["loss"] == pytest.approx(reference.loss(inputs), abs=1e-5)
    assert {n.removeprefix("grad:") for n in got if n.startswith("grad:")} == set(reference.w)
    for name in (*(f"model.{tail}" for tail in CHECKED), "lm_head.weight"):
        grad, weight = got[f"grad:{name}"].reshape(-1), reference.w[name].reshape(-1)
        for entry in (np.abs(grad).argmax(), rng.integers(grad.size)):
            kept = weight[entry]
            losses = []
            for moved in (kept + step, kept - step):
                weight[entry] = moved
                losses.append(reference.loss(inputs))
            weight[entry] = kept
            slope = (losses[0] - losses[1]) / (2 * step)
            assert grad[entry] == pytest.approx(slope, abs=float(2e-4 * np.abs(grad).max())), (name, entry)
    image_row = got["grad:model.language_model.embed_tokens.weight"][90]
    assert np.all(image_row == 0)  # replaced, so nothing depends on it
