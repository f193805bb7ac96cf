"""OpenHands software-engineering traces: messages with its own tools, rewritten to ``bash``.

Read: ``messages`` or ``trajectory`` (a list, or a JSON string of one) with ``trajectory_id`` or ``instance_id``;
``resolved`` (1, 0, -1 for unknown, or a bool), ``reward``, ``exit_status``, ``finish_reason`` and ``license`` where
present; ``tools`` and the other fields of the public releases are let through unread.

Tools: ``execute_bash`` is bash. ``str_replace_editor`` becomes a command with the same effect on the file: ``view``
prints a file by ``cat -n`` and lists a folder by ``find``, ``create`` is a quoted here-document, ``str_replace`` and
``insert`` are small Python programs that fail as the editor does; the answers stay the editor's own words. ``think``
moves into the thought of the next turn that acts. ``finish`` is ``terminate``.

Errors, since nothing equal exists: ``undo_edit``, input to a running program (``is_input``), ``execute_ipython_cell``,
``browser``, ``task_tracker``, messages without a call.

Uncertain, hence strict: the argument names of the tools (``is_input`` may be "true"/"false" in a string), and
``task_completed`` of ``finish`` ("true", "false", "partial"; absent in most releases, which then means success).
"""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from mage_jax.data import strict_json
from mage_jax.data.adapters.base import Adapter, Context, Grid, Item, Place, decoded, identifier, text
from mage_jax.data.adapters.messages import Thought, read_dialogue
from mage_jax.data.adapters.turns import agent_turn, bash, computer, describe, episode, tool_call
from mage_jax.data.episode_schema import Episode, Outcome, Turn

FORMAT = "openhands"
_OPTIONAL = (
    "messages",
    "trajectory",
    "trajectory_id",
    "instance_id",
    "resolved",
    "reward",
    "exit_status",
    "finish_reason",
    "license",
    "language",
    "repo",
    "tools",
    "metadata",
    "hf_dataset_name",
    "image",
    "model_patch",
    "gen_tests_correct",
    "pred_passes_gen_tests",
)
_LABELS = ("resolved", "reward", "exit_status", "finish_reason", "language", "repo", "instance_id")
_FOLDER_ANSWER = "Here's the files and directories up to"
_VIEW = "cat -n "


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One trace to one episode. Raises AdapterError."""
    place = item.place
    record = context.fields(item.record(), place=place, field="", required=(), optional=_OPTIONAL)
    field = "messages" if "messages" in record else "trajectory"
    messages = decoded(record.get(field), place=place, field=field)
    id_field = "trajectory_id" if "trajectory_id" in record else "instance_id"
    record_id = identifier(record.get(id_field), place=place, field=id_field)
    read_tool = functools.partial(_read_tool, place)
    dialogue = read_dialogue(messages, place=place, context=context, read_tool=read_tool, field=field)
    outcome, reward = _outcome(record, place)
    yield episode(
        context,
        format=FORMAT,
        record_id=record_id,
        task_id=identifier(record.get("instance_id", record_id), place=place, field="instance_id"),
        place=place,
        licence=None if record.get("license") is None else text(record["license"], place=place, field="license"),
        prompt="agent",
        system=None,  # it describes the foreign tools
        instruction=dialogue.instruction,
        initial=tuple(dialogue.initial),
        turns=[_with_folders_listed(turn, place, field) for turn in dialogue.turns],
        outcome=outcome,
        reward=reward,
        labels={name: record[name] for name in _LABELS if record.get(name) is not None},
    )


def _with_folders_listed(turn: Turn, place: Place, field: str) -> Turn:
    """Whether ``view`` shows a file or a folder, only its answer says; the folder's command is put in here."""
    outputs = [result.parts[0].text or "" for result in turn.results if result.kind == "output"]
    if turn.channel != "bash" or not any(text.startswith(_FOLDER_ANSWER) for text in outputs):
        return turn
    before = [tool_call(strict_json.encode(call), place=place, field=field) for call in turn.parsed.calls]
    calls = []
    for call, answer in zip(before, outputs, strict=False):
        path = call.command.removeprefix(_VIEW)
        is_folder = path != call.command and answer.startswith(_FOLDER_ANSWER)
        calls.append(bash(f"find -L {path} -maxdepth 2 -not -path '*/.*' | sort" if is_folder else call.command))
    return agent_turn(
        turn.index,
        think=turn.parsed.think,
        action=None if turn.parsed.action == describe(before) else turn.parsed.action,
        calls=calls,
        results=turn.results,
        place=place,
        field=f"{field}: turn {turn.index}",
    )


def _outcome(record: Mapping[str, Any], place: Place) -> tuple[Outcome, float | None]:
    """The hidden tests' word where the record has it."""
    field = "resolved" if record.get("resolved") is not None else "reward"
    value = record.get(field)
    if value is None or (field == "resolved" and value == -1):
        return Outcome(kind="unverified"), None
    if value not in (0, 1):
        raise place.fail(field, f"must be 0, 1{' or -1' if field == 'resolved' else ''}, got {value!r:.80}")
    return Outcome(kind="success" if value else "fail", detail=field), float(value)


