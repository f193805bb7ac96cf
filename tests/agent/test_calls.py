"""Calls: what is valid, what is refused and by which error, and the canonical text."""

import json
import math

import pytest
from hypothesis import given

from mage_jax.agent import errors
from mage_jax.agent.calls import ToolCall, call_text, turn_text
from tests.agent import strategies

GUI = "computer_use"
POINT = {"coordinate": [1, 2]}


@given(strategies.GUI_CALLS | strategies.BASH_CALLS)
def test_arguments_round_trip_through_json(call):
    block = call_text(call)
    assert block.startswith('<tool_call>\n{"name": ') and block.endswith("}\n</tool_call>")
    contents = json.loads(block.removeprefix("<tool_call>\n").removesuffix("\n</tool_call>"))
    assert list(contents) == ["name", "arguments"]
    assert ToolCall.from_arguments(contents["name"], contents["arguments"]) == call
    assert hash(call) == hash(ToolCall.from_arguments(contents["name"], contents["arguments"]))


def test_canonical_text():
    call = ToolCall.from_arguments(GUI, {"button": "right", "coordinate": [512, 300], "action": "click"})
    text = '{"name": "computer_use", "arguments": {"action": "click", "coordinate": [512, 300], "button": "right"}}'
    assert call_text(call) == f"<tool_call>\n{text}\n</tool_call>"
    bash = ToolCall(name="bash", command='echo "é\n日"')
    assert call_text(bash) == (
        '<tool_call>\n{"name": "bash", "arguments": {"command": "echo \\"é\\n日\\""}}\n</tool_call>'
    )
    assert turn_text(think="I see.", action="List it.", calls=[bash, bash]) == (
        f"<think>\nI see.\n</think>\nAction: List it.\n{call_text(bash)}\n{call_text(bash)}"
    )


def test_defaults_are_views_not_values():
    click = ToolCall(name=GUI, action="click", coordinate=(1, 2))
    assert click.button is None and click.mouse_button == "left"
    press = ToolCall(name=GUI, action="keypress", keys=("Control+Return",))
    assert press.key_names == ("ctrl", "enter") and press.arguments()["keys"] == ["Control+Return"]


