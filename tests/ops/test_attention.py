"""Every attention implementation against a slow loop, in value and gradient, and the leakage rule."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mage_jax.ops.attention import attention, decode_attention

IMPLS = [("xla", 512), ("xla_chunked", 4), ("xla_chunked", 5), ("xla_chunked", 64)]
SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 0, 0], [0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2, 0]], np.int32)


def inputs(seed=0, heads=4, kv_heads=2, size=8):
    keys = jax.random.split(jax.random.key(seed), 3)
    batch, length = SEGMENTS.shape
    shapes = [(batch, length, n, size) for n in (heads, kv_heads, kv_heads)]
    return [jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, shapes, strict=True)]


def oracle(q, k, v, segments, causal):
    """Query by query in float64."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    out = np.zeros_like(q)
    for b, t, n in np.ndindex(*q.shape[:3]):
        if segments[b, t] == 0:
            continue
        keys = [s for s in range(q.shape[1]) if segments[b, s] == segments[b, t] and (s <= t or not causal)]
        scores = np.array([q[b, t, n] @ k[b, s, n // group] for s in keys]) * q.shape[-1] ** -0.5
        weights = np.exp(scores - scores.max())
        out[b, t, n] = (weights / weights.sum()) @ v[b, keys, n // group]
    return out


def run(q, k, v, impl, chunk, causal, segments=SEGMENTS):
    return attention(q, k, v, q_segments_bt=segments, kv_segments_bs=segments, causal=causal, impl=impl, chunk=chunk)


@pytest.mark.parametrize(("impl", "chunk"), IMPLS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 2), (4, 4), (6, 1)])
def test_value_equals_the_loop(impl, chunk, causal, heads, kv_heads):
    q, k, v = inputs(heads=heads, kv_heads=kv_heads)
    got = run(q, k, v, impl, chunk, causal)
    np.testing.assert_allclose(got, oracle(q, k, v, SEGMENTS, causal), atol=2e-6)


@pytest.mark.parametrize(("impl", "chunk"), IMPLS[1:])
@pytest.mark.parametrize("causal", [True, False])
def test_gradient_equals_the_dense_one(impl, chunk, causal):
    args = inputs(1)
    probe = jax.random.normal(jax.random.key(9), args[0].shape)
    grads = [
        jax.grad(lambda q, k, v, i=i, c=c: jnp.sum(run(q, k, v, i, c, causal) * probe), argnums=(0, 1, 2))(*args)
        for i, c in (("xla", 512), (impl, chunk))
    ]
    for want, got in zip(*grads, strict=True):
        np.testing.assert_allclose(got, want, atol=2e-6)


@pytest.mark.parametrize(("impl", "chunk"), IMPLS)
@pytest.mark.parametrize("causal", [True, False])
def test_no_leak_between_segments_or_from_padding(impl, chunk, causal):
    q, k, v = inputs(2)
    before = run(q, k, v, impl, chunk, causal)
    touched = (SEGMENTS == 2) | (SEGMENTS == 0)
    noise = jnp.where(touched[..., None, None], 100.0, 0.0)
    after = run(q + noise, k + noise, v + noise, impl, chunk, causal)
    np.testing.assert_array_equal(np.asarray(after)[~touched], np.asarray(before)[~touched])
    assert np.abs(np.asarray(after - before))[SEGMENTS == 2].max() > 1
    assert not np.asarray(after)[SEGMENTS == 0].any()


def test_gradients_of_a_padded_row_are_finite_zeros():
    q, k, v = inputs(3)
    empty = np.zeros_like(SEGMENTS)
    grads = jax.grad(lambda q, k, v: jnp.sum(run(q, k, v, "xla", 512, True, empty) ** 2), argnums=(0, 1, 2))(q, k, v)
    assert all(not np.asarray(g).any() for g in grads)


def test_decode_reads_what_the_full_attention_reads():
    q, k, v = inputs(4)
    segments = np.ones_like(SEGMENTS)
    full = run(q, k, v, "xla", 512, True, segments)
    for t in (0, 3, 12):
        visible = np.broadcast_to(np.arange(13) <= t, (2, 13))
        got = decode_attention(q[:, t], jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), visible_bs=visible)
        np.testing.assert_allclose(got, full[:, t], atol=2e-6)


def test_unknown_implementation_is_named():
    q, k, v = inputs()
    with pytest.raises(ValueError, match="'cudnn'"):
        run(q, k, v, "cudnn", 4, True)
