"""What every adapter shares: places and errors, input files, fields, pictures, coordinates, turns."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import math
import pathlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from mage_jax.agent.coordinates import MAX_COORDINATE, CoordinateError, axis_to_coordinate
from mage_jax.data import strict_json
from mage_jax.data.episode_schema import CoordSpace, Episode, StoredImage
from mage_jax.data.image import ImageError, ImageRef, read_size
from mage_jax.data.image_store import ImageStore
from mage_jax.data.parse import RecordError


class AdapterError(RecordError):
    """A source record cannot be imported. The text is ``file:line: field: reason``; ``kind`` is for counting."""

    def __init__(self, message: str, *, kind: str = "malformed"):
        super().__init__(message)
        self.kind = kind


@dataclasses.dataclass(frozen=True)
class Place:
    """A record's file and line (from 1; in a JSON array, the line where the record starts)."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"

    def fail(self, field: str, reason: str, kind: str = "malformed") -> AdapterError:
        """The error to raise for a field of this record."""
        return AdapterError(f"{self}: {field}: {reason}", kind=kind)


@dataclasses.dataclass(frozen=True)
class Item:
    """One source record: its place, its text (or value, if it had to be decoded already), its share of the file."""

    place: Place
    content: Any
    num_bytes: int = 0

    def value(self) -> Any:
        """The decoded JSON. Raises AdapterError."""
        return (
            strict_json.loads(self.content, fail=self.place.fail) if isinstance(self.content, bytes) else self.content
        )

    def record(self) -> dict[str, Any]:
        """``value()``, which must be an object."""
        value = self.value()
        if not isinstance(value, dict):
            raise self.place.fail("line", f"must be a JSON object, got {type(value).__name__}")
        return value


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """What the person who imports knows and the files do not say.

    Attributes:
      name: of the data set, prefix of every episode id.
      licence: of the data set, unless a record states its own.
      coord_space: of the source's coordinates; None takes the format's default.
      images: folder that picture paths start from; None is the record file's folder.
      tasks: OSWorld task definitions, ``<domain>/<id>.json``.
      scroll_per_click: units of 1/999 screen that one wheel click scrolls. Depends on system and program and is in no
        public format, so it is a figure to set; 100 is about three text lines of a 1080-pixel screen.
      unknown_fields: whether a field that the format's reader does not know is an error.
    """

    name: str
    licence: str = "unknown"
    coord_space: CoordSpace | None = None
    images: pathlib.Path | None = None
    tasks: pathlib.Path | None = None
    scroll_per_click: float = 100.0
    unknown_fields: Literal["fail", "ignore"] = "fail"

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("ReadOptions.name: is empty")
        if not (math.isfinite(self.scroll_per_click) and self.scroll_per_click > 0):
            raise ValueError(f"ReadOptions.scroll_per_click: must be positive, got {self.scroll_per_click}")


