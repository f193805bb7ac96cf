"""Faults of a model's response: one class per fault, all ``ProtocolError``, each with a stable ``code``.

Codes go into metrics and episode records, so they outlive the wording of a message.
"""

from __future__ import annotations

from typing import ClassVar


class ProtocolError(ValueError):
    """A response, a call or an argument that breaks the agent protocol. Nothing of it may be executed.

    Attributes:
      code: stable name of the fault.
      call: index of the faulty call in its response (0 is the first), None outside a call.
      position: character offset in the response, None if there is no single one.
    """

    code: ClassVar[str] = "protocol"

    def __init__(self, message: str, *, position: int | None = None, call: int | None = None):
        super().__init__(message)
        self.position = position
        self.call = call

    def __str__(self) -> str:
        where = [f"call {self.call + 1}"] if self.call is not None else []
        where += [f"character {self.position}"] if self.position is not None else []
        return (", ".join(where) + ": " if where else "") + self.args[0]


class BadText(ProtocolError):
    """The response, or a string in it, holds a lone surrogate, which UTF-8 cannot express."""

    code = "bad_text"


class MissingThink(ProtocolError):
    """The response does not open with ``<think>``."""

    code = "missing_think"


class UnclosedThink(ProtocolError):
    """``</think>`` never comes (usually a response cut by the token limit)."""

    code = "unclosed_think"


class MissingAction(ProtocolError):
    """No ``Action:`` line, or an empty one, after the thought."""

    code = "missing_action"


class BadAction(ProtocolError):
    """The action is not one plain line: a tag stands in it."""

    code = "bad_action"


class UnexpectedText(ProtocolError):
    """Text between the parts of a turn, where only whitespace may stand."""

    code = "unexpected_text"


class NoCall(ProtocolError):
    """No ``<tool_call>`` block."""

    code = "no_call"


class UnclosedCall(ProtocolError):
    """A block's ``</tool_call>`` never comes (usually a response cut by the token limit)."""

    code = "unclosed_call"


class TextAfterLastCall(ProtocolError):
    """Something other than whitespace after the last block."""

    code = "text_after_last_call"


class TooManyCalls(ProtocolError):
    """More blocks than one response may hold."""

    code = "too_many_calls"


class MixedFunctions(ProtocolError):
    """Calls of two functions in one response."""

    code = "mixed_functions"


class BadJson(ProtocolError):
    """A block does not hold exactly one JSON value (duplicate keys, NaN and text around it included)."""

    code = "bad_json"


class BadCall(ProtocolError):
    """The JSON is not ``{"name": str, "arguments": object}``."""

    code = "bad_call"


class UnknownFunction(ProtocolError):
    """A function other than ``computer_use`` and ``bash``."""

    code = "unknown_function"


class UnknownAction(ProtocolError):
    """A ``computer_use`` action that does not exist."""

    code = "unknown_action"


class MissingArgument(ProtocolError):
    """An argument that the action requires is absent."""

    code = "missing_argument"


class UnexpectedArgument(ProtocolError):
    """An argument that the action does not take."""

    code = "unexpected_argument"


class ArgumentType(ProtocolError):
    """An argument of the wrong type or length."""

    code = "argument_type"


class ArgumentRange(ProtocolError):
    """A number outside its range, or a word outside its list."""

    code = "argument_range"


class UnknownKey(ProtocolError):
    """A key name that no keyboard table knows; X11 back-ends would ignore it without a word."""

    code = "unknown_key"
