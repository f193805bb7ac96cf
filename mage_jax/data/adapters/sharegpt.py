"""ShareGPT / LLaVA conversations, and plain OpenAI messages without tool calls: kept as chat, word for word.

``{"id", "image": path or list, "conversations": [{"from": "human" | "gpt" | "system", "value"}]}`` with ``<image>``
markers in human turns; the rules of ``mage_jax.data.parse``, which reads them, hold. Text is not searched for
coordinates or calls: sets that hide them there need a format of their own.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from mage_jax.data.adapters.base import Adapter, AdapterError, Context, Item, Place
from mage_jax.data.adapters.turns import chat_turn, episode
from mage_jax.data.episode_schema import Episode, Observation, Part
from mage_jax.data.parse import Record, RecordError, parse_record

FORMAT = "sharegpt"


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One conversation to one episode. Raises AdapterError."""
    place, data = item.place, item.record()
    record, images = read_conversation(data, place=place, context=context)
    system, opening, answers = split_messages(record, images, place=place)
    yield episode(
        context,
        format=FORMAT,
        record_id=record.id,
        place=place,
        prompt="chat",
        system=system,
        instruction="",
        initial=(opening,),
        turns=[chat_turn(i, text, results) for i, (text, results) in enumerate(answers, start=1)],
    )


def read_conversation(data: Mapping[str, Any], *, place: Place, context: Context) -> tuple[Record, list[Part]]:
    """A record in the internal message form, and its stored pictures in order of appearance."""
    if "conversations" not in data:
        raise place.fail("conversations", "is missing")
    try:
        record = parse_record(json.dumps(data), source_file=place.file, line=place.line)
    except RecordError as error:
        raise AdapterError(str(error), kind="conversation") from error
    value = data.get("image")
    paths = [] if value is None else value if isinstance(value, list) else [value]
    return record, [Part(image=context.image(path, place=place, field=f"image[{i}]")) for i, path in enumerate(paths)]


def split_messages(
    record: Record, images: list[Part], *, place: Place
) -> tuple[str | None, Observation, list[tuple[str, list[Observation]]]]:
    """(system text, opening user message, [(answer, user messages after it)])."""
    system, opening, remaining = None, None, iter(images)
    answers: list[tuple[str, list[Observation]]] = []
    for i, message in enumerate(record.messages):
        content = message["content"]
        if message["role"] == "system":
            system = content
        elif message["role"] == "assistant":
            if opening is None:
                raise place.fail(f"conversations[{i}]", "an answer stands before any question", "order")
            if answers and not answers[-1][1]:
                raise place.fail(f"conversations[{i}]", "two answers in a row", "order")
            answers.append((content, []))
        else:
            pieces = [{"type": "text", "text": content}] if isinstance(content, str) else content
            parts = tuple(Part(text=p["text"]) if p["type"] == "text" else next(remaining) for p in pieces)
            if not parts:
                raise place.fail(f"conversations[{i}].value", "is empty")
            said = Observation(kind="user", parts=parts)
            if answers:
                answers[-1][1].append(said)
            elif opening is not None:
                raise place.fail(f"conversations[{i}]", "two questions in a row", "order")
            else:
                opening = said
    if opening is None:
        raise place.fail("conversations", "has no human turn", "order")
    return system, opening, answers


ADAPTER = Adapter(name=FORMAT, coord_space="thousand", convert=convert)