@dataclasses.dataclass(frozen=True)
class Context:
    """Options and the store that pictures go to. ``coord_space`` is settled (the option, or the format's default)."""

    options: ReadOptions
    store: ImageStore
    coord_space: CoordSpace

    def fields(
        self, value: Any, *, place: Place, field: str, required: Iterable[str], optional: Iterable[str] = ()
    ) -> Mapping[str, Any]:
        """An object that has every required field and, unless they are to be ignored, no unknown one."""
        if not isinstance(value, dict):
            raise place.fail(field or "line", f"must be an object, got {type(value).__name__}")
        prefix = f"{field}." if field else ""
        for name in required:
            if name not in value:
                raise place.fail(f"{prefix}{name}", "is missing")
        unknown = [name for name in value if name not in {*required, *optional}]
        if unknown and self.options.unknown_fields == "fail":
            raise place.fail(
                f"{prefix}{unknown[0]}"[:200],
                "unknown field; if this reader may do without it, import with --unknown_fields ignore",
                "unknown field",
            )
        return value

    def image(self, value: Any, *, place: Place, field: str) -> StoredImage:
        """Stores a picture: a path, a ``file://`` URL or a base64 data URI. Only its header is decoded."""
        value = text(value, place=place, field=field)
        if value.startswith("data:"):
            header, comma, payload = value.partition(",")
            try:
                if not comma or not header.endswith(";base64"):
                    raise ValueError("needs the form data:image/...;base64,...")
                encoded = base64.b64decode(payload, validate=True)
            except (binascii.Error, ValueError) as error:
                raise place.fail(field, f"is not a base64 data URI ({error})", "image") from None
            return self.store_image(encoded, place=place, field=field)
        value = value.removeprefix("file://")
        if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", value):
            raise place.fail(field, f"must be a local file, got {value!r:.80}; download it and give its path", "image")
        if not value or "\0" in value:
            raise place.fail(field, f"is not a path: {value!r:.80}", "image")
        path = (self.options.images or pathlib.Path(place.file).parent) / value
        try:
            encoded = path.read_bytes()
        except OSError as error:
            raise place.fail(
                field,
                f"{path} cannot be read ({error.strerror or error}); --images names the folder that paths start from",
                "image",
            ) from None
        return self.store_image(encoded, place=place, field=field)

    def store_image(self, encoded: bytes, *, place: Place, field: str) -> StoredImage:
        """Stores a picture's bytes after reading its size from its header."""
        try:
            height, width = read_size(ImageRef("the picture", encoded))
        except ImageError as error:
            raise place.fail(field, str(error), "image") from None
        return StoredImage(sha256=self.store.put(encoded), width=width, height=height)


# Fields


def text(value: Any, *, place: Place, field: str, empty: bool = True) -> str:
    """A string that UTF-8 can express. Raises AdapterError."""
    value = strict_json.decode(str, value, fail=place.fail, field=field)
    if not empty and not value.strip():
        raise place.fail(field, "is empty")
    return value


def items(value: Any, *, place: Place, field: str) -> list[Any]:
    """A list of at least one item."""
    if not isinstance(value, list) or not value:
        raise place.fail(field, "must be a list of at least one item")
    return value


def identifier(value: Any, *, place: Place, field: str) -> str:
    """A non-empty string, or an integer as a string."""
    return text(str(value) if type(value) is int else value, place=place, field=field, empty=False)


def decoded(value: Any, *, place: Place, field: str) -> Any:
    """A value that some exports hold as JSON in a string."""
    if not isinstance(value, str):
        return value
    return strict_json.loads(value, fail=lambda _, reason: place.fail(field, reason))


# Coordinates


@dataclasses.dataclass(frozen=True)
class Grid:
    """Source coordinates to the protocol's [0, 999]: the one place where they are converted.

    Spaces: "pixel", 0 <= x < width of the screenshot, fractions belong to the pixel that they fall in; "unit",
    0 <= x <= 1; "thousand", whole numbers 0 ... 999, kept. A value outside its space is an error, never clamped.
    """

    space: CoordSpace
    screen: tuple[int, int] | None  # (width, height), needed for "pixel" only

    def point(self, x: Any, y: Any, *, place: Place, field: str) -> list[int]:
        """[x, y] in [0, 999]. Raises AdapterError."""
        return [self._axis(v, axis, f"{field}.{'xy'[axis]}", place) for axis, v in enumerate((x, y))]

    def centre(self, box: tuple[Any, Any, Any, Any], *, place: Place, field: str) -> list[int]:
        """The centre of (left, top, right, bottom); edges may touch the far border of their space."""
        limits = self._limits(place, field)
        for i, value in enumerate(box):
            _number(value, f"{field}[{i}]", place)
            if not 0 <= value <= limits[i % 2]:
                raise place.fail(f"{field}[{i}]", self._reason(value, limits[i % 2], "<="), "coordinate")
        left, top, right, bottom = box
        if not (left < right and top < bottom):
            raise place.fail(field, f"is not left, top, right, bottom of a box: {list(box)}", "coordinate")
        middle = ((left + right) / 2, (top + bottom) / 2)
        if self.space == "thousand":
            middle = tuple(math.floor(v) for v in middle)
        return self.point(*middle, place=place, field=field)

    def _limits(self, place: Place, field: str) -> tuple[float, float]:
        """The far border of the space on both axes."""
        if self.space != "pixel":
            return (1.0, 1.0) if self.space == "unit" else (MAX_COORDINATE, MAX_COORDINATE)
        if self.screen is None:
            raise place.fail(field, "is in pixels, but no screenshot tells the size of the screen", "coordinate")
        return self.screen

    def _reason(self, value: float, limit: float, sign: str) -> str:
        return f"{value} is outside 0 <= v {sign} {limit} of space {self.space}; --coord_space names another space"

    def _axis(self, value: Any, axis: int, field: str, place: Place) -> int:
        limit = self._limits(place, field)[axis]
        _number(value, field, place)
        if self.space == "pixel":
            if not 0 <= value < limit:
                raise place.fail(field, self._reason(value, limit, "<"), "coordinate")
            try:
                return axis_to_coordinate(math.floor(value), size=int(limit))
            except CoordinateError as error:
                raise place.fail(field, str(error), "coordinate") from None
        if not 0 <= value <= limit:
            raise place.fail(field, self._reason(value, limit, "<="), "coordinate")
        if self.space == "unit":
            return min(round(1000 * value), MAX_COORDINATE)
        if value != int(value):
            raise place.fail(field, f"{value} is not whole, as space thousand needs", "coordinate")
        return int(value)


