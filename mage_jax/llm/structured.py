"""Strict JSON out of replies: exact decoding, a small schema check, and a bounded number of second tries.

Nothing is repaired. A reply counts when its whole text is one JSON object (no fences, no remarks, no repeated keys, no
NaN) that fits the schema; otherwise the model is shown its answer and the fault, and asked again.

The schemas are a subset of JSON Schema, and a keyword outside it is an error instead of being ignored:

* ``type``: object, array, string, number, integer, boolean; ``enum`` beside it or alone;
* objects: ``properties``, ``required``, ``additionalProperties`` (true, false or a schema);
* arrays: ``items``;
* ``title`` and ``description`` anywhere.

Stricter than the standard on purpose: ``1.0`` is not an integer, and ``enum`` tells ``1`` from ``1.0`` and ``true``.
"""

from __future__ import annotations

import json
import math
import re
import threading
from collections.abc import Callable, Mapping
from typing import Any

from mage_jax.llm.client import Client, LLMError, Message, Reply, Request, canonical_json

ANNOTATIONS = ("title", "description")
KEYWORDS = {
    "object": ("properties", "required", "additionalProperties"),
    "array": ("items",),
    "string": (),
    "number": (),
    "integer": (),
    "boolean": (),
}
_PLAIN_KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


class SchemaError(LLMError, ValueError):
    """A schema uses something outside the subset; the text gives the path inside the schema."""


class InvalidJson(LLMError, ValueError):
    """A text is not the JSON object asked for.

    Attributes:
      path: where, as ``$.steps[2].name``; ``$`` for the whole text.
      reason: what is wrong there.
    """

    def __init__(self, path: str, reason: str):
        super().__init__(f"{path}: {reason}")
        self.path = path
        self.reason = reason


class StructuredError(LLMError):
    """No valid JSON after the allowed number of tries.

    Attributes:
      reply: the last one, with the usage and cost of all tries.
    """

    def __init__(self, text: str, reply: Reply):
        super().__init__(text)
        self.reply = reply


def _join(path: str, key: str) -> str:
    return f"{path}.{key}" if _PLAIN_KEY.match(key) else f"{path}[{json.dumps(key)}]"


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "boolean"
    names = {dict: "object", list: "array", str: "string", int: "integer", float: "number"}
    return names.get(type(value), type(value).__name__)


# decoding


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise InvalidJson("$", f"the key {key!r} occurs twice in one object")
        found[key] = value
    return found


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise InvalidJson("$", f"the number {text[:40]} is out of range")
    return value


def _no_constant(name: str) -> Any:
    raise InvalidJson("$", f"{name} is not JSON")


def decode_object(text: str) -> dict[str, Any]:
    """The one JSON object that ``text`` consists of; only white space may surround it.

    Raises:
      InvalidJson: anything else, with the character position where the decoder stopped.
    """
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_no_constant)
        json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate could not be written to any file
    except InvalidJson:
        raise
    except json.JSONDecodeError as error:
        raise InvalidJson("$", f"is not one JSON object ({error.msg} at character {error.pos})") from None
    except UnicodeEncodeError:
        raise InvalidJson("$", "a string holds a lone surrogate") from None
    except (ValueError, RecursionError) as error:  # an integer of thousands of digits, or a very deep nesting
        raise InvalidJson("$", f"cannot be decoded ({error})") from None
    if not isinstance(value, dict):
        raise InvalidJson("$", f"must be an object, got {_kind(value)}")
    return value


# schemas


def check_schema(schema: Any, path: str = "schema") -> None:
    """Checks that a schema stays inside the subset.

    Raises:
      SchemaError: unknown keyword or type, wrong keyword value, or a required property that is not declared.
    """
    if not isinstance(schema, Mapping):
        raise SchemaError(f"{path}: must be an object, got {_kind(schema)}")
    kind = schema.get("type")
    if kind is None and "enum" not in schema:
        raise SchemaError(f"{path}: needs type or enum")
    if kind is not None and (not isinstance(kind, str) or kind not in KEYWORDS):
        raise SchemaError(f"{path}.type: {kind!r} is not one of {', '.join(KEYWORDS)}")
    known = ("type", "enum", *ANNOTATIONS, *(KEYWORDS[kind] if kind else ()))
    for key in schema:
        if key not in known:
            raise SchemaError(f"{path}.{key}: is not supported for type {kind!r}; known: {', '.join(known)}")
    if "enum" in schema and (not isinstance(schema["enum"], list) or not schema["enum"]):
        raise SchemaError(f"{path}.enum: must be a list of at least one value")
    properties = schema.get("properties", {})
    if not isinstance(properties, Mapping):
        raise SchemaError(f"{path}.properties: must be an object, got {_kind(properties)}")
    for key, sub in properties.items():
        check_schema(sub, _join(f"{path}.properties", key))
    required = schema.get("required", [])
    if not isinstance(required, list) or not all(isinstance(key, str) for key in required):
        raise SchemaError(f"{path}.required: must be a list of strings")
    extra = schema.get("additionalProperties", True)
    if not isinstance(extra, bool):
        check_schema(extra, f"{path}.additionalProperties")
    for key in required:
        if key not in properties and extra is False:
            raise SchemaError(f"{path}.required: {key!r} is required but neither declared nor allowed")
    if "items" in schema:
        check_schema(schema["items"], f"{path}.items")


