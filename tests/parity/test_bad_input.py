"""Unusable input to the parity command: status 2, one line, no file."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from convert import check_parity
from tests.parity.helpers import (
    arguments,
    save,
)


@pytest.fixture
def bad_run(made, tmp_path, capsys):
    """Runs with changed arguments; returns the one line on stderr."""
    folder = made("sparse_positions")

    def run(**changes) -> str:
        out = tmp_path / "out" / "got.npz"
        out.parent.mkdir()
        words = dict(word[2:].split("=", 1) for word in arguments(folder, out)) | {
            k: str(v) for k, v in changes.items()
        }
        status = check_parity.main([f"--{key}={value}" for key, value in words.items()])
        stdout, stderr = capsys.readouterr()
        assert status == 2
        assert list(out.parent.iterdir()) == []
        assert stdout == "" and stderr.startswith("check_parity.py: ") and stderr.count("\n") == 1
        return stderr

    return run


def changed_inputs(made, path: Path, **changes) -> Path:
    inputs = check_parity.read_npz(made("sparse_positions") / "inputs.npz") | changes
    return save(path, {name: value for name, value in inputs.items() if value is not None})


@pytest.mark.parametrize("which", ["hf", "inputs", "expected"])
def test_a_missing_file_is_named(bad_run, which, tmp_path):
    assert "nowhere" in bad_run(**{which: tmp_path / "nowhere"})


def test_inputs_without_ids(bad_run, made, tmp_path):
    assert "input_ids" in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", input_ids=None))


def test_another_count_of_image_tokens(bad_run, made, tmp_path):
    ids = check_parity.read_npz(made("sparse_positions") / "inputs.npz")["input_ids"]
    ids[0, np.flatnonzero(ids[0] == 90)[0]] = 1
    line = bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", input_ids=ids))
    assert "12 image tokens" in line and "13" in line


@pytest.mark.parametrize("change", [{"pixel_values": None}, {"image_grid_thw": None}, {"patch_positions": np.zeros(3)}])
def test_pictures_that_contradict_each_other(bad_run, made, tmp_path, change):
    assert next(iter(change)) in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", **change))


@pytest.mark.parametrize("token", [-1, 96])
def test_ids_outside_the_vocabulary(bad_run, made, tmp_path, token):
    """Unchecked, they would be computed with some other embedding."""
    ids = check_parity.read_npz(made("sparse_positions") / "inputs.npz")["input_ids"]
    ids[0, -1] = token
    assert "vocabulary" in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", input_ids=ids))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 cut short", b"plain text", "array"])
def test_a_file_that_is_no_archive(bad_run, tmp_path, content):
    path = tmp_path / "bad.npz"
    if content == "array":
        with path.open("wb") as file:
            np.save(file, np.zeros(3))
    else:
        path.write_bytes(content)
    assert "bad.npz" in bad_run(inputs=path)


def test_an_output_that_cannot_be_written(made, tmp_path, capsys):
    out = tmp_path / "absent" / "got.npz"
    assert check_parity.main(arguments(made("text_only"), out)) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("arrays", [{}, {"valid": np.ones(3)}])
def test_an_expected_file_with_nothing_to_compare(made, tmp_path, capsys, arrays):
    """The tensors were computed and stay; that nothing was compared is no success."""
    expected, out = save(tmp_path / "nothing.npz", arrays), tmp_path / "got.npz"
    assert check_parity.main(arguments(made("text_only"), out, expected)) == 2
    assert "no tensor" in capsys.readouterr().err
    assert "logits" in check_parity.read_npz(out)


def test_a_negative_count(made, tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        check_parity.main([*arguments(made("text_only"), tmp_path / "got.npz"), "--greedy=-1"])
    assert stop.value.code == 2 and "negative" in capsys.readouterr().err
