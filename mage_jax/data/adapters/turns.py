"""Building episodes: calls checked against the protocol, responses in its canonical text, observations, episodes."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from mage_jax.agent.calls import ToolCall, call_text, turn_text
from mage_jax.agent.errors import ProtocolError
from mage_jax.data.adapters.base import Context, Grid, Place
from mage_jax.data.episode_schema import (
    Call,
    Episode,
    Observation,
    Outcome,
    Parsed,
    Part,
    Source,
    StoredImage,
    Turn,
)

CREATED_UNKNOWN = 0  # an import of the same files gives the same bytes, whenever it runs
TASK_PREFIX = "Task: "  # with which the protocol's first user turn opens its text
_THINK = re.compile(r"\s*<think>(.*?)</think>\s*", re.DOTALL)
_ACTION = re.compile(r"^Action:[ \t]*(\S.*)$", re.MULTILINE)
_POINTS = ("coordinate", "start", "end")


def computer(action: str, **arguments: Any) -> dict[str, Any]:
    """A ``computer_use`` call as plain JSON."""
    return {"name": "computer_use", "arguments": {"action": action, **arguments}}


def bash(command: str) -> dict[str, Any]:
    """A ``bash`` call as plain JSON."""
    return {"name": "bash", "arguments": {"command": command}}


def screenshot(image: StoredImage) -> Observation:
    return Observation(kind="screenshot", parts=(Part(image=image),))


def output(text: str) -> Observation:
    return Observation(kind="output", parts=(Part(text=text),))


def tool_call(value: Mapping[str, Any], *, place: Place, field: str) -> ToolCall:
    """Validates one call. Raises AdapterError with the protocol's reason."""
    try:
        return ToolCall.from_arguments(value["name"], value["arguments"])
    except ProtocolError as error:
        raise place.fail(field, str(error), f"call: {error.code}") from None


def with_grid(name: Any, arguments: Any, *, grid: Grid, place: Place, field: str) -> dict[str, Any]:
    """A source's call in the protocol's schema with its points converted to [0, 999]. Only positions are scaled:
    scroll amounts are fractions of a screen in every space."""
    if isinstance(arguments, Mapping):
        converted = dict(arguments)
        for key in _POINTS:
            value = converted.get(key)
            if isinstance(value, list) and len(value) == 2:
                converted[key] = grid.point(*value, place=place, field=f"{field}.{key}")
        arguments = converted
    return {"name": name, "arguments": arguments}


def split_response(text: str) -> tuple[str, str | None]:
    """(thought, Action sentence) of a response that may have ``<think>`` tags and an ``Action:`` line, or neither."""
    think, rest = None, text
    if found := _THINK.match(text):
        think, rest = found[1], text[found.end() :]
    action = None
    if found := _ACTION.search(rest):
        action, rest = found[1], rest[: found.start()] + rest[found.end() :]
    return "\n\n".join(piece.strip() for piece in (think, rest) if piece and piece.strip()), action


def one_line(text: str) -> str:
    """Text with every run of white space as one space: an Action sentence is one line."""
    return " ".join(text.split())


def describe(calls: Sequence[ToolCall]) -> str:
    """An Action sentence for calls whose source has none: what the first does, in the words of its arguments."""
    call = calls[0]
    if call.name == "bash":
        words = one_line(call.command or "")
        sentence = f"Run `{words[:80]}{'...' if len(words) > 80 else ''}`."
        return "Run a shell command." if "<" in words or not words else sentence
    point = f"({call.coordinate[0]}, {call.coordinate[1]})" if call.coordinate else ""
    sentences = {
        "click": f"{call.mouse_button.capitalize()} click at {point}.".replace("Left click", "Click"),
        "double_click": f"Double click at {point}.",
        "triple_click": f"Triple click at {point}.",
        "move": f"Move the cursor to {point}.",
        "drag": f"Drag from {call.start} to {call.end}.",
        "type": "Type the text.",
        "keypress": f"Press {'+'.join(call.keys or ())}.",
        "scroll": "Scroll.",
        "wait": f"Wait {call.time} seconds.",
        "screenshot": "Take a screenshot.",
        "terminate": "End the task.",
    }
    return sentences[call.action or ""]


def agent_turn(
    index: int,
    *,
    think: str,
    action: str | None,
    calls: Sequence[Mapping[str, Any]],
    results: Sequence[Observation] = (),
    supervised: bool = True,
    place: Place,
    field: str,
) -> Turn:
    """A turn of the full agent schema, its text in the protocol's canonical form.

    Args:
      index: from 1.
      think: the source's thought, kept but for white space at its ends.
      action: the source's summary, put on one line; None or empty takes ``describe``.
      calls: plain JSON calls, points already in [0, 999].
      results, supervised: as in ``Turn``.
      place, field: for errors.

    Raises:
      AdapterError: a call is invalid, or they do not make one turn (two functions, more than 15, a tag in the text).
    """
    checked = [tool_call(call, place=place, field=f"{field}.calls[{i}]") for i, call in enumerate(calls)]
    think, action = think.strip(), one_line(action or "")
    try:
        action = action or (describe(checked) if checked else "")
        text = turn_text(think=think, action=action, calls=checked)
    except ProtocolError as error:
        raise place.fail(field, str(error), f"turn: {error.code}") from None
    return Turn(
        index=index,
        supervised=supervised,
        channel=checked[0].name,
        text=text,
        parsed=Parsed(think=think, action=action, calls=stored_calls(checked)),
        results=tuple(results),
    )


def stored_calls(calls: Sequence[ToolCall]) -> tuple[Call, ...]:
    return tuple(Call(name=call.name, arguments=call.arguments()) for call in calls)


def grounding_turn(point: list[int]) -> Turn:
    """The click-only answer: one call, neither thought nor Action line."""
    call = ToolCall.from_arguments("computer_use", {"action": "click", "coordinate": point})
    parsed = Parsed(think=None, action=None, calls=stored_calls([call]))
    return Turn(index=1, channel="computer_use", text=call_text(call), parsed=parsed)


def chat_turn(index: int, text: str, results: Sequence[Observation] = ()) -> Turn:
    """An answer in plain words, kept as it is."""
    parsed = Parsed(think=None, action=None, calls=())
    return Turn(index=index, channel="none", text=text, parsed=parsed, results=tuple(results))


def episode(
    context: Context,
    *,
    format: str,
    record_id: str,
    task_id: str | None = None,
    place: Place,
    turns: Sequence[Turn],
    licence: str | None = None,
    outcome: Outcome | None = None,
    **fields: Any,
) -> Episode:
    """An episode of an imported record: ids get the data set's name, ``screen`` comes from the screenshots.

    Without an outcome it is "unverified". ``fields`` are the others of ``Episode``.
    """
    name = context.options.name
    made = Episode(
        run_id=f"import:{format}",
        created_ns=CREATED_UNKNOWN,
        episode_id=f"{name}/{record_id}",
        task_id=f"{name}/{task_id or record_id}",
        source=Source(format=format, name=name, place=str(place), licence=licence or context.options.licence),
        coord_space=context.coord_space,
        turns=tuple(turns),
        outcome=outcome or Outcome(kind="unverified"),
        **fields,
    )
    return with_screen(made)


def with_screen(made: Episode) -> Episode:
    """The episode with ``screen`` set to the size that all its pictures share, or None."""
    sizes = {(image.width, image.height) for image in made.images()}
    return dataclasses.replace(made, screen=sizes.pop() if len(sizes) == 1 else None)
