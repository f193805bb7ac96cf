"""Chunk files as byte ranges, against tensorstore's own reading of them."""

import math
import os

import numpy as np
import pytest
import tensorstore as ts
from hypothesis import given, settings
from hypothesis import strategies as st

from mage_jax.weights import plain_chunks
from mage_jax.weights.plain_chunks import PlainArray, chunk_shape, copy_range, is_contiguous


@settings(max_examples=40, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple),
    axis=st.integers(0, 3),
    size=st.integers(1, 5),
)
def test_segments_are_what_tensorstore_reads(tmp_path_factory, shape, axis, size):
    axis = min(axis, len(shape) - 1)
    chunk = (*(1,) * axis, min(size, shape[axis]), *shape[axis + 1 :])
    folder = tmp_path_factory.mktemp("array")
    store = ts.open(
        {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{folder}/"},
            "metadata": {
                "shape": list(shape),
                "data_type": "float32",
                "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
                "codecs": plain_chunks.CODECS,
            },
            "create": True,
        }
    ).result()
    values = np.arange(1, math.prod(shape) + 1, dtype=np.float32).reshape(shape)
    store.write(values).result()
    array = PlainArray(folder, shape, chunk, 4)
    assert sorted(array.files()) == sorted(p for p in (folder / "c").rglob("*") if p.is_file())
    read = b"".join(file.read_bytes()[start : start + n] for file, start, n in array.segments(0, values.nbytes))
    assert read == values.tobytes()


@pytest.mark.parametrize(
    ("shape", "stacked", "chunk"),
    [
        ((36, 9728, 2560), True, (1, 9728, 2560)),
        ((36, 2560), True, (36, 2560)),
        ((151_936, 2560), False, (9496, 2560)),
        ((1024, 3, 16, 16), False, (1024, 3, 16, 16)),
        ((2, 50_021, 2560), True, (1, 12_506, 2560)),
        ((7,), False, (7,)),
    ],
)
def test_chunks_are_layers_or_even_rows(shape, stacked, chunk):
    got = chunk_shape(shape, np.dtype(np.float16), stacked=stacked)
    assert got == chunk and is_contiguous(shape, got)
    assert math.prod(got) * 2 <= plain_chunks.CHUNK_BYTES


@pytest.mark.parametrize("kernel", [True, False])
def test_copy_range_in_and_outside_the_kernel(kernel, tmp_path, monkeypatch):
    if not kernel:
        monkeypatch.delattr(os, "copy_file_range", raising=False)
    data = os.urandom(100_000)
    (tmp_path / "a").write_bytes(data)
    with (tmp_path / "a").open("rb") as source, (tmp_path / "b").open("wb") as target:
        copy_range(source.fileno(), target.fileno(), 50_000, source_offset=7, target_offset=3)
        with pytest.raises(EOFError):
            copy_range(source.fileno(), target.fileno(), 10, source_offset=99_995, target_offset=0)
    assert (tmp_path / "b").read_bytes()[8:50_003] == data[12:50_007]
