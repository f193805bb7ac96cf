"""The strict parser: round trip, every fault, strings that try to end a block early."""

import pickle
import time

import pytest
from hypothesis import given

from mage_jax.agent import errors
from mage_jax.agent.calls import ToolCall, turn_text
from mage_jax.agent.parser import parse
from tests.agent import strategies

HEAD = "<think>\nI see it.\n</think>\nAction: Look.\n"
SHOT = '<tool_call>\n{"name": "computer_use", "arguments": {"action": "screenshot"}}\n</tool_call>'
LIST = '<tool_call>\n{"name": "bash", "arguments": {"command": "ls"}}\n</tool_call>'


def block(contents):
    return f"{HEAD}<tool_call>\n{contents}\n</tool_call>"


@given(strategies.TURNS)
def test_parse_inverts_turn_text(parts):
    text = turn_text(**parts)
    turn = parse(text)
    assert {"think": turn.think, "action": turn.action, "calls": turn.calls} == parts
    assert turn.raw == text
    assert turn.channel == parts["calls"][0].name
    assert turn_text(think=turn.think, action=turn.action, calls=turn.calls) == text


def test_whitespace_between_parts_is_free_and_raw_is_kept():
    text = (
        "\n<think>I see.</think>\n\nAction:Look. \r\n\n"
        '<tool_call>{"arguments": {"command": "ls"},\n "name": "bash"}</tool_call>  '
        f"{LIST}\n"
    )
    turn = parse(text)
    assert (turn.think, turn.action, len(turn.calls)) == ("I see.", "Look.", 2)
    assert turn.raw == text


def test_fifteen_calls_are_allowed():
    assert len(parse(HEAD + "\n".join([LIST] * 15)).calls) == 15


def test_a_closing_tag_in_a_string_ends_nothing():
    command = 'echo "</tool_call>" </think> <tool_call>\n{"name": "bash"}\n</tool_call>'
    turn = parse(turn_text(think="<tool_call> is a tag", action="Go.", calls=[ToolCall(name="bash", command=command)]))
    assert turn.calls[0].command == command


