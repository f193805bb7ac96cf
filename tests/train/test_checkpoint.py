"""Saving is atomic and complete; what cannot be saved or read is said, and harms nothing."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mage_jax.config import MeshConfig, OptimizerConfig, to_dict
from mage_jax.sharding import make_mesh
from mage_jax.train.checkpoint import CheckpointError, Checkpoints, JsonPart, Meta, free_space_note
from mage_jax.train.optimizer import make_optimizer
from mage_jax.train.state import TrainState, abstract_state, state_from_params
from tests.train.helpers import random_params, tiny_train_config

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = tiny_train_config(optimizer=OptimizerConfig(frozen=("vision",)))


def meta(step, **changes):
    return Meta(**{"step": step, "process_count": 1, "data_workers": 0, "config": to_dict(CONFIG), **changes})


@pytest.fixture(scope="module")
def setup():
    mesh = make_mesh(MeshConfig())
    optimizer = make_optimizer(CONFIG.optimizer, model=CONFIG.model, total_steps=CONFIG.steps)
    state = state_from_params(CONFIG, optimizer, mesh, random_params(CONFIG.model))
    # Moments that are not zero, so that losing them would show.
    state = state.replace(opt_state=jax.tree.map(lambda x: x + 3, state.opt_state), step=state.step + 7)
    return state, abstract_state(CONFIG, optimizer, mesh)


def test_every_leaf_comes_back(setup, tmp_path):
    state, abstract = setup
    store = Checkpoints(tmp_path, keep=2)
    store.save(7, state, data_state={"next": [1, 2]}, meta=meta(7), extras={"ledger": JsonPart({"a": 1})})
    store.close()
    store = Checkpoints(tmp_path, keep=2)
    assert store.latest == 7
    restored = store.restore(abstract, step=7, extras={"ledger": JsonPart()})
    store.close()
    assert jax.tree.structure(restored.state) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)
    assert [x.dtype for x in jax.tree.leaves(restored.state)] == [x.dtype for x in jax.tree.leaves(state)]
    assert restored.data_state == {"next": [1, 2]}
    assert restored.meta.step == 7 and restored.extras["ledger"].value == {"a": 1}


def test_the_newest_are_kept_and_leftovers_of_killed_saves_are_removed(setup, tmp_path):
    state, _ = setup
    store = Checkpoints(tmp_path, keep=2)
    for step in (1, 2, 5):
        store.save(step, state, data_state=step, meta=meta(step))
    store.close()
    left = tmp_path / "9.orbax-checkpoint-tmp"
    (left / "params").mkdir(parents=True)
    store = Checkpoints(tmp_path, keep=2)
    assert store.latest == 5
    store.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "5"]


def test_a_saved_state_may_be_overwritten_at_once(setup, tmp_path):
    """Donation right after an asynchronous save must not reach what is being written."""
    state, abstract = setup
    copy = jax.tree.map(lambda x: x + 0, state)
    scramble = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 + 1, s), donate_argnums=0)
    store = Checkpoints(tmp_path, keep=2)
    store.save(7, copy, data_state=0, meta=meta(7))
    jax.block_until_ready(scramble(copy))
    store.wait()
    restored = store.restore(abstract, step=7)
    store.close()
    jax.tree.map(np.testing.assert_array_equal, restored.state, state)


# Its own process: the limit on file sizes (like a full disk, without filling one) holds for a whole process.
FULL_DISK = """
import resource, signal, sys
import jax, numpy as np
from mage_jax.train.checkpoint import CheckpointError, Checkpoints, Meta
from mage_jax.train.state import TrainState

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
weights, moments = {"w": jax.numpy.arange(4e5)}, {"m": jax.numpy.ones(3)}
state = TrainState(step=jax.numpy.int32(1), params=weights, opt_state=moments, rng=jax.numpy.zeros(2, "uint32"))
store = Checkpoints(sys.argv[1], keep=2)
store.save(1, state, data_state=1, meta=Meta(1, 1, 0, {}))
store.wait()
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, resource.RLIM_INFINITY))
try:
    store.save(2, state, data_state=2, meta=Meta(2, 1, 0, {}))
    store.close()
except CheckpointError as error:
    print(error)
