"""JSON as a call must hold it: no duplicate keys, no NaN, and its end found by decoding, never by a closing tag."""

from __future__ import annotations

import json
import re
from typing import Any

_JSON_SPACE = re.compile(r"[ \t\n\r]*")


class JsonError(ValueError):
    """Text that is not JSON, or not ours; ``position`` is the character offset of the fault."""

    def __init__(self, message: str, position: int):
        super().__init__(message)
        self.position = position


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    contents = dict(pairs)
    if len(contents) != len(pairs):  # the last would win without a word
        raise ValueError("an object holds a key twice")
    return contents


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_constant=_no_constant)


def skip_space(text: str, position: int) -> int:
    """The first position from ``position`` on that is not JSON's whitespace (four ASCII characters)."""
    return _JSON_SPACE.match(text, position).end()


def decode(text: str, position: int) -> tuple[Any, int]:
    """The JSON value that starts at ``position`` (after whitespace), and where it ends.

    Raises:
      JsonError: no value, a duplicate key, NaN or Infinity, a number with thousands of digits, too deep a nesting.
    """
    start = skip_space(text, position)
    try:
        return _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise JsonError(error.msg, error.pos) from None
    except RecursionError:
        raise JsonError("nested too deeply", start) from None
    except ValueError as error:
        raise JsonError(str(error), start) from None


def find_object_end(text: str, position: int) -> int | None:
    """Where the JSON value that starts at ``position`` ends; None if there is no valid one."""
    try:
        return decode(text, position)[1]
    except JsonError:
        return None
