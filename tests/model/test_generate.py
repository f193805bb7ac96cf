"""Cached generation against full recomputation; sampling against its definition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mage_jax.config import ComputeConfig
from mage_jax.model.cache import bucket
from mage_jax.model.generate import Generator, pad_to_buckets
from mage_jax.model.mage_vl import forward, logits
from mage_jax.model.sampling import Sampling, SamplingArrays, sample
from mage_jax.params import init_params
from tests.helpers import random_rows, tiny_config

CONFIG = dataclasses.replace(tiny_config(), eos_token_ids=(0,))
COMPUTE = ComputeConfig()
PARAMS = jax.tree.map(lambda x: 3.0 * x, init_params(CONFIG, jax.random.key(1)))
PROMPTS = [[(9, [(4, 6)])], [(5, [])], [(12, [(2, 4), (4, 2)])]]


def prompts(which=(0, 1, 2), pad_left=False):
    rows = random_rows(CONFIG, PROMPTS, tokens=24, patches=32)
    if pad_left:
        used = (rows.segment_ids_bt > 0).sum(1)
        roll = lambda x: np.stack([np.roll(r, 24 - n, axis=0) for r, n in zip(x, used, strict=True)])
        rows = rows.replace(
            **{f: roll(getattr(rows, f)) for f in ("tokens_bt", "segment_ids_bt", "positions_bt", "vision_index_bt")}
        )
    return jax.tree.map(lambda x: x[list(which)], rows)


@pytest.fixture(scope="module")
def generator():
    return Generator(PARAMS, config=CONFIG, compute=COMPUTE)


def recompute(row, count):
    """Greedy continuation by running the whole sequence again for every token."""
    length = int((row.segment_ids_bt > 0).sum())
    run = jax.jit(lambda p, r: logits(p, forward(p, r, config=CONFIG, compute=COMPUTE).hidden_btd, compute=COMPUTE))
    row = jax.tree.map(lambda x: np.array(x), pad_to_buckets(row, merge_factor=4))
    ids = []
    for i in range(count):
        ids.append(int(np.argmax(run(PARAMS, row)[0, length + i - 1])))
        if ids[-1] in CONFIG.eos_token_ids:
            break
        row.tokens_bt[0, length + i] = ids[-1]
        row.segment_ids_bt[0, length + i] = 1
        row.positions_bt[0, length + i] = length + i
    return ids


@pytest.mark.parametrize("pad_left", [False, True])
def test_batched_greedy_equals_recomputation(generator, pad_left):
    got = generator(prompts(pad_left=pad_left), Sampling(), max_new_tokens=20, chunk=7)
    for b in range(3):
        want = recompute(prompts([b]), 20)
        assert got.tokens[b][got.live[b]].tolist() == want
        assert len(want) > 3


def test_a_row_does_not_depend_on_its_neighbours(generator):
    settings = [Sampling(temperature=1.0, top_p=0.9, seed=s) for s in (5, 6, 7)]
    together = generator(prompts(), settings, max_new_tokens=16)
    for b in range(3):
        alone = generator(prompts([b]), settings[b], max_new_tokens=16, chunk=5)
        n = int(alone.live.sum())
        assert together.tokens[b][together.live[b]].tolist() == alone.tokens[0][:n].tolist()
        np.testing.assert_allclose(together.logps[b, :n], alone.logps[0, :n], atol=1e-4)


def test_seed_decides_the_draw(generator):
    draw = lambda seed: generator(prompts([0]), Sampling(temperature=1.0, seed=seed), max_new_tokens=12).tokens.tolist()
    assert draw(1) == draw(1)
    assert len({str(draw(s)) for s in range(6)}) > 3


def test_streaming_stops_at_the_end_token_and_at_the_limit(generator):
    whole = generator(prompts(), Sampling(), max_new_tokens=20)
    streamed = list(generator.stream(prompts(), Sampling(), max_new_tokens=20, chunk=3))
    tokens = np.concatenate([c.tokens for c in streamed], axis=1)
    live = np.concatenate([c.live for c in streamed], axis=1)
    assert tokens.shape[1] <= 20
    for b in range(3):
        assert tokens[b][live[b]].tolist() == whole.tokens[b][whole.live[b]].tolist()


def test_lengths_in_one_bucket_share_a_compiled_program():
    generator = Generator(PARAMS, config=CONFIG, compute=COMPUTE)
    for tokens, new in ((20, 16), (24, 16), (33, 10), (60, 16)):
        rows = random_rows(CONFIG, [[(9, [(4, 6)])], [(5, [])]], tokens=tokens, patches=24)
        generator(rows, Sampling(), max_new_tokens=new, chunk=4)
    assert generator._prefill._cache_size() == 1
    assert generator._decode._cache_size() == 1


def test_limits_and_mismatches_are_named(generator):
    with pytest.raises(ValueError, match="4096 positions"):
        generator(prompts(), Sampling(), max_new_tokens=4096)
    with pytest.raises(ValueError, match="2 settings for 3 prompts"):
        generator(prompts(), [Sampling()] * 2, max_new_tokens=4)
    with pytest.raises(ValueError, match="empty"):
        generator(prompts().replace(segment_ids_bt=np.zeros((3, 24), np.int32)), Sampling(), max_new_tokens=4)
    for bad in (
        {"temperature": -1},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"top_p": 0},
        {"top_p": 1.5},
        {"top_k": -1},
        {"top_k": 2**31},
    ):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Sampling(**bad)


def frequencies(logit_row, settings, draws=4000):
    arrays = SamplingArrays.of([dataclasses.replace(settings, seed=s) for s in range(draws)])
    tokens, logps = sample(
        jnp.broadcast_to(jnp.asarray(logit_row, jnp.float32), (draws, len(logit_row))), arrays, jnp.int32(3)
    )
    return np.bincount(tokens, minlength=len(logit_row)) / draws, np.asarray(tokens), np.asarray(logps)


def test_sampling_follows_its_definition():
    row = np.log([0.4, 0.3, 0.2, 0.06, 0.04])
    freq, tokens, logps = frequencies(row, Sampling(temperature=1.0))
    np.testing.assert_allclose(freq, [0.4, 0.3, 0.2, 0.06, 0.04], atol=0.03)
    np.testing.assert_allclose(logps, row[tokens], atol=1e-5)
    freq, _, _ = frequencies(row, Sampling(temperature=1.0, top_k=2))
    np.testing.assert_allclose(freq, [4 / 7, 3 / 7, 0, 0, 0], atol=0.03)
    freq, _, logps = frequencies(row, Sampling(temperature=1.0, top_p=0.75))
    np.testing.assert_allclose(freq, [4 / 9, 3 / 9, 2 / 9, 0, 0], atol=0.03)
    assert logps.min() > np.log(0.19)  # under the temperature, before the cut
    freq, _, _ = frequencies(row, Sampling(temperature=1.0, top_p=1e-6))
    np.testing.assert_array_equal(freq, [1, 0, 0, 0, 0])
    sharp = np.array([0.4, 0.3, 0.2, 0.06, 0.04]) ** 2
    freq, _, _ = frequencies(row, Sampling(temperature=0.5))
    np.testing.assert_allclose(freq, sharp / sharp.sum(), atol=0.03)


@pytest.mark.parametrize("temperature", [1e-6, 1e-10, 1e-37, 1e-45])
def test_a_tiny_temperature_is_greedy(temperature):
    _, tokens, logps = frequencies([1.0, 3.0, 2.9, -4.0], Sampling(temperature=temperature), draws=50)
    assert set(tokens.tolist()) == {1}
    np.testing.assert_array_equal(logps, np.zeros(50))


def test_greedy_and_sampled_rows_share_a_batch():
    logit = jnp.broadcast_to(jnp.log(jnp.array([0.1, 0.5, 0.4])), (8, 3))
    arrays = SamplingArrays.of([Sampling()] * 4 + [Sampling(temperature=1.0, seed=s) for s in range(4)])
    tokens, _ = sample(logit, arrays, jnp.int32(0))
    assert tokens[:4].tolist() == [1] * 4


def test_buckets_grow_by_at_most_a_half():
    sizes = [bucket(n, smallest=64) for n in range(1, 5000)]
    assert all(b >= n for n, b in enumerate(sizes, start=1))
    assert all(b % 4 == 0 for b in sizes)
    assert sizes == sorted(sizes) and len(set(sizes)) < 16