def _number(value: Any, field: str, place: Place) -> None:
    if type(value) is not int and (type(value) is not float or not math.isfinite(value)):
        raise place.fail(field, f"must be a finite number, got {value!r:.80}", "coordinate")


# Input files


def read_items(path: pathlib.Path) -> Iterator[Item]:
    """Records of a ``.jsonl`` file (decoded later, so that one bad line costs one record), or of a JSON file that holds
    one record or an array of them (a fault of its JSON ends the file).

    Raises:
      AdapterError: the file cannot be read, or is neither.
    """
    try:
        if path.suffix == ".jsonl":
            with open(path, "rb") as file:
                for number, raw in enumerate(file, start=1):
                    yield Item(Place(str(path), number), raw, len(raw))
            return
        if path.suffix not in (".json", ".traj"):
            raise Place(str(path), 1).fail("line", "is neither .jsonl nor .json; export it as JSON lines")
        content = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise Place(str(path), 1).fail("line", f"cannot be read ({error.strerror or error})") from None
    except UnicodeDecodeError as error:
        raise Place(str(path), 1).fail("line", f"is not UTF-8 ({error})") from None
    start = re.compile(r"[ \t\r\n]*").match(content).end()
    if content[start : start + 1] != "[":
        yield Item(Place(str(path), 1), content.encode(), len(content))
        return
    yield from _array(path, content, start + 1)


def _array(path: pathlib.Path, content: str, at: int) -> Iterator[Item]:
    space, line, counted, first = re.compile(r"[ \t\r\n]*"), 1, 0, True
    while True:
        at = space.match(content, at).end()
        if content[at : at + 1] == "]" and first:
            return
        line, counted = line + content.count("\n", counted, at), at
        place = Place(str(path), line)
        try:
            value, end = strict_json.DECODER.raw_decode(content, at)
        except (ValueError, RecursionError) as error:
            raise place.fail("line", f"is not JSON ({error})") from None
        yield Item(place, value, end - at)
        at, first = space.match(content, end).end(), False
        sign = content[at : at + 1]
        if sign not in (",", "]"):
            raise place.fail("line", "no comma or bracket follows this record")
        if sign == "]":
            return
        at += 1


def record_files(path: pathlib.Path) -> list[pathlib.Path]:
    """The file itself, or every .jsonl and .json of a folder, in name order."""
    return sorted([*path.glob("*.jsonl"), *path.glob("*.json")]) if path.is_dir() else [path]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adapter:
    """One public format.

    Attributes:
      name: for ``--format``.
      coord_space: the format's usual space.
      convert: one source record to its episodes; raises AdapterError.
      files: input files below ``--in``.
      read: records of one file.
    """

    name: str
    coord_space: CoordSpace
    convert: Callable[[Item, Context], Iterator[Episode]]
    files: Callable[[pathlib.Path], list[pathlib.Path]] = record_files
    read: Callable[[pathlib.Path], Iterator[Item]] = read_items
