"""The chunked vocabulary loss against the naive one, in value and gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mage_jax.ops.vocab import cross_entropy_sums, token_stats


def inputs(length=13):
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (3, length, 16))
    head = jax.random.normal(keys[1], (29, 16))
    targets = jax.random.randint(keys[2], (3, length), 0, 29)
    weights = jnp.where(jax.random.uniform(keys[3], (3, length)) < 0.4, 0.0, 1.5)
    return hidden, head, targets, weights


def naive(hidden, head, targets, weights):
    logp = jax.nn.log_softmax(hidden @ head.T, axis=-1)
    return -jnp.sum(jnp.take_along_axis(logp, targets[..., None], -1)[..., 0] * weights)


@pytest.mark.parametrize("chunk", [1, 4, 13, 100])
def test_loss_and_gradient_equal_the_naive_ones(chunk):
    hidden, head, targets, weights = inputs()
    want, want_grads = jax.value_and_grad(naive, argnums=(0, 1))(hidden, head, targets, weights)
    got, got_grads = jax.value_and_grad(
        lambda h, e: cross_entropy_sums(h, e, targets, weights, chunk=chunk).loss, argnums=(0, 1)
    )(hidden, head)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    for a, b in zip(got_grads, want_grads, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_token_stats(temperature):
    hidden, head, targets, _ = inputs()
    stats = token_stats(hidden, head, targets, chunk=5, temperature=temperature)
    logp = jax.nn.log_softmax(hidden @ head.T / temperature, axis=-1)
    np.testing.assert_allclose(stats.logp_bt, jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], atol=1e-5)
    np.testing.assert_allclose(stats.entropy_bt, -jnp.sum(jnp.exp(logp) * logp, -1), atol=1e-5)
    np.testing.assert_array_equal(stats.correct_bt, (logp.argmax(-1) == targets).astype(np.float32))


def test_a_non_finite_unsupervised_token_does_not_reach_the_sum():
    hidden, head, targets, weights = inputs()
    weights = weights.at[0, 0].set(0.0)
    sums = cross_entropy_sums(hidden.at[0, 0].set(jnp.nan), head, targets, weights, chunk=4)
    assert np.isfinite(sums.loss) and np.isfinite(sums.correct)


def test_full_logits_never_exist():
    """No array of the compiled forward and backward holds T x V numbers."""
    hidden, head, targets, weights = (
        jnp.ones((1, 640, 8)),
        jnp.ones((500, 8)),
        jnp.ones((1, 640), int),
        jnp.ones((1, 640)),
    )
    step = jax.jit(jax.grad(lambda h, e: cross_entropy_sums(h, e, targets, weights, chunk=64).loss, argnums=(0, 1)))
    text = step.lower(hidden, head).compile().as_text()
    assert "64,500]" in text
    assert "640,500]" not in text and "10,64,500]" not in text