@pytest.mark.parametrize(
    ("text", "fault", "call"),
    [
        ("", errors.MissingThink, None),
        ("done", errors.MissingThink, None),
        (f"Action: Look.\n{SHOT}", errors.MissingThink, None),
        (f"I see it.\n</think>\nAction: Look.\n{SHOT}", errors.MissingThink, None),
        ("<think>\nI see", errors.UnclosedThink, None),
        (f"<think>\nI see\nAction: Look.\n{SHOT}", errors.UnclosedThink, None),
        (f"<think>\nI see it.\n</think>\n{SHOT}", errors.MissingAction, None),
        ("<think>\nI see it.\n</think>", errors.MissingAction, None),
        (f"<think>\nx\n</think>\nAction: \n{SHOT}", errors.MissingAction, None),
        (f"<think>\nx\n</think>\nSo:\nAction: Look.\n{SHOT}", errors.UnexpectedText, None),
        (f"<think>\nx\n</think>\ny</think>\nAction: Look.\n{SHOT}", errors.UnexpectedText, None),
        (f"<think>\nx\n</think>\nAction: Look. {SHOT}", errors.BadAction, None),
        (f"{HEAD}Now:\n{SHOT}", errors.UnexpectedText, None),
        (HEAD, errors.NoCall, None),
        (f"{HEAD}```json\n{{}}\n```", errors.NoCall, None),
        (f"{HEAD}{SHOT}\nDone.", errors.TextAfterLastCall, None),
        (f"{HEAD}{SHOT}<|im_end|>", errors.TextAfterLastCall, None),
        (f"{HEAD}{SHOT}\nand\n{SHOT}", errors.TextAfterLastCall, None),
        (HEAD + SHOT * 16, errors.TooManyCalls, None),
        (f"{HEAD}{SHOT}\n{LIST}", errors.MixedFunctions, 1),
        (f"{HEAD}<tool_call>\n", errors.UnclosedCall, 0),
        (f'{HEAD}<tool_call>\n{{"name": "bash", "arg', errors.UnclosedCall, 0),
        (f'{HEAD}{LIST}\n<tool_call>\n{{"name": "bash", "arguments": {{"command": "ls"}}}}', errors.UnclosedCall, 1),
        (block(""), errors.BadJson, 0),
        (block('{"name": "bash", "arguments": {"command": "ls"}'), errors.BadJson, 0),
        (block('{"name": "bash", "arguments": {"command": "ls"}}}'), errors.BadJson, 0),
        (block('{"name": "bash", "arguments": {"command": "ls"}} {"name": "bash"}'), errors.BadJson, 0),
        (block('{"name": "bash", "arguments": {"command": "a\nb"}}'), errors.BadJson, 0),
        (block(r'{"name": "bash", "arguments": {"command": "grep \d"}}'), errors.BadJson, 0),
        (block("{'name': 'bash', 'arguments': {'command': 'ls'}}"), errors.BadJson, 0),
        (block('{"name": "bash", "name": "bash", "arguments": {"command": "ls"}}'), errors.BadJson, 0),
        (block('{"name": "bash", "arguments": {"command": "ls", "command": "rm"}}'), errors.BadJson, 0),
        (block('{"name": "computer_use", "arguments": {"action": "wait", "time": NaN}}'), errors.BadJson, 0),
        (block('{"name": "computer_use", "arguments": {"action": "wait", "time": 1e999}}'), errors.ArgumentRange, 0),
        (block("[" * 100_000), errors.BadJson, 0),
        (block("1" * 10_000), errors.BadJson, 0),
        (block("[" * 500 + "]" * 500), errors.BadCall, 0),
        (block("[]"), errors.BadCall, 0),
        (block('{"name": "bash"}'), errors.BadCall, 0),
        (block('{"name": "bash", "arguments": {"command": "ls"}, "id": 1}'), errors.BadCall, 0),
        (block('{"name": "bash", "arguments": "ls"}'), errors.BadCall, 0),
        (block('{"name": "sh", "arguments": {"command": "ls"}}'), errors.UnknownFunction, 0),
        (block('{"name": "computer_use", "arguments": {"action": "tap"}}'), errors.UnknownAction, 0),
        (block('{"name": "computer_use", "arguments": {"action": "type"}}'), errors.MissingArgument, 0),
        (block('{"name": "bash", "arguments": {"command": "ls", "cwd": "/"}}'), errors.UnexpectedArgument, 0),
        (block('{"name": "bash", "arguments": {"command": 5}}'), errors.ArgumentType, 0),
        (block('{"name": "bash", "arguments": {"command": "\\ud800"}}'), errors.BadText, 0),
        (
            block('{"name": "computer_use", "arguments": {"action": "click", "coordinate": [1500, 2]}}'),
            errors.ArgumentRange,
            0,
        ),
        (
            block('{"name": "computer_use", "arguments": {"action": "keypress", "keys": ["hyper"]}}'),
            errors.UnknownKey,
            0,
        ),
        (f"{HEAD}{LIST}\ud800", errors.BadText, None),
    ],
)
def test_every_fault(text, fault, call):
    with pytest.raises(errors.ProtocolError) as caught:
        parse(text)
    assert type(caught.value) is fault
    assert caught.value.call == call
    assert pickle.loads(pickle.dumps(caught.value)).code == fault.code


def test_the_table_covers_every_error_class():
    faults = {mark[1] for mark in test_every_fault.pytestmark[0].args[1]}
    assert faults == set(errors.ProtocolError.__subclasses__())


def test_position_points_at_the_fault():
    text = f"{HEAD}{SHOT}\nDone."
    with pytest.raises(errors.TextAfterLastCall) as caught:
        parse(text)
    assert text[caught.value.position :] == "Done."


@pytest.mark.parametrize(
    "piece",
    [
        "<think>",
        "</think>",
        "Action:",
        "\n",
        " ",
        "<tool_call>",
        "</tool_call>",
        "<tool_call>{",
        '<tool_call>{"',
        "\\",
        "[",
    ],
)
@pytest.mark.parametrize("head", ["", "<think>", HEAD, HEAD + "<tool_call>", HEAD + '<tool_call>{"name": "'])
def test_long_repetitions_take_linear_time(head, piece):
    from mage_jax.agent.repair import parse_with_repairs
    from mage_jax.agent.spans import split_text

    text = head + piece * 100_000
    start = time.process_time()
    for read in (parse, parse_with_repairs, split_text):
        try:
            read(text)
        except errors.ProtocolError:
            continue
    assert time.process_time() - start < 3  # about 0.1 s; quadratic would take minutes
