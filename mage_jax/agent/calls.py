"""Calls of the two functions, ``computer_use`` (11 actions) and ``bash``: validation whole, and the canonical text.

The table of actions is the system prompt's. Nothing is guessed: no value is clamped, rounded or filled in, and an
argument that an action does not take is an error.
"""

from __future__ import annotations

import dataclasses
import json
import math
import reprlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from mage_jax.agent import errors
from mage_jax.agent.coordinates import MAX_COORDINATE
from mage_jax.agent.keys import canonical_keys

FUNCTIONS = ("computer_use", "bash")
MAX_CALLS = 15
MAX_SCROLL = 999  # one full screen
BUTTONS = ("left", "right", "middle")
STATUSES = ("success", "failure")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")

# action -> (required, optional) arguments
ACTIONS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "click": (("coordinate",), ("button",)),
    "double_click": (("coordinate",), ()),
    "triple_click": (("coordinate",), ()),
    "move": (("coordinate",), ()),
    "drag": (("start", "end"), ()),
    "type": (("text",), ()),
    "keypress": (("keys",), ()),
    "scroll": (("scroll_x", "scroll_y"), ("coordinate",)),
    "wait": (("time",), ()),
    "screenshot": ((), ()),
    "terminate": (("status",), ("msg_to_user",)),
}
# Canonical order: the one in which the system prompt's schema lists them.
ARGUMENTS = (
    "coordinate",
    "button",
    "start",
    "end",
    "keys",
    "text",
    "scroll_x",
    "scroll_y",
    "time",
    "status",
    "msg_to_user",
)
Point = tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolCall:
    """One valid call; making an invalid one raises. An absent argument is None.

    Attributes:
      name: "computer_use" or "bash".
      action: one of ``ACTIONS``; None for bash.
      coordinate, start, end: (x, y), integers in [0, 999]; see ``coordinates.to_pixels``.
      button: as written; ``mouse_button`` has the default.
      keys: as written; ``key_names`` has the canonical names.
      text: any Unicode text, newlines included.
      scroll_x, scroll_y: [-999, 999]; 999 is one full screen, negative is left and down.
      time: seconds, not negative. No upper limit is part of the protocol: an environment sets its own.
      status: "success" or "failure".
      command: for bash.

    Raises:
      ProtocolError: the subclass for the fault (``UnknownFunction``, ``UnknownAction``, ``MissingArgument``,
        ``UnexpectedArgument``, ``ArgumentType``, ``ArgumentRange``, ``UnknownKey``, ``BadText``).
    """

    name: Literal["computer_use", "bash"]
    action: str | None = None
    coordinate: Point | None = None
    button: str | None = None
    start: Point | None = None
    end: Point | None = None
    keys: tuple[str, ...] | None = None
    text: str | None = None
    scroll_x: float | None = None
    scroll_y: float | None = None
    time: float | None = None
    status: str | None = None
    msg_to_user: str | None = None
    command: str | None = None

    def __post_init__(self):
        given = {
            field.name: value
            for field in dataclasses.fields(self)
            if field.name != "name" and (value := getattr(self, field.name)) is not None
        }
        _check(self.name, given)

    @classmethod
    def from_arguments(cls, name: Any, arguments: Any) -> ToolCall:
        """From parsed JSON: ``{"name": name, "arguments": arguments}``. A null argument is an ill-typed one.

        Raises:
          ProtocolError: as the class, and ``BadCall`` if the two are not a string and an object.
        """
        if not isinstance(name, str):
            raise errors.BadCall(f"name: must be a string, got {reprlib.repr(name)}")
        if not isinstance(arguments, Mapping):
            raise errors.BadCall(f"arguments: must be an object, got {reprlib.repr(arguments)}")
        _check(name, arguments)
        values = {key: tuple(value) if isinstance(value, list) else value for key, value in arguments.items()}
        return cls(name=name, **values)

    @property
    def mouse_button(self) -> str:
        """The button of a click, left by default."""
        return self.button or "left"

    @property
    def key_names(self) -> tuple[str, ...]:
        """Canonical key names of a keypress, in pressing order (released in reverse)."""
        return canonical_keys(self.keys or ())

    def arguments(self) -> dict[str, Any]:
        """The arguments that are given, in canonical order, as JSON values."""
        order = ("command",) if self.name == "bash" else ("action", *ARGUMENTS)
        given = {key: getattr(self, key) for key in order}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in given.items() if v is not None}


def call_text(call: ToolCall) -> str:
    """The canonical block. SGLang's qwen25 parser opens and closes on exactly these newlines."""
    contents = json.dumps({"name": call.name, "arguments": call.arguments()}, ensure_ascii=False)
    return f"<tool_call>\n{contents}\n</tool_call>"


def turn_text(*, think: str, action: str, calls: Sequence[ToolCall]) -> str:
    """The canonical text of a turn, which ``parser.parse`` reads back.

    Raises:
      ProtocolError: the parts cannot make a valid turn (``check_turn``).
    """
    check_turn(think=think, action=action, calls=calls)
    blocks = "\n".join(map(call_text, calls))
    return f"<think>\n{think}\n</think>\nAction: {action}\n{blocks}"


