"""OpenAI messages: ``{"id", "messages": [...]}``, with calls of ``computer_use`` and ``bash`` in the protocol's schema.

Calls stand in ``tool_calls``, or in the text of the answer as the protocol writes it (then the answer is kept byte for
byte, coordinates 0-999 only). A record without calls is chat. Other tools are errors: a model that is trained on a
tool which its prompt does not offer learns to call what is not there.

An image-only user message or a picture in a tool message answers as a screenshot, text in a tool message (or in
``<tool_response>`` tags) as a command's output, other user text as a person's words. ``Task: `` before the first words
is dropped. ``tools``, ``metadata`` and ``source`` beside the messages are let through unread.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

from mage_jax.agent.calls import FUNCTIONS
from mage_jax.data.adapters.base import Adapter, Context, Grid, Item, Place, identifier
from mage_jax.data.adapters.messages import check_messages, has_calls, read_dialogue, read_parts
from mage_jax.data.adapters.turns import chat_turn, episode, with_grid
from mage_jax.data.episode_schema import Episode, Observation, Turn
from mage_jax.data.parse import default_id

FORMAT = "openai"


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One record to one episode. Raises AdapterError."""
    place = item.place
    data = context.fields(
        item.record(),
        place=place,
        field="",
        required=("messages",),
        optional=("id", "tools", "metadata", "source", "license"),
    )
    messages = check_messages(data["messages"], place=place, field="messages")
    record_id = data.get("id")
    if record_id is None:
        record_id = default_id(place.file, place.line)
    common = {
        "format": FORMAT,
        "record_id": identifier(record_id, place=place, field="id"),
        "place": place,
        "licence": None if data.get("license") is None else identifier(data["license"], place=place, field="license"),
    }
    if not has_calls(messages):
        yield _chat(messages, place, context, common)
        return
    read_tool = functools.partial(_read_tool, place)
    dialogue = read_dialogue(messages, place=place, context=context, read_tool=read_tool, field="messages")
    yield episode(
        context,
        **common,
        prompt="agent",
        system=dialogue.system,
        instruction=dialogue.instruction,
        initial=tuple(dialogue.initial),
        turns=dialogue.turns,
    )


def _read_tool(place: Place, name: Any, arguments: Any, grid: Grid, field: str) -> dict[str, Any]:
    if name not in FUNCTIONS:
        raise place.fail(f"{field}.name", f"unknown tool {name!r:.80}; known: {', '.join(FUNCTIONS)}", "foreign tool")
    return with_grid(name, arguments, grid=grid, place=place, field=f"{field}.arguments")


def _chat(messages: list[Any], place: Place, context: Context, common: dict[str, Any]) -> Episode:
    system: str | None = None
    opening: Observation | None = None
    turns: list[Turn] = []
    before = None
    for i, message in enumerate(messages):
        field, role = f"messages[{i}]", message["role"]
        parts = read_parts(message, place=place, context=context, field=field)
        if not parts:
            raise place.fail(f"{field}.content", "is empty")
        if role != "user" and any(part.image for part in parts):
            raise place.fail(field, f"a {role} message cannot hold a picture")
        words = "".join(part.text or "" for part in parts)
        if role == "system":
            system = words
        elif role == "tool" or role == before or (role == "assistant" and opening is None):
            raise place.fail(field, "user and assistant must take turns, the user first", "order")
        elif role == "assistant":
            turns.append(chat_turn(len(turns) + 1, words))
        elif opening is None:
            opening = Observation(kind="user", parts=tuple(parts))
        else:
            turns[-1] = chat_turn(len(turns), turns[-1].text, [Observation(kind="user", parts=tuple(parts))])
        before = role
    if opening is None or not turns:
        raise place.fail("messages", "has no answer to learn from", "order")
    return episode(context, **common, prompt="chat", system=system, instruction="", initial=(opening,), turns=turns)


ADAPTER = Adapter(name=FORMAT, coord_space="thousand", convert=convert)
