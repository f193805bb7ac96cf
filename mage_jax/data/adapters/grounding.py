"""Grounding sets: a picture, words, a box; the answer is a click on the box's centre (the click-only prompt).

* "osatlas" (OS-Atlas): ``img_filename, instruction, bbox, data_type`` with bbox [left, top, right, bottom] in 0-1, or
  grouped, ``img_filename, elements: [{instruction, bbox, data_type}]``. Mirrors of other sets in corner form are read
  with ``--coord_space``.
* "screenspot" (ScreenSpot v1 and v2): ``img_filename, instruction, bbox, data_type, data_source`` with bbox
  [left, top, width, height] in pixels.

Ids are ``<file stem>:<n>`` (``n`` the record's line in JSONL, where it starts in a JSON array, with the element's
number added when grouped): the sets have none. Uncertain, hence strict: the grouped form, and the meaning of the four
numbers in mirrors, which cannot be told from the numbers alone; a box that is empty or leaves its picture is an error.
"""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

from mage_jax.data.adapters.base import Adapter, Context, Grid, Item, text
from mage_jax.data.adapters.base import items as listed
from mage_jax.data.adapters.turns import episode, grounding_turn, screenshot
from mage_jax.data.episode_schema import Episode

_LABELS = ("data_type", "data_source")


def _convert(item: Item, context: Context, *, format: str) -> Iterator[Episode]:
    place, record = item.place, item.record()
    stem = f"{pathlib.Path(place.file).stem}:{place.line}"
    grouped = format == "osatlas" and "elements" in record
    if grouped:
        context.fields(record, place=place, field="", required=("img_filename", "elements"), optional=_LABELS)
        targets = [
            (f"{stem}.{i}", f"elements[{i}].", element)
            for i, element in enumerate(listed(record["elements"], place=place, field="elements"))
        ]
    else:
        targets = [(stem, "", record)]
    image = context.image(record.get("img_filename"), place=place, field="img_filename")
    grid = Grid(context.coord_space, (image.width, image.height))
    for record_id, prefix, target in targets:
        required = ("instruction", "bbox") if grouped else ("img_filename", "instruction", "bbox")
        context.fields(target, place=place, field=prefix.rstrip("."), required=required, optional=_LABELS)
        box = _corners(target["bbox"], format, item, f"{prefix}bbox")
        point = grid.centre(box, place=place, field=f"{prefix}bbox")
        yield episode(
            context,
            format=format,
            record_id=record_id,
            place=place,
            prompt="grounding",
            instruction=text(target["instruction"], place=place, field=f"{prefix}instruction", empty=False),
            initial=(screenshot(image),),
            turns=[grounding_turn(point)],
            labels={"bbox": list(target["bbox"]), **{name: target[name] for name in _LABELS if name in target}},
        )


def _corners(box: Any, format: str, item: Item, field: str) -> tuple[Any, Any, Any, Any]:
    """(left, top, right, bottom) of a box as its format writes it."""
    if not isinstance(box, list) or len(box) != 4 or any(type(v) not in (int, float) for v in box):
        raise item.place.fail(field, f"must be four numbers, got {box!r:.80}", "coordinate")
    left, top, third, fourth = box
    return (left, top, left + third, top + fourth) if format == "screenspot" else (left, top, third, fourth)


def convert_osatlas(item: Item, context: Context) -> Iterator[Episode]:
    """One record to an episode for each of its targets. Raises AdapterError."""
    return _convert(item, context, format="osatlas")


def convert_screenspot(item: Item, context: Context) -> Iterator[Episode]:
    """One record to one episode. Raises AdapterError."""
    return _convert(item, context, format="screenspot")


OSATLAS = Adapter(name="osatlas", coord_space="unit", convert=convert_osatlas)
SCREENSPOT = Adapter(name="screenspot", coord_space="pixel", convert=convert_screenspot)
