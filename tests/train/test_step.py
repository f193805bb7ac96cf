"""Loss, gradients and metrics are sums over targets: how rows are cut into micro-batches or packed changes nothing."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mage_jax.config import ComputeConfig, ConfigError, MeshConfig
from mage_jax.ops.vocab import LossSums
from mage_jax.params import flatten
from mage_jax.sharding import make_mesh
from mage_jax.train import step as step_module
from mage_jax.train.loop import device_batch
from mage_jax.train.optimizer import make_optimizer
from mage_jax.train.state import abstract_state, state_from_params
from mage_jax.train.step import gradient_sums, make_train_step, split_micro_batches, summarize, train_step
from tests.helpers import random_rows
from tests.train.conftest import QUICK
from tests.train.helpers import packed_batch, random_params, tiny_train_config, with_targets

CONFIG = tiny_train_config()
PARAMS = random_params(CONFIG.model)
LIMIT = 1e-5  # norm of the difference over the norm, per parameter


def gradients(batch, *, micro_batches=1):
    config = dataclasses.replace(CONFIG, micro_batches=micro_batches)
    function = jax.jit(lambda p, b: gradient_sums(p, {}, b, config=config), compiler_options=QUICK)
    grads, sums = function(PARAMS, batch)
    weight = float(sums.weight)
    return {path: np.asarray(g, np.float64) / weight for path, g in flatten(grads).items()}, sums


def assert_same(got, want, limit=LIMIT):
    (got_grads, got_sums), (want_grads, want_sums) = got, want
    for path, grad in want_grads.items():
        norm = np.linalg.norm(grad)
        assert norm > 0, f"{path} has no gradient: the test would see nothing"
        assert np.linalg.norm(got_grads[path] - grad) <= limit * norm, path
    for name in ("loss", "weight", "correct"):
        np.testing.assert_allclose(getattr(got_sums, name), getattr(want_sums, name), rtol=1e-6)


@pytest.fixture(scope="module")
def whole():
    return gradients(packed_batch())


@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_change_nothing(whole, count):
    assert_same(gradients(packed_batch(), micro_batches=count), whole)


def test_packing_changes_nothing(whole):
    assert_same(gradients(packed_batch(rows=8)), whole)  # one sample a row
    assert_same(gradients(packed_batch(rows=1)), whole)  # all samples in one row


def test_unequal_micro_batches_would_expose_a_mean_of_means(whole, monkeypatch):
    """Sabotage: each micro-batch divided by its own weight. The comparison above must fail on it."""
    honest = step_module.batch_sums

    def mean_per_micro_batch(*args, **kwargs):
        sums = honest(*args, **kwargs)
        return LossSums(loss=sums.loss / sums.weight, weight=sums.weight / sums.weight, correct=sums.correct)

    monkeypatch.setattr(step_module, "batch_sums", mean_per_micro_batch)
    with pytest.raises(AssertionError):
        assert_same(gradients(packed_batch(), micro_batches=2), whole, limit=0.05)


def test_micro_batches_are_strided_so_that_each_device_keeps_its_rows():
    batch = packed_batch(rows=8)
    split = split_micro_batches(batch, 2)
    np.testing.assert_array_equal(split.rows.tokens_bt[1], batch.rows.tokens_bt[1::2])
    assert split.weights_bt.shape == (2, 4, *batch.weights_bt.shape[1:])


def test_a_batch_without_targets_is_skipped_and_counted():
    mesh = make_mesh(MeshConfig())
    optimizer = make_optimizer(CONFIG.optimizer, model=CONFIG.model, total_steps=CONFIG.steps)
    with jax.set_mesh(mesh):
        state = state_from_params(CONFIG, optimizer, mesh, PARAMS)
        step = make_train_step(CONFIG, optimizer=optimizer, mesh=mesh)
        state, first = step(state, packed_batch())
        before = jax.tree.map(np.array, state)
        state, empty = step(state, packed_batch(zero=True))
        after = jax.tree.map(np.array, state)
        _, third = step(state, packed_batch())
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.opt_state, before.opt_state)
    assert int(after.step) == 2
    values = summarize(jax.device_get(empty))
    assert "loss" not in values and values["skipped_updates"] == 1 and values["update_norm"] == 0
    assert all(np.isfinite(v) for v in values.values())
    assert summarize(jax.device_get(third))["skipped_updates"] == 1
    # The schedule is a function of the step, so the skipped one is not made up for.
    assert summarize(jax.device_get(first))["learning_rate"] == pytest.approx(5e-4)
    assert float(third.learning_rate) < float(empty.learning_rate) == pytest.approx(1e-3)


def test_metrics_are_what_numpy_says(whole):
    optimizer = make_optimizer(CONFIG.optimizer, model=CONFIG.model, total_steps=CONFIG.steps)
    mesh = make_mesh(MeshConfig())
    batch = packed_batch()
    grads, sums = whole
    with jax.set_mesh(mesh):
        state = state_from_params(CONFIG, optimizer, mesh, PARAMS)
        new, metrics = make_train_step(CONFIG, optimizer=optimizer, mesh=mesh)(state, batch)
    values = summarize(jax.device_get(metrics))
    assert values["loss"] == pytest.approx(float(sums.loss) / batch.weights_bt.sum(), rel=1e-6)
    assert values["accuracy"] == pytest.approx(float(sums.correct) / batch.weights_bt.sum())
    assert values["target_weight"] == batch.weights_bt.sum()
    assert values["tokens"] == (batch.rows.segment_ids_bt > 0).sum()

    def norm(tree):
        return np.sqrt(sum(np.square(np.asarray(x, np.float64)).sum() for x in jax.tree.leaves(tree)))

    assert values["grad_norm"] == pytest.approx(norm(grads), rel=1e-5)
    assert values["param_norm"] == pytest.approx(norm(new.params), rel=1e-5)
    moved = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), new.params, PARAMS)
    assert values["update_norm"] == pytest.approx(norm(moved), rel=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("micro_batches", "remat"), [(1, "none"), (2, "full"), (4, "dots")])
def test_a_step_keeps_structure_shapes_and_dtypes(dtype, micro_batches, remat):
    compute = ComputeConfig(compute_dtype=dtype, remat=remat, attention="xla_chunked", attention_chunk=16)
    config = tiny_train_config(param_dtype=dtype, micro_batches=micro_batches, compute=compute)
    optimizer = make_optimizer(config.optimizer, model=config.model, total_steps=config.steps)
    before = abstract_state(config, optimizer, make_mesh(MeshConfig()))
    function = functools.partial(train_step, config=config, optimizer=optimizer)
    after, metrics = jax.eval_shape(function, before, packed_batch())
    same = jax.tree.map(lambda a, b: (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, False), after, before)
    assert all(jax.tree.leaves(same))
    floats = [x for x in jax.tree.leaves(metrics) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


def test_text_only_rows_train_without_a_vision_tower():
    config = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, patches_per_row=0))
    optimizer = make_optimizer(config.optimizer, model=config.model, total_steps=config.steps)
    rows = random_rows(config.model, [[(9, []), (6, [])], [(12, [])]], tokens=24, patches=0)
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        state = state_from_params(config, optimizer, mesh, PARAMS)
        batch = device_batch(with_targets(rows), mesh)
        _, metrics = make_train_step(config, optimizer=optimizer, mesh=mesh)(state, batch)
    assert 0 < float(metrics.grad_norm) < 100


def test_rows_that_cannot_be_split_evenly_are_refused():
    data = dataclasses.replace(CONFIG.data, rows=6)
    mesh = jax.sharding.AbstractMesh((4, 1), ("data", "fsdp"))
    with pytest.raises(ConfigError, match=r"data\.rows: 6 .* multiple of 4"):
        step_module.check_rows(dataclasses.replace(CONFIG, data=data), mesh)
