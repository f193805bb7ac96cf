"""The coordinate map and its inverse."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.agent.coordinates import (
    CoordinateError,
    axis_to_coordinate,
    axis_to_pixel,
    to_coordinate,
    to_pixels,
)

COORDINATES = st.integers(0, 999)


@pytest.mark.parametrize(
    ("coordinate", "size", "pixel"),
    [
        (0, 1920, 0),
        (999, 1920, 1918),
        (999, 1080, 1079),
        (512, 1920, 983),
        (300, 1080, 324),
        (250, 1366, 342),  # 341.5: the half goes to the even side
        (750, 1366, 1024),  # 1024.5
        (999, 100, 99),  # 99.9 rounds to 100, which is off the screen
        (999, 1, 0),
    ],
)
def test_examples(coordinate, size, pixel):
    assert axis_to_pixel(coordinate, size=size) == pixel


def test_pairs_use_their_own_axis():
    assert to_pixels((999, 999), width=1920, height=1080) == (1918, 1079)
    assert to_coordinate((1918, 1079), width=1920, height=1080) == (999, 999)


@given(COORDINATES, st.integers(1000, 8000))
def test_inverse_is_exact_from_1000_pixels_on(coordinate, size):
    assert axis_to_coordinate(axis_to_pixel(coordinate, size=size), size=size) == coordinate


@given(COORDINATES, st.integers(1, 8000))
def test_within_one_pixel_and_on_the_screen(coordinate, size):
    pixel = axis_to_pixel(coordinate, size=size)
    assert 0 <= pixel < size
    assert abs(pixel - coordinate * size / 1000) <= 1
    assert abs(axis_to_pixel(axis_to_coordinate(pixel, size=size), size=size) - pixel) <= 1


@given(st.data(), st.integers(1, 1920))
def test_a_pixel_comes_back_within_one_pixel_up_to_full_hd(data, size):
    pixel = data.draw(st.integers(0, size - 1))
    assert abs(axis_to_pixel(axis_to_coordinate(pixel, size=size), size=size) - pixel) <= 1


@pytest.mark.parametrize("coordinate", [-1, 1000, 1500, 1.0, True, "5", None])
def test_a_coordinate_out_of_range_is_not_clamped(coordinate):
    with pytest.raises(CoordinateError, match=r"coordinate: .*\[0, 999\]"):
        axis_to_pixel(coordinate, size=1920)


@pytest.mark.parametrize(("pixel", "size"), [(1920, 1920), (-1, 1920), (0, 0), (0, -5), (0, 1.5)])
def test_bad_pixels_and_screens(pixel, size):
    with pytest.raises(CoordinateError):
        axis_to_coordinate(pixel, size=size)