@pytest.mark.parametrize(
    ("name", "arguments", "fault", "reason"),
    [
        ("computer", {"action": "wait"}, errors.UnknownFunction, "'computer'"),
        (5, {}, errors.BadCall, "name"),
        (GUI, [], errors.BadCall, "arguments"),
        (GUI, '{"action": "screenshot"}', errors.BadCall, "arguments"),
        (GUI, {}, errors.MissingArgument, "'action'"),
        (GUI, {"action": 3}, errors.ArgumentType, "action"),
        (GUI, {"action": "tap", **POINT}, errors.UnknownAction, "'tap'"),
        (GUI, {"action": "click"}, errors.MissingArgument, "'coordinate'"),
        (GUI, {"action": "click", "coordinate": None}, errors.ArgumentType, "coordinate"),
        (GUI, {"action": "click", "coordinate": [1]}, errors.ArgumentType, "coordinate"),
        (GUI, {"action": "click", "coordinate": [1, 2, 3]}, errors.ArgumentType, "coordinate"),
        (GUI, {"action": "click", "coordinate": "1,2"}, errors.ArgumentType, "coordinate"),
        (GUI, {"action": "click", "coordinate": [1.0, 2]}, errors.ArgumentType, "integers"),
        (GUI, {"action": "click", "coordinate": [True, 2]}, errors.ArgumentType, "integers"),
        (GUI, {"action": "click", "coordinate": [1000, 2]}, errors.ArgumentRange, r"\[0, 999\]"),
        (GUI, {"action": "click", "coordinate": [1, -1]}, errors.ArgumentRange, r"\[0, 999\]"),
        (GUI, {"action": "click", "button": "Left", **POINT}, errors.ArgumentRange, "left, right, middle"),
        (GUI, {"action": "click", "button": 1, **POINT}, errors.ArgumentType, "button"),
        (GUI, {"action": "click", "text": "x", **POINT}, errors.UnexpectedArgument, "'text'"),
        (GUI, {"action": "double_click", "button": "left", **POINT}, errors.UnexpectedArgument, "'button'"),
        (GUI, {"action": "click", "x": 1, **POINT}, errors.UnexpectedArgument, "'x'"),
        (GUI, {"action": "drag", "start": [1, 2]}, errors.MissingArgument, "'end'"),
        (GUI, {"action": "drag", "start": [1, 2], "end": [1, 1500]}, errors.ArgumentRange, "end"),
        (GUI, {"action": "type"}, errors.MissingArgument, "'text'"),
        (GUI, {"action": "type", "text": 5}, errors.ArgumentType, "text"),
        (GUI, {"action": "type", "text": "\ud800"}, errors.BadText, "surrogate"),
        (GUI, {"action": "keypress"}, errors.MissingArgument, "'keys'"),
        (GUI, {"action": "keypress", "keys": []}, errors.ArgumentType, "empty"),
        (GUI, {"action": "keypress", "keys": "ctrl"}, errors.ArgumentType, "list"),
        (GUI, {"action": "keypress", "keys": ["ctrl", 5]}, errors.ArgumentType, "strings"),
        (GUI, {"action": "keypress", "keys": ["hyper", "c"]}, errors.UnknownKey, "'hyper'"),
        (GUI, {"action": "scroll", "scroll_y": -5}, errors.MissingArgument, "'scroll_x'"),
        (GUI, {"action": "scroll", "scroll_x": 0, "scroll_y": 1000}, errors.ArgumentRange, "scroll_y"),
        (GUI, {"action": "scroll", "scroll_x": -999.5, "scroll_y": 0}, errors.ArgumentRange, "scroll_x"),
        (GUI, {"action": "scroll", "scroll_x": math.nan, "scroll_y": 0}, errors.ArgumentRange, "scroll_x"),
        (GUI, {"action": "scroll", "scroll_x": "0", "scroll_y": 0}, errors.ArgumentType, "scroll_x"),
        (GUI, {"action": "scroll", "scroll_x": False, "scroll_y": 0}, errors.ArgumentType, "scroll_x"),
        (GUI, {"action": "wait"}, errors.MissingArgument, "'time'"),
        (GUI, {"action": "wait", "time": -1}, errors.ArgumentRange, "time"),
        (GUI, {"action": "wait", "time": math.inf}, errors.ArgumentRange, "time"),
        (GUI, {"action": "wait", "time": 10**400}, errors.ArgumentRange, "time"),
        (GUI, {"action": "wait", "time": "2"}, errors.ArgumentType, "time"),
        (GUI, {"action": "screenshot", "time": 1}, errors.UnexpectedArgument, "'time'"),
        (GUI, {"action": "terminate"}, errors.MissingArgument, "'status'"),
        (GUI, {"action": "terminate", "status": "done"}, errors.ArgumentRange, "success, failure"),
        (GUI, {"action": "terminate", "status": "success", "msg_to_user": 1}, errors.ArgumentType, "msg_to_user"),
        (GUI, {"action": "screenshot", "command": "ls"}, errors.UnexpectedArgument, "'command'"),
        ("bash", {}, errors.MissingArgument, "'command'"),
        ("bash", {"command": ["ls"]}, errors.ArgumentType, "command"),
        ("bash", {"command": "ls", "timeout": 5}, errors.UnexpectedArgument, "'timeout'"),
        ("bash", {"command": "ls", "action": "click"}, errors.UnexpectedArgument, "'action'"),
    ],
)
def test_every_refusal(name, arguments, fault, reason):
    with pytest.raises(errors.ProtocolError, match=reason) as caught:
        ToolCall.from_arguments(name, arguments)
    assert type(caught.value) is fault


def test_the_constructor_refuses_the_same():
    with pytest.raises(errors.MissingArgument):
        ToolCall(name=GUI, action="click")
    with pytest.raises(errors.UnexpectedArgument):
        ToolCall(name="bash", command="ls", text="x")


LIST = ToolCall(name="bash", command="ls")
LOOK = ToolCall(name=GUI, action="screenshot")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"think": "a</think>b"}, errors.UnexpectedText),
        ({"think": "\udfff"}, errors.BadText),
        ({"action": " "}, errors.MissingAction),
        ({"action": "a\nb"}, errors.BadAction),
        ({"action": "a "}, errors.BadAction),
        ({"action": "a <tool_call>"}, errors.BadAction),
        ({"calls": []}, errors.NoCall),
        ({"calls": [LIST] * 16}, errors.TooManyCalls),
        ({"calls": [LIST, LOOK]}, errors.MixedFunctions),
    ],
)
def test_a_turn_that_would_not_parse_is_not_written(changes, fault):
    with pytest.raises(fault):
        turn_text(**{"think": "t", "action": "a", "calls": [LIST], **changes})


def test_codes_are_unique_and_errors_say_where():
    classes = errors.ProtocolError.__subclasses__()
    assert len({c.code for c in classes}) == len(classes) >= 20
    assert str(errors.BadJson("no", call=1, position=7)) == "call 2, character 7: no"
