"""The strict parser: a response is one whole valid ``Turn``, or a ``ProtocolError`` that names the fault.

Grammar (whitespace between parts is free, the canonical form has the newlines of ``calls.turn_text``)::

    <think> body </think>
    Action: sentence, to the end of the line
    <tool_call> {"name": ..., "arguments": {...}} </tool_call>     1 to 15 times, one function

Linear in the length of the text: every part is found by a search that only moves forward.
"""

from __future__ import annotations

import dataclasses
import functools
import reprlib
from collections.abc import Callable
from typing import Any

from mage_jax.agent import errors, spans, strict_json
from mage_jax.agent.calls import MAX_CALLS, ToolCall, check_action, check_text
from mage_jax.agent.spans import ACTION, CALL_CLOSE, CALL_OPEN, THINK_CLOSE, THINK_OPEN, TextSpan, skip_space

# (text, position) -> (JSON value, where it ends); raises strict_json.JsonError.
Decode = Callable[[str, int], tuple[Any, int]]
# Parsed JSON of a call -> the value to validate.
Amend = Callable[[Any, int], Any]


@dataclasses.dataclass(frozen=True)
class Turn:
    """One valid response.

    Attributes:
      think: body of the thought, without the newline beside each tag.
      action: sentence of the Action line, without "Action:" and surrounding space.
      calls: 1 to 15 valid calls of one function.
      raw: the response as it came. Training uses this, never a text made from the other fields.
      spans: tile ``raw``; see ``spans.split_text``.
    """

    think: str
    action: str
    calls: tuple[ToolCall, ...]
    raw: str

    @property
    def channel(self) -> str:
        """The function that all calls use: "computer_use" or "bash"."""
        return self.calls[0].name

    @functools.cached_property
    def spans(self) -> tuple[TextSpan, ...]:
        return spans.split_text(self.raw)


def parse(text: str) -> Turn:
    """Parses a response: the text that the model wrote, without ``<|im_end|>``.

    Raises:
      ProtocolError: the subclass for the first fault, in reading order.
    """
    check_text(text)
    start = skip_space(text, 0)
    if not text.startswith(THINK_OPEN, start):
        raise errors.MissingThink(f"a response opens with <think>, got {text[start : start + 20]!r}", position=start)
    body = start + len(THINK_OPEN)
    close = text.find(THINK_CLOSE, body)
    if close < 0:
        raise errors.UnclosedThink("<think> is never closed", position=start)
    return parse_after_think(text, body=body, close=close)


def parse_after_think(
    text: str,
    *,
    body: int,
    close: int,
    decode: Decode = strict_json.decode,
    amend: Amend = lambda value, position: value,
) -> Turn:
    """The rest of ``parse``, given where the thought's body starts and where its closing tag stands.

    ``decode`` and ``amend`` are where ``repair`` comes in; without them nothing is repaired.
    """
    think = text[body:close].removeprefix("\n").removesuffix("\n")
    action, position = _parse_action(text, close + len(THINK_CLOSE))
    calls: list[ToolCall] = []
    while True:
        position = skip_space(text, position)
        if position == len(text):
            break
        if not text.startswith(CALL_OPEN, position):
            if calls:
                raise errors.TextAfterLastCall(f"{text[position : position + 20]!r} after a call", position=position)
            if text.find(CALL_OPEN, position) < 0:
                raise errors.NoCall("no <tool_call> after the Action line", position=position)
            raise errors.UnexpectedText(
                f"{text[position : position + 20]!r} between the Action line and the first call", position=position
            )
        if len(calls) == MAX_CALLS:
            raise errors.TooManyCalls(f"more than {MAX_CALLS} calls in one response", position=position)
        call, position = _parse_block(text, position, index=len(calls), decode=decode, amend=amend)
        if calls and call.name != calls[0].name:
            raise errors.MixedFunctions(f"{call.name} after {calls[0].name} in one response", call=len(calls))
        calls.append(call)
    if not calls:
        raise errors.NoCall("no <tool_call> after the Action line", position=position)
    return Turn(think=think, action=action, calls=tuple(calls), raw=text)


def _parse_action(text: str, position: int) -> tuple[str, int]:
    start = skip_space(text, position)
    if not text.startswith(ACTION, start):
        if text.find(ACTION, start) < 0 or text.startswith(CALL_OPEN, start):
            raise errors.MissingAction("no Action line after the thought", position=start)
        raise errors.UnexpectedText(
            f"{text[start : start + 20]!r} between the thought and the Action line", position=start
        )
    newline = text.find("\n", start)
    end = len(text) if newline < 0 else newline
    action = text[start + len(ACTION) : end].strip()
    try:
        check_action(action)
    except errors.ProtocolError as error:
        error.position = start
        raise
    return action, end


def _parse_block(text: str, start: int, *, index: int, decode: Decode, amend: Amend) -> tuple[ToolCall, int]:
    """The call whose ``<tool_call>`` stands at ``start``, and where its block ends."""
    inside = start + len(CALL_OPEN)
    try:
        value, end = decode(text, inside)
    except strict_json.JsonError as error:
        if text.find(CALL_CLOSE, inside) < 0:
            raise errors.UnclosedCall("<tool_call> is never closed", call=index, position=start) from None
        raise errors.BadJson(str(error), call=index, position=error.position) from None
    close = skip_space(text, end)
    if not text.startswith(CALL_CLOSE, close):
        if text.find(CALL_CLOSE, close) < 0:
            raise errors.UnclosedCall("<tool_call> is never closed", call=index, position=start)
        raise errors.BadJson(f"{text[close : close + 20]!r} after the JSON value", call=index, position=close)
    try:
        value = amend(value, start)
        if not isinstance(value, dict) or set(value) != {"name", "arguments"}:
            raise errors.BadCall(f'a call is {{"name": ..., "arguments": ...}}, got {reprlib.repr(value)}')
        call = ToolCall.from_arguments(value["name"], value["arguments"])
    except errors.ProtocolError as error:
        error.call, error.position = index, start
        raise
    return call, close + len(CALL_CLOSE)
