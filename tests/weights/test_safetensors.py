"""The safetensors reader and writer against random input and against the reference library."""

import json
import struct

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_jax.weights.errors import SafetensorsError
from mage_jax.weights.safetensors_io import DTYPE_NAMES, SafetensorsFolder, read_header
from mage_jax.weights.safetensors_write import FileSpec, SafetensorsWriter, TensorSpec, index_text, split

TENSORS = {
    "a.weight": np.arange(12, dtype=np.float32).reshape(3, 4),
    "b": np.array([1.5, -2.0, np.nan], ml_dtypes.bfloat16),
    "c": np.zeros((0, 4), np.float16),
    "d.bias": np.array([[0.5]], np.float16),
}


def _content(folder):
    with SafetensorsFolder(folder) as files:
        return {n: (t.dtype, t.shape, files.read(n).tobytes()) for n, t in files.tensors.items()}


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    safetensors.numpy.save_file(TENSORS, folder / "model.safetensors", metadata={"format": "pt"})
    return (folder / "model.safetensors").read_bytes(), _content(folder)


@settings(max_examples=400, deadline=None)
@given(data=st.data())
def test_random_damage_is_refused_or_harmless(reference, tmp_path_factory, data):
    """Any change of bytes ends in SafetensorsError or leaves a file that reads consistently; never another error."""
    raw, content = bytearray(reference[0]), reference[1]
    (length,) = struct.unpack("<Q", raw[:8])
    for _ in range(data.draw(st.integers(1, 4))):
        kind = data.draw(st.sampled_from(["flip", "cut", "insert", "digit"]))
        at = data.draw(st.integers(0, min(len(raw) - 1, 8 + length)))
        if kind == "flip":
            raw[at] ^= data.draw(st.integers(1, 255))
        elif kind == "cut":
            del raw[at : at + data.draw(st.integers(1, 40))]
        elif kind == "insert":
            raw[at:at] = data.draw(st.binary(min_size=1, max_size=12))
        else:
            digits = [i for i, byte in enumerate(raw[8 : 8 + length], 8) if chr(byte).isdigit()]
            if digits:
                raw[data.draw(st.sampled_from(digits))] = data.draw(st.sampled_from(b"0123456789-.e"))
        if not raw:
            break
    folder = tmp_path_factory.mktemp("damaged")
    (folder / "model.safetensors").write_bytes(raw)
    try:
        got = _content(folder)
    except SafetensorsError as e:
        assert "model.safetensors" in str(e)
        return
    data_bytes = b"".join(value for _, _, value in content.values())
    assert len(b"".join(value for _, _, value in got.values())) == len(data_bytes) or len(raw) != len(reference[0])


@settings(max_examples=200, deadline=None)
@given(
    header=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    )
)
def test_any_json_header_is_refused_cleanly(header, tmp_path_factory):
    path = tmp_path_factory.mktemp("json") / "x.safetensors"
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    try:
        assert read_header(path).tensors == ()
    except SafetensorsError as e:
        assert "x.safetensors" in str(e)


def test_deep_nesting_is_refused(tmp_path):
    text = b'{"a":' + b"[" * 100_000
    (tmp_path / "x.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    with pytest.raises(SafetensorsError, match="JSON"):
        read_header(tmp_path / "x.safetensors")


def test_reference_files_are_read(reference, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(reference[0])
    with SafetensorsFolder(tmp_path) as files:
        for name, expected in TENSORS.items():
            got = files.read(name)
            assert got.dtype == expected.dtype and got.shape == expected.shape
            assert got.tobytes() == expected.tobytes()
        with pytest.raises(SafetensorsError, match="nowhere"):
            files.read("nowhere")


def test_written_files_are_what_the_reference_library_writes(reference, tmp_path):
    folder = tmp_path / "reference"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(reference[0])
    with SafetensorsFolder(folder) as files:
        order = list(files.tensors)
    specs = [TensorSpec(n, DTYPE_NAMES[TENSORS[n].dtype], TENSORS[n].shape) for n in order]
    out = tmp_path / "out"
    out.mkdir()
    with SafetensorsWriter(out, split(specs, max_bytes=None)) as writer:
        for name in reversed(order):  # any order, in pieces
            flat = TENSORS[name].reshape(-1)
            half = flat.size // 2
            writer.write(name, flat[half:], start=half * flat.itemsize)
            writer.write(name, flat[:half])
    assert (out / "model.safetensors").read_bytes() == reference[0]


def test_incomplete_writes_are_noticed(tmp_path):
    spec = FileSpec("x.safetensors", (TensorSpec("a", "F32", (4,)),))
    with pytest.raises(ValueError, match="not written completely: a"), SafetensorsWriter(tmp_path, [spec]) as writer:
        writer.write("a", np.ones(3, np.float32))
    (tmp_path / "x.safetensors").unlink()
    with pytest.raises(ValueError, match="do not fit"), SafetensorsWriter(tmp_path, [spec]) as writer:
        writer.write("a", np.ones(5, np.float32))


@given(
    sizes=st.lists(st.integers(0, 50), min_size=1, max_size=40),
    limit=st.none() | st.integers(1, 300),
)
def test_split_keeps_order_and_limit(sizes, limit):
    tensors = [TensorSpec(f"t{i}", "BF16", (size,)) for i, size in enumerate(sizes)]
    files = split(tensors, max_bytes=limit)
    assert [t for f in files for t in f.tensors] == tensors
    count = len(files)
    names = [f.file for f in files]
    expected = [f"model-{i:05d}-of-{count:05d}.safetensors" for i in range(1, count + 1)]
    assert names == (expected if count > 1 else ["model.safetensors"])
    for i, file in enumerate(files):
        total = sum(t.nbytes for t in file.tensors)
        assert limit is None or total <= limit or len([t for t in file.tensors if t.nbytes]) == 1
        if i + 1 < count:  # no file closes early
            assert total + files[i + 1].tensors[0].nbytes > limit
    assert f'"total_size": {sum(sizes) * 2}' in index_text(files)