# Tools


def _read_tool(place: Place, name: Any, arguments: Any, grid: Grid, field: str) -> dict[str, Any] | Thought:
    if not isinstance(arguments, Mapping):
        raise place.fail(f"{field}.arguments", f"must be an object, got {type(arguments).__name__}")
    reader = _TOOLS.get(name) if isinstance(name, str) else None
    if reader is None:
        raise place.fail(f"{field}.name", f"unknown tool {name!r:.80}; known: {', '.join(_TOOLS)}", "foreign tool")
    return reader(_Arguments(arguments, place, f"{field}.arguments"))


class _Arguments:
    """A tool's arguments, each read with its name in the error."""

    def __init__(self, values: Mapping[str, Any], place: Place, field: str):
        self.values, self.place, self.field = values, place, field

    def only(self, *names: str) -> None:
        for name in self.values:
            if name not in names and name != "security_risk":  # a rating for the harness
                raise self.fail(name, "unknown argument")

    def string(self, name: str) -> str:
        return text(self.values.get(name), place=self.place, field=f"{self.field}.{name}")

    def flag(self, name: str) -> bool:
        value = self.values.get(name, False)
        if value not in (True, False, "true", "false"):
            raise self.fail(name, f"must be true or false, got {value!r:.80}")
        return value in (True, "true")

    def integer(self, name: str, value: Any) -> int:
        if type(value) is not int:
            raise self.fail(name, f"must be an integer, got {value!r:.80}")
        return value

    def fail(self, name: str, reason: str) -> Exception:
        return self.place.fail(f"{self.field}.{name}", reason, "tool")


def _execute_bash(arguments: _Arguments) -> dict[str, Any]:
    arguments.only("command", "is_input", "timeout")
    if arguments.flag("is_input"):
        raise arguments.fail("is_input", "input to a running program has no equal in the protocol")
    return bash(arguments.string("command"))


def _think(arguments: _Arguments) -> Thought:
    arguments.only("thought")
    return Thought(arguments.string("thought").strip())


def _finish(arguments: _Arguments) -> dict[str, Any]:
    arguments.only("message", "task_completed")
    completed = arguments.values.get("task_completed", True)
    if completed not in (True, False, "true", "false", "partial"):
        raise arguments.fail("task_completed", f"must be true, false or partial, got {completed!r:.80}")
    message = {"msg_to_user": arguments.string("message")} if "message" in arguments.values else {}
    return computer("terminate", status="success" if completed in (True, "true") else "failure", **message)


def _editor(arguments: _Arguments) -> dict[str, Any]:
    arguments.only("command", "path", "file_text", "old_str", "new_str", "insert_line", "view_range")
    command, path = arguments.string("command"), arguments.string("path")
    if command == "view":
        shown = f"{_VIEW}{shlex.quote(path)}"
        view_range = arguments.values.get("view_range")
        if view_range is None:
            return bash(shown)
        if not isinstance(view_range, list) or len(view_range) != 2:
            raise arguments.fail("view_range", f"must be [first, last], got {view_range!r:.80}")
        first, last = (arguments.integer("view_range", value) for value in view_range)
        return bash(f"{shown} | sed -n '{first},{'$' if last == -1 else last}p'")
    if command == "create":
        return bash(_here_document(f"cat > {shlex.quote(path)}", arguments.string("file_text")))
    if command == "str_replace":
        new = arguments.string("new_str") if arguments.values.get("new_str") is not None else ""
        return bash(_python(_REPLACE, path=path, old=arguments.string("old_str"), new=new))
    if command == "insert":
        at = arguments.integer("insert_line", arguments.values.get("insert_line"))
        return bash(_python(_INSERT, path=path, at=at, new=arguments.string("new_str")))
    raise arguments.fail("command", f"the editor's {command!r:.80} has no command of equal effect")


_REPLACE = """\
from pathlib import Path
file, old, new = Path({path!r}), {old!r}, {new!r}
text = file.read_bytes().decode()
assert text.count(old) == 1, f"old text occurs {{text.count(old)}} times"
file.write_bytes(text.replace(old, new).encode())"""
_INSERT = """\
from pathlib import Path
file, at, new = Path({path!r}), {at!r}, {new!r}
lines = file.read_bytes().decode().split("\\n")
assert 0 <= at <= len(lines), f"the file has {{len(lines)}} lines"
file.write_bytes("\\n".join(lines[:at] + new.split("\\n") + lines[at:]).encode())"""


def _python(program: str, **values: Any) -> str:
    return _here_document("python3 -", program.format(**values))


def _here_document(command: str, body: str) -> str:
    """A command that reads ``body``, quoted so that the shell changes nothing; the end mark is a line it lacks."""
    mark, lines = "EOF", body.split("\n")
    while mark in lines:
        mark += "_"
    newline = "" if body.endswith("\n") else "\n"
    return f"{command} <<'{mark}'\n{body}{newline}{mark}"


_TOOLS = {
    "execute_bash": _execute_bash,
    "str_replace_editor": _editor,
    "think": _think,
    "finish": _finish,
}

ADAPTER = Adapter(name=FORMAT, coord_space="thousand", convert=convert)
