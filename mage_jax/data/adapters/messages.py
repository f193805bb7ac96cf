"""Chat messages with tool calls, as the OpenAI interface and the software-engineering traces write them.

``content`` is a string, null or a list of text and image parts; ``tool_calls`` holds
``{"id", "type": "function", "function": {"name", "arguments"}}`` or the inner object alone, ``arguments`` an object or
JSON in a string. Roles: system (first), user, assistant, tool.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from typing import Any

from mage_jax.agent.errors import ProtocolError
from mage_jax.agent.parser import parse
from mage_jax.data.adapters.base import Context, Grid, Place, decoded, text
from mage_jax.data.adapters.base import items as listed
from mage_jax.data.adapters.turns import TASK_PREFIX, agent_turn, output, screenshot, split_response, stored_calls
from mage_jax.data.episode_schema import Observation, Parsed, Part, StoredImage, Turn

ROLES = ("system", "user", "assistant", "tool")
_RESPONSE = re.compile(r"\s*<tool_response>\n?(.*?)\n?</tool_response>\s*", re.DOTALL)


@dataclasses.dataclass(frozen=True)
class Thought:
    """What a tool that only thinks becomes: it opens the thought of the next turn that acts."""

    words: str


# (name, arguments, grid, field) -> the protocol's call as plain JSON, or a thought; raises AdapterError.
ToolReader = Callable[[Any, Any, Grid, str], dict[str, Any] | Thought]


@dataclasses.dataclass
class Dialogue:
    """A record taken apart; see the fields of ``Episode``."""

    system: str | None = None
    instruction: str = ""
    initial: list[Observation] = dataclasses.field(default_factory=list)
    turns: list[Turn] = dataclasses.field(default_factory=list)


def has_calls(messages: list[Any]) -> bool:
    """Whether any message calls a tool, in a field of its own or in the protocol's text."""
    return any(
        isinstance(m, Mapping)
        and m.get("role") == "assistant"
        and (m.get("tool_calls") or "<tool_call>" in str(m.get("content")))
        for m in messages
    )


def read_parts(message: Mapping[str, Any], *, place: Place, context: Context, field: str) -> list[Part]:
    """The content of a message, pictures stored. Empty texts are left out."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return [Part(text=text(content, place=place, field=f"{field}.content"))] if content else []
    parts = []
    for j, item in enumerate(listed(content, place=place, field=f"{field}.content")):
        name = f"{field}.content[{j}]"
        kind = item.get("type") if isinstance(item, Mapping) else None
        if kind == "text":
            if words := text(item.get("text"), place=place, field=f"{name}.text"):
                parts.append(Part(text=words))
        elif kind in ("image", "image_url"):
            value, name = item.get(kind), f"{name}.{kind}"
            if kind == "image_url" and isinstance(value, Mapping):
                value, name = value.get("url"), f"{name}.url"
            parts.append(Part(image=context.image(value, place=place, field=name)))
        else:
            raise place.fail(f"{name}.type", f"must be text, image or image_url, got {kind!r:.80}")
    return parts


def check_messages(value: Any, *, place: Place, field: str) -> list[Mapping[str, Any]]:
    """A list of messages with known roles, the system's first."""
    messages = listed(value, place=place, field=field)
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise place.fail(f"{field}[{i}]", f"must be an object, got {type(message).__name__}")
        if message.get("role") not in ROLES:
            raise place.fail(
                f"{field}[{i}].role", f"unknown role {message.get('role')!r:.80}; known: {', '.join(ROLES)}"
            )
        if message["role"] == "system" and i:
            raise place.fail(f"{field}[{i}]", "a system message must come first", "order")
    return messages


def read_dialogue(messages: Any, *, place: Place, context: Context, read_tool: ToolReader, field: str) -> Dialogue:
    """Messages of an agent at work. Every assistant message must call a tool.

    Raises:
      AdapterError: anything that does not fit; the message is named.
    """
    return _DialogueReader(place, context, read_tool, field).read(check_messages(messages, place=place, field=field))


@dataclasses.dataclass
class _Calls:
    """The calls of one assistant message: ids (None where not given), which ones are thoughts, what was answered."""

    ids: list[Any]
    thoughts: list[bool]
    answered: list[bool]


