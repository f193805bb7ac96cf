"""ScaleCUA-Data: LLaVA-like JSONL whose answers hold actions, ``image, conversations, width, height``.

An answer is ``<think>..</think><operation>..</operation><action>click(x=0.5, y=0.2)</action>`` (or several calls, one a
line), coordinates 0-1. It becomes a turn of the agent schema with the operation as Action line. An answer that is one
click inside ``<action>`` and nothing else is grounding; a record without ``<action>`` anywhere is chat.

Choices: the whole question is the instruction (the history of earlier operations that it quotes is not taken apart);
a record is one step, so it has one answer. Functions are those of ``code.read_code``'s bare dialect; ``response``,
``callUser`` and the mobile ones (``swipe``, ``open_app``, ``long_press``, ...) have no equal in the protocol and are
errors.

Uncertain, hence strict: that the tags come in this order, each at most once; whether a set's coordinates are 0-1 or
0-1000 (say it with ``--coord_space``); ``wait`` must state its seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from mage_jax.data.adapters.base import Adapter, Context, Grid, Item
from mage_jax.data.adapters.code import read_code
from mage_jax.data.adapters.sharegpt import read_conversation, split_messages
from mage_jax.data.adapters.turns import agent_turn, chat_turn, episode, grounding_turn, screenshot
from mage_jax.data.episode_schema import Episode

FORMAT = "scalecua"
_FIELDS = ("id", "image", "width", "height")
_ANSWER = re.compile(
    r"\s*(?:<think>(?P<think>.*?)</think>\s*)?(?:<operation>(?P<operation>.*?)</operation>\s*)?"
    r"<action>(?P<action>.*?)</action>\s*",
    re.DOTALL,
)


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One record to one episode. Raises AdapterError."""
    place = item.place
    data = context.fields(item.record(), place=place, field="", required=("conversations",), optional=_FIELDS)
    record, images = read_conversation(data, place=place, context=context)
    system, opening, answers = split_messages(record, images, place=place)
    common = {"format": FORMAT, "record_id": record.id, "place": place, "system": system}
    if not any("<action" in answer for answer, _ in answers):
        turns = [chat_turn(i, answer, results) for i, (answer, results) in enumerate(answers, start=1)]
        yield episode(context, **common, prompt="chat", instruction="", initial=(opening,), turns=turns)
        return
    field = f"conversations[{len(record.messages) - 1}].value"
    found = _ANSWER.fullmatch(answers[0][0])
    if len(answers) != 1 or answers[0][1] or found is None:
        raise place.fail(field, "must be one answer of <think>, <operation>, <action>, in this order", "answer")
    if len(opening.images) != 1:
        raise place.fail("image", f"an action needs one screenshot, got {len(opening.images)}", "image")
    image = opening.images[0]
    for axis, name in enumerate(("width", "height")):
        if name in data and data[name] != (image.width, image.height)[axis]:
            raise place.fail(name, f"is {data[name]!r:.40}, but the picture is {image.width}x{image.height}", "image")
    calls = read_code(
        "\n".join(line.strip() for line in found["action"].strip().splitlines()),
        grid=Grid(context.coord_space, (image.width, image.height)),
        scroll_per_click=context.options.scroll_per_click,
        place=place,
        field=f"{field}.action",
        dialect="bare",
    )
    instruction = "\n".join(part.text.strip() for part in opening.parts if part.text and part.text.strip())
    if not instruction:
        raise place.fail("conversations[0].value", "has no words")
    arguments = calls[0]["arguments"]
    is_click = len(calls) == 1 and set(arguments) == {"action", "coordinate"} and arguments["action"] == "click"
    if is_click and found["think"] is None and found["operation"] is None:
        prompt, turn = "grounding", grounding_turn(arguments["coordinate"])
    else:
        prompt = "agent"
        turn = agent_turn(
            1, think=found["think"] or "", action=found["operation"], calls=calls, place=place, field=field
        )
    yield episode(context, **common, prompt=prompt, instruction=instruction, initial=(screenshot(image),), turns=[turn])


ADAPTER = Adapter(name=FORMAT, coord_space="unit", convert=convert)