def check_turn(*, think: str, action: str, calls: Sequence[ToolCall]) -> None:
    """Checks what concerns a turn as a whole: the tags, the Action line, the number and function of its calls.

    Raises:
      ProtocolError: the subclass for the fault.
    """
    for text in (think, action):
        check_text(text)
    if "</think>" in think:
        raise errors.UnexpectedText("a thought cannot hold </think>")
    check_action(action)
    if not calls:
        raise errors.NoCall("a turn needs at least one call")
    if len(calls) > MAX_CALLS:
        raise errors.TooManyCalls(f"at most {MAX_CALLS} calls in one response, got {len(calls)}")
    for i, call in enumerate(calls):
        if call.name != calls[0].name:
            raise errors.MixedFunctions(f"{call.name} after {calls[0].name} in one response", call=i)


def check_action(action: str) -> None:
    """An Action sentence is one line, not empty, without tags: it is folded into later prompts as it stands.

    Raises:
      MissingAction, BadAction.
    """
    if not action.strip():
        raise errors.MissingAction("the Action line is empty")
    if "\n" in action or action != action.strip():
        raise errors.BadAction(f"an action is one line without space around it, got {reprlib.repr(action)}")
    for tag in TAGS:
        if tag in action:
            raise errors.BadAction(f"{tag} stands in the Action line; a block starts on its own line")


def check_text(text: str) -> None:
    """Raises ``BadText`` if UTF-8 cannot express the text."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise errors.BadText(f"lone surrogate at character {error.start} of a text") from None


def _check(name: str, arguments: Mapping[str, Any]) -> None:
    if name not in FUNCTIONS:
        raise errors.UnknownFunction(f"unknown function {reprlib.repr(name)}; there are {' and '.join(FUNCTIONS)}")
    if name == "bash":
        what, required, optional = "bash", ("command",), ()
    else:
        if "action" not in arguments:
            raise errors.MissingArgument("computer_use needs the argument 'action'")
        action = arguments["action"]
        if not isinstance(action, str):
            raise errors.ArgumentType(f"action: must be a string, got {reprlib.repr(action)}")
        if action not in ACTIONS:
            raise errors.UnknownAction(f"unknown action {reprlib.repr(action)}; there are {', '.join(ACTIONS)}")
        what, (required, optional) = action, ACTIONS[action]
        required = ("action", *required)
    for key in arguments:
        if key not in required and key not in optional:
            raise errors.UnexpectedArgument(f"{what} takes no argument {reprlib.repr(key)}")
    for key in required:
        if key not in arguments:
            raise errors.MissingArgument(f"{what} needs the argument {key!r}")
    for key, value in arguments.items():
        _CHECKS[key](key, value)


def _check_string(key: str, value: Any) -> None:
    if not isinstance(value, str):
        raise errors.ArgumentType(f"{key}: must be a string, got {reprlib.repr(value)}")
    check_text(value)


def _check_point(key: str, value: Any) -> None:
    # bool is an int in Python, but `true` is no coordinate
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    if not is_pair or any(isinstance(v, bool) or not isinstance(v, int) for v in value):
        raise errors.ArgumentType(f"{key}: must be two integers [x, y], got {reprlib.repr(value)}")
    if not all(0 <= v <= MAX_COORDINATE for v in value):
        raise errors.ArgumentRange(f"{key}: must be in [0, {MAX_COORDINATE}], got {reprlib.repr(list(value))}")


def _check_number(key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise errors.ArgumentType(f"{key}: must be a number, got {reprlib.repr(value)}")


def _check_scroll(key: str, value: Any) -> None:
    _check_number(key, value)
    if not -MAX_SCROLL <= value <= MAX_SCROLL:  # NaN compares false
        raise errors.ArgumentRange(f"{key}: must be in [-{MAX_SCROLL}, {MAX_SCROLL}], got {reprlib.repr(value)}")


def _check_time(key: str, value: Any) -> None:
    _check_number(key, value)
    if not 0 <= value < math.inf or value > sys.float_info.max:
        raise errors.ArgumentRange(f"{key}: must be seconds, finite and not negative, got {reprlib.repr(value)}")


def _check_keys(key: str, value: Any) -> None:
    if not isinstance(value, (list, tuple)) or not all(isinstance(v, str) for v in value):
        raise errors.ArgumentType(f"{key}: must be a list of strings, got {reprlib.repr(value)}")
    if not value:
        raise errors.ArgumentType(f"{key}: must not be empty")
    canonical_keys(value)


def _check_word(words: tuple[str, ...]):
    def check(key: str, value: Any) -> None:
        _check_string(key, value)
        if value not in words:
            raise errors.ArgumentRange(f"{key}: must be one of {', '.join(words)}, got {reprlib.repr(value)}")

    return check


_CHECKS = {
    "action": _check_string,
    "coordinate": _check_point,
    "button": _check_word(BUTTONS),
    "start": _check_point,
    "end": _check_point,
    "keys": _check_keys,
    "text": _check_string,
    "scroll_x": _check_scroll,
    "scroll_y": _check_scroll,
    "time": _check_time,
    "status": _check_word(STATUSES),
    "msg_to_user": _check_string,
    "command": _check_string,
}