else:
    sys.exit("no error")
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
store = Checkpoints(sys.argv[1], keep=2)
abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
restored = store.restore(abstract, step=store.latest)
np.testing.assert_array_equal(restored.state.params["w"], state.params["w"])
print("latest", store.latest, restored.data_state)
store.save(2, state, data_state=2, meta=Meta(2, 1, 0, {}))
store.close()
print("then", store.latest)
"""


def test_a_disk_that_fills_up_is_reported_and_leaves_the_previous_checkpoint(tmp_path):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", FULL_DISK, str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    error, latest, then = done.stdout.splitlines()[-3:]
    assert "saving step 2 failed" in error and "checkpoint 1 is intact" in error
    assert "File too large" in error or "disk is full" in error, error
    assert (latest, then) == ("latest 1 1", "then 2")


def test_a_failed_save_surfaces_at_the_next_poll(setup, tmp_path, monkeypatch):
    state, _ = setup

    async def fail(self, directory):
        async def write():
            raise OSError(28, "No space left on device")

        return write()

    store = Checkpoints(tmp_path, keep=2)
    monkeypatch.setattr(JsonPart, "save", fail)
    with pytest.raises(CheckpointError, match=r"the disk is full.*no earlier checkpoint exists"):
        store.save(3, state, data_state=0, meta=meta(3))
        for _ in range(600):
            store.poll()
            jax.block_until_ready(jax.numpy.ones(100_000) * 2)
        store.wait()
    assert store.latest is None
    store.close()


def test_another_geometry_format_or_damage_is_named(setup, tmp_path):
    state, abstract = setup
    store = Checkpoints(tmp_path, keep=9)
    store.save(1, state, data_state=0, meta=meta(1))
    store.save(2, state, data_state=0, meta=meta(2, process_count=8))
    store.save(3, state, data_state=0, meta=meta(3))
    store.wait()
    grown = jax.tree.map(
        lambda x: (
            jax.ShapeDtypeStruct((*x.shape[:-1], x.shape[-1] + 1), x.dtype, sharding=x.sharding)
            if len(x.shape) == 2
            else x
        ),
        abstract,
    )
    with pytest.raises(CheckpointError, match=r"1: cannot be restored"):
        store.restore(grown, step=1)
    with pytest.raises(CheckpointError, match="written by 8 processes, this run has 1"):
        store.restore(abstract, step=2)
    path = tmp_path / "3" / "meta" / "value.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "format": 99}))
    with pytest.raises(CheckpointError, match="is of format 99, this code reads 1"):
        store.meta(3)
    path.write_text("{")
    with pytest.raises(CheckpointError, match="3: cannot be read"):
        store.meta(3)
    store.close()


def test_free_space_note(tmp_path):
    assert free_space_note(tmp_path, 1) is None
    assert "needs about 1048576.0 GiB" in free_space_note(tmp_path, 2**50)


def test_large_arrays_are_stored_in_pieces_and_stacked_ones_by_layer(tmp_path, monkeypatch):
    monkeypatch.setattr("mage_jax.train.checkpoint.CHUNK_BYTES", 16_384)
    params = {
        "text": {"embed_vd": jnp.ones((96, 64)), "layers": {"q": jnp.ones((3, 64, 64)), "norm_d": jnp.ones((3, 64))}}
    }
    state = TrainState(
        step=jnp.int32(1), params=params, opt_state={"count": jnp.int32(0)}, rng=jax.random.key_data(jax.random.key(0))
    )
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, state, data_state={}, meta=Meta(step=1, process_count=1, data_workers=0, config={}))
    checkpoints.close()
    (described,) = (tmp_path / "1" / "params" / "array_metadatas").iterdir()
    found = {
        m["array_metadata"]["param_name"]: m["array_metadata"]
        for m in json.loads(described.read_text())["array_metadatas"]
    }
    chunks = {name: tuple(m["chunk_shape"]) for name, m in found.items()}
    assert chunks["text.layers.q"] == (1, 64, 64)
    assert chunks["text.layers.norm_d"] == (3, 64)
    assert np.prod(chunks["text.embed_vd"]) * 4 <= 16_384 and chunks["text.embed_vd"][0] > 1
