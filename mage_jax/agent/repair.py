"""Counted repairs for evaluation: what a lenient reader would still execute, with every leniency named.

Off unless called for. Training and RL use ``parser.parse``: a reward must see the response that was written. A response
that cannot be repaired raises the same ``ProtocolError`` as the strict parser; nothing of it is executed. In
particular a cut response stays broken, since what was cut is unknown.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import re
from collections.abc import Iterable
from typing import Any, Literal

from mage_jax.agent import errors, spans, strict_json
from mage_jax.agent.calls import check_text
from mage_jax.agent.parser import Turn, parse, parse_after_think
from mage_jax.agent.spans import CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN

RepairKind = Literal[
    "missing_think_open",
    "extra_think_close",
    "raw_control",
    "bad_escape",
    "missing_brace",
    "absent_status",
    "keys_string",
]


@dataclasses.dataclass(frozen=True)
class Repair:
    """One thing that was repaired.

    Kinds:
      missing_think_open: the body begins at the start.
      extra_think_close: the last one before the first call counts.
      raw_control: a raw newline or other control character in a JSON string.
      bad_escape: such as ``\\d`` or ``C:\\x`` in a JSON string; the backslash is meant.
      missing_brace: the last one of a block.
      absent_status: terminate without status is success.
      keys_string: keypress with "ctrl+c" where a list belongs.

    ``position`` is the character offset in the raw response.
    """

    kind: RepairKind
    position: int


@dataclasses.dataclass(frozen=True)
class Repaired:
    """A turn and the repairs that it took, in reading order; none if it is valid as it stands."""

    turn: Turn
    repairs: tuple[Repair, ...]


def parse_with_repairs(text: str) -> Repaired:
    """Strict first, then with repairs. ``turn.raw`` is the response as it came.

    Raises:
      ProtocolError: beyond repair; the fault that remains.
    """
    try:
        return Repaired(parse(text), ())
    except errors.ProtocolError:
        pass
    check_text(text)
    repairs: list[Repair] = []
    body, close = _find_thought(text, repairs)

    def decode(text: str, position: int) -> tuple[Any, int]:
        try:
            return strict_json.decode(text, position)
        except strict_json.JsonError:
            return _decode_leniently(text, position, repairs)

    turn = parse_after_think(
        text, body=body, close=close, decode=decode, amend=lambda value, position: _amend(value, position, repairs)
    )
    return Repaired(turn, tuple(repairs))


def count(repairs: Iterable[Repair]) -> dict[str, int]:
    """Number of repairs of each kind that occurs, for metrics."""
    return dict(collections.Counter(repair.kind for repair in repairs))


def _find_thought(text: str, repairs: list[Repair]) -> tuple[int, int]:
    start = spans.skip_space(text, 0)
    opened = text.startswith(THINK_OPEN, start)
    body = start + len(THINK_OPEN) if opened else start
    first_call = text.find(CALL_OPEN)
    head_end = len(text) if first_call < 0 else first_call
    first, last = text.find(THINK_CLOSE, body, head_end), text.rfind(THINK_CLOSE, body, head_end)
    if first < 0:  # a call written about in the thought: the strict rule
        first = last = text.find(THINK_CLOSE, body) if opened else -1
    if first < 0:
        fault = errors.UnclosedThink if opened else errors.MissingThink
        raise fault("no thought before the first call", position=start)
    if not opened:
        repairs.append(Repair("missing_think_open", start))
    if last != first:
        repairs.append(Repair("extra_think_close", first))
    return body, last


# What matters when strings and brackets are followed; everything between matches is copied.
_MARKS = re.compile(r'["{}\[\]\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4})?|</tool_call>')
_PAIRS = {"}": "{", "]": "["}


def _decode_leniently(text: str, position: int, repairs: list[Repair]) -> tuple[Any, int]:
    """As ``strict_json.decode``, of text mended while its strings and brackets are followed; one forward pass."""
    start = strict_json.skip_space(text, position)
    if not text.startswith("{", start):
        raise strict_json.JsonError("a call is a JSON object", start)
    mended: list[str] = []
    made: list[Repair] = []
    opened: list[str] = []
    in_string = False
    copied = start
    end = -1
    for match in _MARKS.finditer(text, start):
        mark, at = match.group(), match.start()
        if in_string:
            if mark == '"':
                in_string = False
            elif mark < " ":
                mended += [text[copied:at], json.dumps(mark)[1:-1]]
                copied = match.end()
                made.append(Repair("raw_control", at))
            elif mark == "\\":
                mended += [text[copied:at], "\\\\"]
                copied = match.end()
                made.append(Repair("bad_escape", at))
        elif mark == '"':
            in_string = True
        elif mark in "{[":
            opened.append(mark)
        elif mark in _PAIRS:
            if opened.pop() != _PAIRS[mark]:
                raise strict_json.JsonError(f"{mark} closes nothing", at)
            if not opened:
                end = match.end()
                break
        elif mark == CALL_CLOSE:
            # Only the last brace: with more missing, what belongs to which object would be a guess.
            if opened != ["{"]:
                raise strict_json.JsonError("an object ends too early", at)
            mended += [text[copied:at].rstrip(), "}"]
            copied = end = at
            made.append(Repair("missing_brace", at))
            break
    if end < 0:
        raise strict_json.JsonError("the object never ends", start)
    mended.append(text[copied:end])
    value, _ = strict_json.decode("".join(mended), 0)
    repairs += made
    return value, end


def _amend(value: Any, position: int, repairs: list[Repair]) -> Any:
    if (
        not isinstance(value, dict)
        or value.get("name") != "computer_use"
        or not isinstance(value.get("arguments"), dict)
    ):
        return value
    arguments = dict(value["arguments"])
    if arguments.get("action") == "terminate" and "status" not in arguments:
        arguments["status"] = "success"  # as the public harnesses read it
        repairs.append(Repair("absent_status", position))
    if arguments.get("action") == "keypress" and isinstance(arguments.get("keys"), str):
        arguments["keys"] = [arguments["keys"]]
        repairs.append(Repair("keys_string", position))
    return {**value, "arguments": arguments}
