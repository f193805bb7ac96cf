"""Frozen dataclasses to JSON and back, where the annotation is the schema and nothing is forgiven.

A field that is missing, unknown, of another type, not finite or not encodable as UTF-8 is an error that names its
dotted path (``turns[2].sampled.gen_logp[7]``). Understood annotations: str, int, float (a JSON integer is accepted),
bool, ``X | None``, Literal, ``tuple[X, ...]``, ``tuple[X, Y]``, ``Mapping[str, X]``, Any (any JSON) and dataclasses of
these. Defaults are for code that builds structs; in a file every field must stand.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

Fail = Callable[[str, str], Exception]  # (dotted field, reason) -> the error to raise


class _Refused(ValueError):
    """JSON that Python reads and this project does not; the text is the reason."""


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        raise _Refused(f"field {next(n for n in names if names.count(n) > 1)!r:.80} stands twice in one object")
    return found


def _constant(name: str) -> Any:
    raise _Refused(f"{name} is not a JSON number")


DECODER = json.JSONDecoder(object_pairs_hook=_pairs, parse_constant=_constant)


def loads(raw: bytes | str, *, fail: Fail) -> Any:
    """JSON text to Python values.

    Raises:
      what ``fail`` makes: an empty line, text that is not UTF-8 or not JSON, NaN or Infinity, a field given twice.
    """
    try:
        text = raw.decode("utf-8") if isinstance(raw, bytes) else raw
        if text.strip():
            return DECODER.decode(text.strip(" \t\r\n"))
    except (ValueError, RecursionError) as error:
        raise fail("line", f"is not JSON ({error})") from error
    raise fail("line", "is empty; delete it")


def dumps(value: Any, *, sort_keys: bool = False) -> str:
    """One line of compact JSON; refuses NaN and Infinity."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "), sort_keys=sort_keys)


def encode(value: Any) -> Any:
    """A struct to plain dicts and lists, every field written."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return list(value) if all(type(v) in (int, float, str) for v in value) else [encode(v) for v in value]
    return value


def decode(kind: Any, value: Any, *, fail: Fail, field: str = "") -> Any:
    """Plain JSON values to ``kind``, checked all the way down.

    Raises:
      what ``fail`` makes, with the dotted field and the reason.
    """
    if dataclasses.is_dataclass(kind):
        return _struct(kind, value, field, fail)
    if kind is Any:
        _check_json(value, field, fail)
        return value
    if kind in (str, int, float, bool):
        return _scalar(kind, value, field, fail)
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin in (Union, types.UnionType):
        if value is None:
            return None
        (inner,) = [arg for arg in args if arg is not type(None)]
        return decode(inner, value, fail=fail, field=field)
    if origin is Literal:
        if type(value) is not type(args[0]) or value not in args:
            raise fail(field, f"must be one of {', '.join(map(str, args))}, got {value!r:.80}")
        return value
    if origin is tuple:
        return _tuple(args, value, field, fail)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            raise fail(field, f"must be an object, got {_name(value)}")
        for key in value:
            _scalar(str, key, f"{field}.{key!r:.80}", fail)
        return {key: decode(args[1], item, fail=fail, field=f"{field}.{key}") for key, item in value.items()}
    raise TypeError(f"{field}: annotation {kind} is not supported")


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return {field.name: typing.get_type_hints(kind)[field.name] for field in dataclasses.fields(kind)}


def _struct(kind: Any, value: Any, field: str, fail: Fail) -> Any:
    if not isinstance(value, dict):
        raise fail(field or "line", f"must be an object, got {_name(value)}")
    hints, prefix = _hints(kind), f"{field}." if field else ""
    for name in value:
        if name not in hints:
            raise fail(f"{prefix}{name}"[:200], f"unknown field; {kind.__name__} has {', '.join(hints)}")
    for name in hints:
        if name not in value:
            raise fail(f"{prefix}{name}", "is missing; every field must be written")
    return kind(**{n: decode(hint, value[n], fail=fail, field=f"{prefix}{n}") for n, hint in hints.items()})


def _scalar(kind: type, value: Any, field: str, fail: Fail) -> Any:
    if kind is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            raise fail(field, "is too large for a float") from None
    if type(value) is not kind:  # a bool is not an integer here
        raise fail(field, f"must be {kind.__name__}, got {_name(value)}")
    if kind is float and not math.isfinite(value):
        raise fail(field, f"must be finite, got {value}")
    if kind is str:
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise fail(field, f"holds a lone surrogate at character {error.start}") from None
    return value


def _tuple(args: tuple[Any, ...], value: Any, field: str, fail: Fail) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise fail(field, f"must be a list, got {_name(value)}")
    if len(args) == 2 and args[1] is Ellipsis:
        if args[0] is int and all(type(item) is int for item in value):  # token ids: hundreds of thousands an episode
            return tuple(value)
        kinds = [args[0]] * len(value)
    else:
        kinds = list(args)
        if len(value) != len(kinds):
            raise fail(field, f"must have {len(kinds)} items, got {len(value)}")
    items = zip(kinds, value, strict=True)
    return tuple(decode(kind, item, fail=fail, field=f"{field}[{i}]") for i, (kind, item) in enumerate(items))


def _check_json(value: Any, field: str, fail: Fail) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            _scalar(str, key, f"{field}.{key!r:.80}", fail)
            _check_json(item, f"{field}.{key}", fail)
    elif isinstance(value, (list, tuple)):
        for i, item in enumerate(value):
            _check_json(item, f"{field}[{i}]", fail)
    elif type(value) in (str, int, float, bool):
        _scalar(type(value), value, field, fail)
    elif value is not None:
        raise fail(field, f"is not JSON: {_name(value)}")


def _name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
