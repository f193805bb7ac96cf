"""The update rule against plain numpy, and what must never move."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mage_jax.config import ConfigError, MeshConfig, OptimizerConfig
from mage_jax.params import declare, flatten, unflatten
from mage_jax.sharding import make_mesh
from mage_jax.train.optimizer import applied_updates, make_optimizer, merge, parameter_table, partition, tower_of
from mage_jax.train.state import abstract_state, state_from_params
from mage_jax.train.step import make_train_step, train_step
from tests.helpers import tiny_config
from tests.train.helpers import packed_batch, random_params, tiny_train_config

MODEL = tiny_config()


def optimizer_of(*, total_steps=10, model=MODEL, **changes):
    config = OptimizerConfig(**{"learning_rate": 1e-2, "warmup_steps": 4, "end_lr_ratio": 0.1, **changes})
    return make_optimizer(config, model=model, total_steps=total_steps)


def test_schedule_values():
    optimizer = optimizer_of()
    got = [float(optimizer.learning_rate(jnp.int32(step))) for step in range(12)]
    want = [2.5e-3, 5e-3, 7.5e-3, 1e-2]  # warm-up: never zero, full at the end of it
    want += [1e-2 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * k / 6))) for k in range(1, 7)]
    want += [1e-3, 1e-3]  # past the end
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert float(optimizer_of(warmup_steps=0).learning_rate(jnp.int32(9))) == pytest.approx(1e-3)


def random_like(params, seed, scale=1.0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda p: (scale * rng.normal(size=p.shape)).astype(np.float32), params)


@pytest.mark.parametrize("clip", [0.0, 1.0])
def test_adamw_with_clipping_and_decay_mask_matches_numpy(clip):
    optimizer = optimizer_of(clip_norm=clip, weight_decay=0.3, beta1=0.8, beta2=0.9)
    params = random_params(MODEL)
    specs = flatten(declare(MODEL))
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    want = {path: np.asarray(p, np.float64) for path, p in flatten(params).items()}
    first = second = dict.fromkeys(want, 0.0)
    for step in range(3):
        grads = random_like(params, step)
        updates, state, rate = update(grads, state, params, step=jnp.int32(step))
        params = jax.tree.map(np.add, params, updates)
        flat = {path: g.astype(np.float64) for path, g in flatten(grads).items()}
        norm = np.sqrt(sum(np.square(g).sum() for g in flat.values()))
        assert norm > 1.0, "clipping would not act"
        flat = {path: g * (min(1.0, clip / norm) if clip else 1.0) for path, g in flat.items()}
        first = {path: 0.8 * first[path] + 0.2 * g for path, g in flat.items()}
        second = {path: 0.9 * second[path] + 0.1 * g**2 for path, g in flat.items()}
        for path in want:
            direction = first[path] / (1 - 0.8 ** (step + 1))
            direction = direction / (np.sqrt(second[path] / (1 - 0.9 ** (step + 1))) + 1e-8)
            decay = 0.3 * want[path] if specs[path].decay else 0.0
            want[path] = want[path] - float(rate) * (direction + decay)
    for path, value in flatten(params).items():
        np.testing.assert_allclose(value, want[path], rtol=2e-4, atol=2e-6, err_msg=path)
    assert int(applied_updates(state)) == 3


def test_decay_reaches_matrices_only():
    optimizer = optimizer_of(weight_decay=0.5)
    params = jax.tree.map(np.ones_like, random_params(MODEL))
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _, _ = jax.jit(optimizer.update)(zeros, optimizer.init(params), params, step=jnp.int32(3))
    for path, update in flatten(updates).items():
        expected = 0.0 if "norm" in path or "bias" in path else -1e-2 * 0.5
        np.testing.assert_allclose(update, expected, rtol=1e-6, err_msg=path)


@pytest.mark.parametrize("frozen", [("vision",), ("vision", "merger"), ("text", "lm_head"), ("lm_head",)])
def test_partition_and_merge(frozen):
    params = random_params(MODEL)
    trainable, kept = partition(params, frozen)
    assert {tower_of(path) for path in flatten(kept)} == set(frozen)
    assert not {tower_of(path) for path in flatten(trainable)} & set(frozen)
    assert jax.tree.structure(merge(trainable, kept)) == jax.tree.structure(params)


def test_frozen_towers_keep_every_bit_and_have_no_state():
    config = tiny_train_config(optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=0, frozen=("vision", "text")))
    optimizer = make_optimizer(config.optimizer, model=config.model, total_steps=config.steps)
    mesh = make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        state = state_from_params(config, optimizer, mesh, random_params(config.model))
        before = jax.tree.map(np.array, state.params)
        step = make_train_step(config, optimizer=optimizer, mesh=mesh)
        for seed in range(3):
            state, _ = step(state, packed_batch(seed=seed))
    for path, value in flatten(state.params).items():
        same = np.array_equal(np.asarray(value).view(np.uint32), flatten(before)[path].view(np.uint32))
        assert same == (tower_of(path) in config.optimizer.frozen), path
    moments = {path for path in flatten(state.opt_state[1].mu)}
    assert {tower_of(path) for path in moments} == {"merger", "lm_head"}


def test_frozen_towers_have_no_backward_pass():
    """Freezing both visual towers makes the step cheaper, so their backward is really gone."""

    def flops(frozen):
        config = tiny_train_config(optimizer=OptimizerConfig(frozen=frozen))
        optimizer = make_optimizer(config.optimizer, model=config.model, total_steps=config.steps)
        state = abstract_state(config, optimizer, make_mesh(MeshConfig()))
        function = jax.jit(lambda s, b: train_step(s, b, config=config, optimizer=optimizer))
        return function.lower(state, packed_batch()).cost_analysis()["flops"]

    assert flops(("vision", "merger")) < 0.8 * flops(())


def test_moments_are_float32_whatever_the_parameters_are():
    params = jax.tree.map(lambda p: jnp.asarray(p, jnp.bfloat16), random_params(MODEL))
    optimizer = optimizer_of()
    state = optimizer.init(params)
    updates, state, _ = jax.jit(optimizer.update)(random_like(params, 0), state, params, step=jnp.int32(0))
    floats = [x for x in jax.tree.leaves((state, updates)) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}


def test_impossible_freezing_is_refused():
    tied = dataclasses.replace(MODEL, tied_embeddings=True)
    with pytest.raises(ConfigError, match=r"optimizer\.frozen: 'lm_head' cannot be frozen by itself"):
        optimizer_of(model=tied, frozen=("lm_head",))
    with pytest.raises(ConfigError, match=r"optimizer\.frozen.*nothing to train"):
        optimizer_of(model=tied, frozen=("vision", "merger", "text"))


def test_parameter_table_adds_up():
    table = parameter_table(MODEL, ("vision",))
    rows = {line.split()[0]: line.split()[1:] for line in table.splitlines()}
    count = {tower: int(rows[tower][0].replace(",", "")) for tower in ("vision", "merger", "text", "lm_head", "total")}
    total = count.pop("total")
    assert sum(count.values()) == total == sum(np.prod(s.shape) for s in flatten(declare(MODEL)).values())
    assert rows["vision"][1] == "frozen" and rows["total"][1] == f"{total - count['vision']:,}"
    assert unflatten({"a.b": 1}) == {"a": {"b": 1}}
