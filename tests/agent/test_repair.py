"""Repairs: each kind, what is refused all the same, and that strict parsing is untouched."""

import pytest

from mage_jax.agent import errors
from mage_jax.agent.parser import parse
from mage_jax.agent.repair import Repair, count, parse_with_repairs

HEAD = "<think>\nx\n</think>\nAction: Go.\n"


def bash(command_json):
    return f'<tool_call>\n{{"name": "bash", "arguments": {{"command": "{command_json}"}}}}\n</tool_call>'


def gui(arguments):
    return f'<tool_call>\n{{"name": "computer_use", "arguments": {arguments}}}\n</tool_call>'


def test_a_valid_turn_needs_none():
    text = HEAD + bash("ls")
    repaired = parse_with_repairs(text)
    assert repaired.repairs == () and repaired.turn == parse(text)


@pytest.mark.parametrize(
    ("text", "kinds", "check"),
    [
        ("x\n</think>\nAction: Go.\n" + bash("ls"), {"missing_think_open": 1}, lambda t: t.think == "x"),
        (
            "<think>\nx\n</think>\ny\n</think>\nAction: Go.\n" + bash("ls"),
            {"extra_think_close": 1},
            lambda t: t.think == "x\n</think>\ny",
        ),
        (HEAD + bash("cat <<E\na\tb\nE\n"), {"raw_control": 4}, lambda t: t.calls[0].command == "cat <<E\na\tb\nE\n"),
        (
            HEAD + bash(r"grep '\d\n' C:\xa \u12"),
            {"bad_escape": 3},
            lambda t: t.calls[0].command == "grep '\\d\n' C:\\xa \\u12",
        ),
        (HEAD + bash("echo </tool_call>\n"), {"raw_control": 1}, lambda t: t.calls[0].command == "echo </tool_call>\n"),
        (HEAD + bash("ls").replace("}}\n", "}\n"), {"missing_brace": 1}, lambda t: t.calls[0].command == "ls"),
        (HEAD + bash("a\nb").replace("}}\n", "} "), {"raw_control": 1, "missing_brace": 1}, lambda t: True),
        (HEAD + gui('{"action": "terminate"}'), {"absent_status": 1}, lambda t: t.calls[0].status == "success"),
        (
            HEAD + gui('{"action": "keypress", "keys": "ctrl+c"}'),
            {"keys_string": 1},
            lambda t: t.calls[0].key_names == ("ctrl", "c"),
        ),
        (
            HEAD + bash("a\nb") + bash("c") + bash(r"\d"),
            {"raw_control": 1, "bad_escape": 1},
            lambda t: len(t.calls) == 3,
        ),
    ],
)
def test_each_kind_is_counted_and_keeps_the_raw_text(text, kinds, check):
    with pytest.raises(errors.ProtocolError):
        parse(text)
    repaired = parse_with_repairs(text)
    assert count(repaired.repairs) == kinds
    assert repaired.turn.raw == text
    assert check(repaired.turn)


def test_positions_are_in_the_raw_text():
    text = HEAD + bash("a\nb\\d")
    newline, escape = parse_with_repairs(text).repairs
    assert newline == Repair("raw_control", text.index("a\nb") + 1)
    assert escape == Repair("bad_escape", text.index("\\d"))


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Action: Go.\n" + bash("ls"), errors.MissingThink),
        ("<think>\nx\nAction: Go.\n" + bash("ls"), errors.UnclosedThink),
        ("x\n</think>\n" + bash("ls"), errors.MissingAction),
        (HEAD, errors.NoCall),
        (HEAD + bash("ls")[:-20], errors.UnclosedCall),  # cut: no brace and no quote is added
        (HEAD + '<tool_call>\n{"name": "bash", "arguments": {"command": "ls\n</tool_call>', errors.BadJson),
        (HEAD + bash("ls").replace("}}\n", "\n"), errors.BadJson),  # two braces missing
        (HEAD + bash("ls").replace("}}\n", "]}\n"), errors.BadJson),
        (HEAD + bash("a\nb").replace("}}\n", "}},\n"), errors.BadJson),
        (HEAD + gui('{"action": "terminate", "status": null}'), errors.ArgumentType),
        (HEAD + gui('{"action": "click", "coordinate": [1500, 3]}'), errors.ArgumentRange),
        (HEAD + gui('{"action": "type"}'), errors.MissingArgument),
        (HEAD + bash("a\nb") + gui('{"action": "screenshot"}'), errors.MixedFunctions),
        (HEAD + bash("ls") + "done", errors.TextAfterLastCall),
        (HEAD + bash("ls") * 16, errors.TooManyCalls),
        (HEAD + bash("\ud800"), errors.BadText),
    ],
)
def test_what_stays_refused(text, fault):
    with pytest.raises(errors.ProtocolError) as caught:
        parse_with_repairs(text)
    assert type(caught.value) is fault
