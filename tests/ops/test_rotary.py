import jax.numpy as jnp
import numpy as np

from mage_jax.ops.rotary import rotate_half_split, rotate_interleaved, text_angles, vision_angles


def test_text_angles_hold_at_long_positions():
    positions = jnp.array([[0, 257, 32_767, 262_143]])
    got = text_angles(positions, head_dim=128, theta=5e6)
    want = np.asarray(positions, np.float64)[..., None] * 5e6 ** (-np.arange(0, 128, 2) / 128)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, rtol=2e-7)


def test_half_split_rotation_depends_on_distance_only():
    q, k = np.random.default_rng(0).normal(size=(2, 1, 1, 1, 32)).astype(np.float32)
    dots = []
    for shift in (0, 5, 1000):
        angles = text_angles(jnp.array([[3 + shift, 10 + shift]]), head_dim=32, theta=1e4)
        dots.append(float(jnp.sum(rotate_half_split(q, angles[:, :1]) * rotate_half_split(k, angles[:, 1:]))))
    np.testing.assert_allclose(dots, dots[0], rtol=1e-4)


def test_vision_angles_split_and_exponents():
    got = np.asarray(vision_angles(jnp.array([[[2, 3, 5]]]), head_dim=64, theta=1e4))[0, 0]
    half = np.concatenate([p * 1e4 ** (-np.arange(n) / n) for p, n in ((2, 8), (3, 12), (5, 12))])
    np.testing.assert_allclose(got, np.concatenate([half, half]), rtol=3e-7)


def test_vision_rotation_uses_each_lane_s_own_angle():
    x = np.random.default_rng(1).normal(size=(1, 1, 1, 32)).astype(np.float32)
    a = np.random.default_rng(2).normal(size=(1, 1, 32)).astype(np.float32)
    got = np.asarray(rotate_interleaved(x, a))[0, 0, 0]
    for j in range(16):
        even, odd = x[0, 0, 0, 2 * j], x[0, 0, 0, 2 * j + 1]
        np.testing.assert_allclose(got[2 * j], even * np.cos(a[0, 0, 2 * j]) - odd * np.sin(a[0, 0, 2 * j]), atol=1e-6)
        np.testing.assert_allclose(
            got[2 * j + 1], odd * np.cos(a[0, 0, 2 * j + 1]) + even * np.sin(a[0, 0, 2 * j + 1]), atol=1e-6
        )