def validate(value: Any, schema: Mapping[str, Any], path: str = "$") -> None:
    """Checks a decoded value against a schema of the subset (``check_schema`` is the caller's).

    Raises:
      InvalidJson: the first fault, with its path.
    """
    kind = schema.get("type")
    actual = _kind(value)
    if kind is not None and actual != kind and not (kind == "number" and actual == "integer"):
        raise InvalidJson(path, f"must be {kind}, got {actual}")
    if actual == "number" and not math.isfinite(value):
        raise InvalidJson(path, f"must be finite, got {value}")
    if "enum" in schema:
        spelling = canonical_json(value)
        if all(spelling != canonical_json(option) for option in schema["enum"]):
            options = ", ".join(canonical_json(option) for option in schema["enum"])
            raise InvalidJson(path, f"must be one of {options}, got {spelling:.80}")
    if kind == "object":
        _validate_object(value, schema, path)
    elif kind == "array" and "items" in schema:
        for i, item in enumerate(value):
            validate(item, schema["items"], f"{path}[{i}]")


def _validate_object(value: Mapping[str, Any], schema: Mapping[str, Any], path: str) -> None:
    properties = schema.get("properties", {})
    for key in schema.get("required", ()):
        if key not in value:
            raise InvalidJson(_join(path, key), "is missing")
    extra = schema.get("additionalProperties", True)
    for key, item in value.items():
        if key in properties:
            validate(item, properties[key], _join(path, key))
        elif extra is False:
            raise InvalidJson(_join(path, key), f"is not allowed; known: {', '.join(properties) or 'none'}")
        elif extra is not True:
            validate(item, extra, _join(path, key))


# asking


class StructuredClient:
    """Fills ``Reply.parsed`` for requests with a schema; other requests pass through.

    An invalid reply is followed by the same conversation, the reply and its fault. The follow-up has its own key, so
    cassettes hold both. A reply cut at ``max_tokens`` is not asked for again: it would be cut again.

    Attributes:
      asked, reasked, failed: requests with a schema, extra calls for them, and requests given up.
    """

    def __init__(self, inner: Client, *, max_reasks: int = 2):
        if max_reasks < 0:
            raise ValueError(f"StructuredClient.max_reasks: must not be negative, got {max_reasks}")
        self._inner = inner
        self._max_reasks = max_reasks
        self._lock = threading.Lock()
        self.asked = self.reasked = self.failed = 0

    def complete(self, request: Request) -> Reply:
        """``ask`` without a further check."""
        return self.ask(request)

    def ask(self, request: Request, check: Callable[[dict[str, Any]], None] | None = None) -> Reply:
        """Asks until the answer is valid.

        Args:
          request: with a schema whose top is an object.
          check: called with the decoded object; raises ``InvalidJson`` for what a schema cannot say.

        Returns:
          The valid reply; ``usage``, ``cost_usd`` and ``attempts`` cover all tries.

        Raises:
          SchemaError: the request's schema is outside the subset.
          StructuredError: no valid answer within ``1 + max_reasks`` calls, or one cut short or filtered.
        """
        if request.schema is None:
            if check is not None:
                raise SchemaError("schema: a check needs a request with a schema")
            return self._inner.complete(request)
        check_schema(request.schema)
        self._count("asked")
        total: Reply | None = None
        messages = request.messages
        for attempt in range(1, self._max_reasks + 2):
            if attempt > 1:
                self._count("reasked")
            reply = self._inner.complete(request.replace(messages=messages))
            total = reply if total is None else _total(total, reply)
            if reply.finish_reason != "stop":
                fix = "raise max_tokens" if reply.finish_reason == "length" else "change the prompt"
                self._give_up(request, f"the reply ended with {reply.finish_reason!r}; {fix}", total)
            try:
                value = decode_object(reply.text)
                validate(value, request.schema)
                if check is not None:
                    check(value)
            except InvalidJson as error:
                fault = error
            else:
                return total.replace(parsed=value)
            messages = (*request.messages, *_follow_up(reply.text, fault))
        assert total is not None
        self._give_up(request, f"no valid JSON after {total.attempts} calls; the last fault: {fault}", total)
        raise AssertionError("unreachable")

    def _count(self, name: str) -> None:
        with self._lock:
            setattr(self, name, getattr(self, name) + 1)

    def _give_up(self, request: Request, reason: str, reply: Reply) -> None:
        self._count("failed")
        raise StructuredError(f"{request.purpose} ({request.model}): {reason}", reply)


def _follow_up(text: str, fault: InvalidJson) -> tuple[Message, ...]:
    # Only the newest answer is shown: a growing list of faults costs tokens and invites the same ones.
    ask = (
        f"That is not valid: {fault}. Answer again with exactly one JSON object that fits the schema, "
        "without a code fence and without any other text."
    )
    answer = (Message("assistant", text),) if text else ()
    return (*answer, Message("user", ask))


def _total(before: Reply, now: Reply) -> Reply:
    costs = (before.cost_usd, now.cost_usd)
    return now.replace(
        usage=before.usage + now.usage,
        cost_usd=None if None in costs else sum(c for c in costs if c is not None),
        attempts=before.attempts + now.attempts,
        replayed=before.replayed and now.replayed,
    )
