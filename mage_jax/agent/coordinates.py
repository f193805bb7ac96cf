"""Coordinates: the model's grid, [0, 999] on both axes, to pixels of the *original* screenshot and back.

The model card's rule is ``round(c * width / 1000)`` (not ``c * width / 999``, which leaves the screen at 999). Python
rounds halves to even; a half needs a product that ends in 500, so 1920 and 1080 have none.
"""

from __future__ import annotations

GRID = 1000  # cells per axis; the largest coordinate is one less
MAX_COORDINATE = GRID - 1


class CoordinateError(ValueError):
    """A coordinate or pixel outside its range, or a screen without pixels. Never clamped silently."""


def _check(name: str, value: int, largest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= largest:
        raise CoordinateError(f"{name}: must be an integer in [0, {largest}], got {value!r}")


def _check_size(size: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise CoordinateError(f"screen size: must be a positive integer of pixels, got {size!r}")


def axis_to_pixel(coordinate: int, *, size: int) -> int:
    """Pixel in [0, size - 1] of a coordinate in [0, 999]; ``size`` is the screen's width or height in pixels.

    Kept inside the screen: below 500 pixels the rule itself would round 999 up to ``size``.

    Raises:
      CoordinateError: not an integer, or out of range.
    """
    _check_size(size)
    _check("coordinate", coordinate, MAX_COORDINATE)
    return min(round(coordinate * size / GRID), size - 1)


def axis_to_coordinate(pixel: int, *, size: int) -> int:
    """Coordinate in [0, 999] nearest to a pixel in [0, size - 1]: ``min(999, round(1000 * pixel / size))``.

    Inverts ``axis_to_pixel`` exactly if size >= 1000. Smaller screens have fewer pixels than coordinates: there the
    coordinate that comes back maps to the same pixel, or to the one beside it.

    Raises:
      CoordinateError: not an integer, or out of range.
    """
    _check_size(size)
    _check("pixel", pixel, size - 1)
    return min(round(GRID * pixel / size), MAX_COORDINATE)


def to_pixels(coordinate: tuple[int, int], *, width: int, height: int) -> tuple[int, int]:
    """(x, y) in pixels of a coordinate pair; see ``axis_to_pixel``."""
    x, y = coordinate
    return axis_to_pixel(x, size=width), axis_to_pixel(y, size=height)


def to_coordinate(pixels: tuple[int, int], *, width: int, height: int) -> tuple[int, int]:
    """(x, y) in [0, 999] of a pixel pair; see ``axis_to_coordinate``."""
    x, y = pixels
    return axis_to_coordinate(x, size=width), axis_to_coordinate(y, size=height)
