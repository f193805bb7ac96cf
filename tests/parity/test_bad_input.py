"""Unusable input to the parity command: status 2, one line, no file."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest

from convert import check_parity
from mage_jax.data.image import ImageError, ImageRef, load_rgb
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


@pytest.mark.parametrize("key", ["pixel_values", "image_grid_thw", "input_ids", "patch_positions", "labels"])
def test_words_instead_of_numbers(bad_run, made, tmp_path, key):
    inputs = check_parity.read_npz(made("sparse_positions") / "inputs.npz")
    words = np.full(inputs.get(key, inputs["input_ids"]).shape, "x")
    assert key in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", **{key: words}))


@pytest.mark.parametrize("lengths", [np.int64(2), np.asarray(["2", "3"])])
def test_lengths_that_are_no_list_of_integers(bad_run, made, tmp_path, lengths):
    ids = check_parity.read_npz(made("sparse_positions") / "inputs.npz")["input_ids"]
    changes = {"segment_ids": np.ones_like(ids), "lengths": lengths}
    assert "lengths" in bad_run(inputs=changed_inputs(made, tmp_path / "bad.npz", **changes))


@pytest.mark.parametrize("arrays", [{"greedy_ids": np.int64(3)}, {"greedy_ids": "x"}, {"logits": np.full((2, 3), "x")}])
def test_an_expected_file_of_the_wrong_kind(bad_run, tmp_path, arrays):
    line = bad_run(expected=save(tmp_path / "wrong.npz", arrays))
    assert "wrong.npz" in line and next(iter(arrays)) in line


def test_more_tokens_than_the_model_has_positions(bad_run):
    line = bad_run(greedy=10**9)
    assert "--greedy 1000000000" in line and "at most" in line


def test_greedy_with_packed_rows_is_said_to_be_ignored(made, tmp_path, capsys):
    folder = made("text_only")
    ids = check_parity.read_npz(folder / "inputs.npz")["input_ids"]
    inputs = save(tmp_path / "in.npz", {"input_ids": ids, "segment_ids": np.ones_like(ids)})
    out = tmp_path / "got.npz"
    assert check_parity.main([f"--hf={folder}", f"--inputs={inputs}", f"--out={out}", "--greedy=2"]) == 0
    error = capsys.readouterr().err
    assert "--greedy is ignored" in error and error.count("\n") == 1


def test_an_unwritable_output_is_named_as_given(made, tmp_path, capsys):
    for out in (tmp_path, tmp_path / "absent" / "got.npz"):
        assert check_parity.main(arguments(made("text_only"), out)) == 2
        error = capsys.readouterr().err
        assert str(out) in error and ".tmp" not in error and error.count("\n") == 1


def _png(depth: int, colour: int, channels: int) -> bytes:
    """A 32x32 PNG of zeros; Pillow cannot write 16-bit colour."""
    rows = bytes((1 + 32 * channels * depth // 8) * 32)
    parts = {
        b"IHDR": struct.pack(">IIBBBBB", 32, 32, depth, colour, 0, 0, 0),
        b"IDAT": zlib.compress(rows),
        b"IEND": b"",
    }
    chunks = [struct.pack(">I", len(d)) + k + d + struct.pack(">I", zlib.crc32(k + d)) for k, d in parts.items()]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


@pytest.mark.parametrize(("colour", "channels"), [(0, 1), (2, 3), (4, 2), (6, 4)])
def test_pictures_of_16_bits_are_refused(colour, channels):
    assert load_rgb(ImageRef("r.jsonl:1:image", _png(8, colour, channels))).shape == (32, 32, 3)
    with pytest.raises(ImageError, match=r"r\.jsonl:1:image: .*more than 8 bits"):
        load_rgb(ImageRef("r.jsonl:1:image", _png(16, colour, channels)))


@pytest.mark.parametrize("content", [b"P6 32 32 65535\n" + bytes(6144), b"P6 32 32 255\n" + bytes(3072)])
def test_deep_ppm(content):
    if b"65535" in content:
        with pytest.raises(ImageError, match="more than 8 bits"):
            load_rgb(ImageRef("a.ppm", content))
    else:
        assert load_rgb(ImageRef("a.ppm", content)).shape == (32, 32, 3)


def test_junk_bytes_are_named_by_their_record():
    with pytest.raises(ImageError, match=r"r\.jsonl:1:image: cannot be identified") as caught:
        load_rgb(ImageRef("r.jsonl:1:image", b"junk"))
    assert "BytesIO" not in str(caught.value)
