"""Spans of an assistant's text, valid or not."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.agent.calls import turn_text
from mage_jax.agent.parser import parse
from mage_jax.agent.spans import split_text
from tests.agent import strategies

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "echo </tool_call>"}}\n</tool_call>'
BROKEN = '<tool_call>\n{"name": "bash", "arg </tool_call>'


def pieces(text):
    return [(s.kind, text[s.start : s.end]) for s in split_text(text)]


@given(strategies.TURNS)
def test_spans_of_a_valid_turn(parts):
    text = turn_text(**parts)
    spans = parse(text).spans
    assert "".join(text[s.start : s.end] for s in spans) == text
    calls = len(parts["calls"])
    expected = ["think_open", "think_body", "think_close", "other", "action"] + ["tool_call", "other"] * calls
    assert [s.kind for s in spans] == expected[:-1]
    assert text[spans[1].start : spans[1].end] == f"\n{parts['think']}\n"
    assert text[spans[4].start : spans[4].end] == f"Action: {parts['action']}\n"


@given(
    st.lists(st.sampled_from(["<think>", "</think>", "\nAction: ", "Action:", CALL, BROKEN, " ", "x", "\n"])).map(
        "".join
    )
)
def test_spans_tile_any_text(text):
    spans = split_text(text)
    assert "".join(text[s.start : s.end] for s in spans) == text
    assert all(s.start < s.end for s in spans)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", []),
        ("(512, 300)", [("other", "(512, 300)")]),
        ("<think>\ncut", [("think_open", "<think>"), ("think_body", "\ncut")]),
        ("no tag\n</think>x", [("think_body", "no tag\n"), ("think_close", "</think>"), ("other", "x")]),
        (f"Action: Go.\n{CALL}", [("action", "Action: Go.\n"), ("tool_call", CALL)]),
        (
            f"Well.\nAction: Go.\n{CALL}.",
            [("other", "Well.\n"), ("action", "Action: Go.\n"), ("tool_call", CALL), ("other", ".")],
        ),
        ("An Action: none", [("other", "An Action: none")]),
        (f"{BROKEN}a{BROKEN}", [("tool_call", BROKEN), ("other", "a"), ("tool_call", BROKEN)]),
        ("Action: Go.<tool_call>{", [("action", "Action: Go."), ("tool_call", "<tool_call>{")]),
        (f"Action: Go.\n{CALL}</think>", [("action", "Action: Go.\n"), ("tool_call", CALL), ("other", "</think>")]),
        (
            "<think>x</think>  Action: Go.",
            [
                ("think_open", "<think>"),
                ("think_body", "x"),
                ("think_close", "</think>"),
                ("other", "  "),
                ("action", "Action: Go."),
            ],
        ),
    ],
)
def test_spans_of_other_texts(text, expected):
    assert pieces(text) == expected
