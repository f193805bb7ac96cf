"""Which characters of an assistant's text are thought, action and call: lexical, for any text, valid or not.

Loss weights need an answer for every text (grounding answers, responses cut by the token limit), so this never fails;
``parser`` decides what is valid. The delimiters are single tokens of Qwen's vocabulary.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Literal

from mage_jax.agent.strict_json import find_object_end

TextKind = Literal["think_open", "think_body", "think_close", "action", "tool_call", "other"]
THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
ACTION = "Action:"
# A line, so that "Action:" inside a sentence is none.
_ACTION_LINE = re.compile(r"^Action:", re.MULTILINE)
_SPACE = re.compile(r"\s*")


def skip_space(text: str, position: int) -> int:
    """The first position from ``position`` on that is not whitespace."""
    return _SPACE.match(text, position).end()


@dataclasses.dataclass(frozen=True)
class TextSpan:
    """Characters ``start`` (included) to ``end`` (excluded) of one kind.

    Kinds: "think_open" and "think_close" (the two tags), "think_body" (all between them, its newlines included),
    "action" (the Action line with its newline), "tool_call" (one block, tags included), "other" (what is left: seams
    between parts, text outside the grammar).
    """

    kind: TextKind
    start: int
    end: int


def split_text(text: str) -> tuple[TextSpan, ...]:
    """Spans that tile ``text`` in order, none empty. Time is linear in its length.

    A thought whose closing tag is missing reaches to the end; one whose opening tag is missing begins at the start. A
    block ends at the tag after its JSON value, so that a ``</tool_call>`` in a string does not end it; if its JSON
    is broken, at the next closing tag; without one, at the end.
    """
    marks: list[tuple[TextKind, int, int]] = []  # (kind, start, end) of the parts, in order; gaps are "other"
    position = _mark_thought(text, marks)
    position = _mark_action(text, position, marks)
    _mark_calls(text, position, marks)

    spans: list[TextSpan] = []
    position = 0
    for kind, start, end in [*marks, ("other", len(text), len(text))]:
        if start > position:
            spans.append(TextSpan("other", position, start))
        if end > start:
            spans.append(TextSpan(kind, start, end))
        position = end
    return tuple(spans)


def _head_end(text: str, position: int) -> int:
    """Where the first block after ``position`` opens; thought and action stand before it."""
    call = text.find(CALL_OPEN, position)
    return len(text) if call < 0 else call


def _mark_thought(text: str, marks: list[tuple[TextKind, int, int]]) -> int:
    start = skip_space(text, 0)
    if text.startswith(THINK_OPEN, start):
        body = start + len(THINK_OPEN)
        marks.append(("think_open", start, body))
        close = text.find(THINK_CLOSE, body)
    else:
        body = 0
        head_end = _head_end(text, 0)
        action = _ACTION_LINE.search(text, 0, head_end)
        close = text.find(THINK_CLOSE, 0, action.start() if action else head_end)
        if close < 0:
            return 0
    if close < 0:
        marks.append(("think_body", body, len(text)))
        return len(text)
    end = close + len(THINK_CLOSE)
    marks += [("think_body", body, close), ("think_close", close, end)]
    return end


def _mark_action(text: str, position: int, marks: list[tuple[TextKind, int, int]]) -> int:
    head_end = _head_end(text, position)
    start = skip_space(text, position)
    if not text.startswith(ACTION, start, head_end):
        line = _ACTION_LINE.search(text, position, head_end)
        if line is None:
            return position
        start = line.start()
    newline = text.find("\n", start, head_end)
    end = head_end if newline < 0 else newline + 1
    marks.append(("action", start, end))
    return end


def _mark_calls(text: str, position: int, marks: list[tuple[TextKind, int, int]]) -> None:
    decode = True  # after one broken block only tags count: a second search to the end would cost quadratic time
    while (start := text.find(CALL_OPEN, position)) >= 0:
        inside = start + len(CALL_OPEN)
        value_end = find_object_end(text, inside) if decode else None
        close = -1 if value_end is None else skip_space(text, value_end)
        if close < 0 or not text.startswith(CALL_CLOSE, close):
            decode = False
            close = text.find(CALL_CLOSE, inside)
        position = len(text) if close < 0 else close + len(CALL_CLOSE)
        marks.append(("tool_call", start, position))