class _DialogueReader:
    def __init__(self, place: Place, context: Context, read_tool: ToolReader, field: str):
        self.place, self.context, self.read_tool, self.field = place, context, read_tool, field
        self.dialogue = Dialogue()
        self.screen: StoredImage | None = None
        self.waiting: list[str] = []  # thoughts without an act yet
        self.pending: _Calls | None = None
        self.results: list[Observation] = []
        self.opened = False

    def read(self, messages: list[Mapping[str, Any]]) -> Dialogue:
        for i, message in enumerate(messages):
            name = f"{self.field}[{i}]"
            if message["role"] == "assistant":
                self.close()
                self.assistant(message, name)
            elif message["role"] == "system":
                parts = read_parts(message, place=self.place, context=self.context, field=name)
                if any(part.image for part in parts):
                    raise self.place.fail(name, "a system message cannot hold a picture")
                self.dialogue.system = "".join(part.text or "" for part in parts)
            elif self.pending is None and not self.dialogue.turns and not self.waiting:
                self.opening(message, name)
            else:
                self.answer(message, name)
        self.close(last=True)
        if self.waiting:
            raise self.place.fail(self.field, "ends with a thought that no call follows", "order")
        if not self.dialogue.turns:
            raise self.place.fail(self.field, "has no assistant message", "order")
        return self.dialogue

    def opening(self, message: Mapping[str, Any], name: str) -> None:
        if message["role"] == "tool" or self.opened:
            raise self.place.fail(name, "exactly one user message must stand before the first answer", "order")
        self.opened = True
        parts = read_parts(message, place=self.place, context=self.context, field=name)
        images = [part.image for part in parts if part.image]
        if len(images) > 1:
            raise self.place.fail(name, f"opens with {len(images)} pictures; expected the screenshot alone", "image")
        self.see(images)
        self.dialogue.initial = [screenshot(image) for image in images]
        words = "\n".join(part.text.strip() for part in parts if part.text).strip().removeprefix(TASK_PREFIX)
        self.dialogue.instruction = text(words, place=self.place, field=f"{name}.content", empty=False)

    def see(self, images: list[StoredImage]) -> None:
        if images:
            self.screen = images[-1]

    def assistant(self, message: Mapping[str, Any], name: str) -> None:
        if not self.opened:
            raise self.place.fail(name, "an answer stands before any user message", "order")
        parts = read_parts(message, place=self.place, context=self.context, field=name)
        if any(part.image for part in parts):
            raise self.place.fail(name, "an assistant message cannot hold a picture")
        words = "\n".join(part.text or "" for part in parts)
        raw_calls = message.get("tool_calls")
        if not raw_calls:
            return self.written_turn(words, name)
        think, action = split_response(words)
        reasoning = text(message.get("reasoning_content") or "", place=self.place, field=f"{name}.reasoning_content")
        thoughts = [*self.waiting, *(piece for piece in (reasoning.strip(), think) if piece)]
        calls, pending = [], _Calls([], [], [])
        screen = self.screen and (self.screen.width, self.screen.height)
        grid = Grid(self.context.coord_space, screen)
        for j, call in enumerate(listed(raw_calls, place=self.place, field=f"{name}.tool_calls")):
            where = f"{name}.tool_calls[{j}]"
            body = call.get("function", call) if isinstance(call, Mapping) else None
            if not isinstance(body, Mapping) or "name" not in body or "arguments" not in body:
                raise self.place.fail(where, "must hold a name and arguments")
            arguments = decoded(body["arguments"], place=self.place, field=f"{where}.arguments")
            read = self.read_tool(body["name"], arguments, grid, where)
            pending.ids.append(call.get("id"))
            pending.thoughts.append(isinstance(read, Thought))
            pending.answered.append(False)
            if isinstance(read, Thought):
                thoughts.append(read.words)
            else:
                calls.append(read)
        self.pending = pending
        if not calls:
            self.waiting = [thought for thought in thoughts if thought]
            return
        self.waiting = []
        self.dialogue.turns.append(
            agent_turn(
                len(self.dialogue.turns) + 1,
                think="\n\n".join(thoughts),
                action=action,
                calls=calls,
                place=self.place,
                field=name,
            )
        )

    def written_turn(self, words: str, name: str) -> None:
        """A response whose calls stand in its text, kept byte for byte."""
        if self.waiting or self.context.coord_space != "thousand":
            raise self.place.fail(name, "calls nothing, or calls in text whose coordinates cannot be converted", "call")
        try:
            turn = parse(words)
        except ProtocolError as error:
            raise self.place.fail(f"{name}.content", str(error), f"turn: {error.code}") from None
        parsed = Parsed(think=turn.think, action=turn.action, calls=stored_calls(turn.calls))
        index = len(self.dialogue.turns) + 1
        self.dialogue.turns.append(Turn(index=index, channel=turn.channel, text=words, parsed=parsed))
        count = len(turn.calls)
        self.pending = _Calls([None] * count, [False] * count, [False] * count)

    def answer(self, message: Mapping[str, Any], name: str) -> None:
        parts = read_parts(message, place=self.place, context=self.context, field=name)
        images = [part.image for part in parts if part.image]
        self.see(images)
        if message["role"] == "tool":
            if not self.answered_by(message, name):
                return
            found = [screenshot(part.image) if part.image else output(part.text or "") for part in parts]
            self.results += found or [output("")]  # a command may print nothing
            return
        words = "".join(part.text or "" for part in parts)
        if wrapped := _RESPONSE.fullmatch(words):
            self.results.append(output(wrapped[1]))
        elif len(parts) == 1 and images:
            self.results.append(screenshot(images[0]))
        elif parts:
            self.results.append(Observation(kind="user", parts=tuple(parts)))

    def answered_by(self, message: Mapping[str, Any], name: str) -> bool:
        """Whether the tool message answers a call (and not a thought, whose answer says nothing)."""
        pending, identity = self.pending, message.get("tool_call_id")
        open_calls = [i for i, done in enumerate(pending.answered) if not done] if pending else []
        if pending and identity is not None and any(i is not None for i in pending.ids):
            open_calls = [i for i in open_calls if pending.ids[i] == identity]
        if not open_calls:
            raise self.place.fail(name, f"answers no open call (tool_call_id {identity!r:.80})", "order")
        pending.answered[open_calls[0]] = True
        return not pending.thoughts[open_calls[0]]

    def close(self, last: bool = False) -> None:
        """Gives the turn before its results. In the middle of a record something must have answered it."""
        pending, turns = self.pending, self.dialogue.turns
        if pending is None:
            return
        if any(pending.answered) and not all(pending.answered):
            raise self.place.fail(self.field, f"turn {len(turns)}: only some of its calls are answered", "order")
        if not last and not self.results and not any(pending.thoughts):
            raise self.place.fail(self.field, f"turn {len(turns)}: nothing answers it before the next one", "order")
        if self.results:
            if not turns:
                raise self.place.fail(self.field, "something answers a thought before the first call", "order")
            turns[-1] = dataclasses.replace(turns[-1], results=(*turns[-1].results, *self.results))
        self.pending, self.results = None, []
