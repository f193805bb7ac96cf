"""SWE-agent traces: one ``<instance>.traj`` file a run, ``{"trajectory": [...], "info": {...}, "history": [...]}``.

A step is ``{response, thought, action, observation, state, query}``: ``action`` a shell command, ``observation`` what
it printed. ``submit`` is ``terminate(success)``. The task's text is the last message of the first step's ``query``
that a user wrote, or else the first user message of ``history`` that is no demonstration.

SWE-agent gives its shells commands of its own (``open``, ``edit``, ``search_dir``, ...): a step that calls one is an
error, as another machine's shell does not have it. The end state is not judged in the file: the outcome is
"unverified" and ``info.exit_status`` a label.

Uncertain, hence strict: where the task's text stands differs between releases (no such message is an error); an action
that is empty (the run's own format errors) is an error.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterator, Mapping
from typing import Any

from mage_jax.data.adapters.base import Adapter, Context, Item, Place, items, text
from mage_jax.data.adapters.messages import read_parts
from mage_jax.data.adapters.turns import agent_turn, bash, computer, episode, output
from mage_jax.data.episode_schema import Episode

FORMAT = "sweagent"
_STEP = ("response", "state", "query", "messages", "execution_time", "extra_info")
_OPTIONAL = ("info", "history", "environment", "replay_config", "trajectory_format")
OWN_COMMANDS = re.compile(
    r"(open|goto|scroll_up|scroll_down|create|edit|insert|search_dir|search_file|find_file|str_replace_editor|filemap|"
    r"view_image|submit|exit_\w+)"
)


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One file to one episode. Raises AdapterError."""
    place = item.place
    record = context.fields(item.record(), place=place, field="", required=("trajectory",), optional=_OPTIONAL)
    info = record.get("info") or {}
    if not isinstance(info, Mapping):
        raise place.fail("info", f"must be an object, got {type(info).__name__}")
    steps = items(record["trajectory"], place=place, field="trajectory")
    turns = []
    for i, step in enumerate(steps):
        field = f"trajectory[{i}]"
        step = context.fields(
            step, place=place, field=field, required=("thought", "action", "observation"), optional=_STEP
        )
        action = text(step["action"], place=place, field=f"{field}.action", empty=False).strip()
        observation = text(step["observation"] or "", place=place, field=f"{field}.observation")
        is_end = action == "submit"
        if is_end and i + 1 < len(steps):
            raise place.fail(f"{field}.action", "submits before the last step", "order")
        turns.append(
            agent_turn(
                i + 1,
                think=text(step["thought"], place=place, field=f"{field}.thought"),
                action=None,
                calls=[computer("terminate", status="success") if is_end else _command(action, place, field)],
                results=[] if is_end else [output(observation)],
                place=place,
                field=field,
            )
        )
    record_id = pathlib.Path(place.file).stem
    yield episode(
        context,
        format=FORMAT,
        record_id=record_id,
        place=place,
        prompt="agent",
        instruction=_instruction(record, steps[0], place, context),
        turns=turns,
        labels={"exit_status": info["exit_status"]} if isinstance(info.get("exit_status"), str) else {},
    )


def _command(action: str, place: Place, field: str) -> dict[str, Any]:
    word = action.split()[0]
    if OWN_COMMANDS.fullmatch(word):
        raise place.fail(f"{field}.action", f"{word} is SWE-agent's own command, no shell has it", "foreign tool")
    return bash(action)


def _instruction(record: Mapping[str, Any], first: Mapping[str, Any], place: Place, context: Context) -> str:
    for field, messages, order in (
        ("trajectory[0].query", first.get("query"), -1),
        ("history", record.get("history"), 1),
    ):
        for message in (messages if isinstance(messages, list) else [])[::order]:
            if isinstance(message, Mapping) and message.get("role") == "user" and not message.get("is_demo"):
                parts = read_parts(message, place=place, context=context, field=field)
                words = "\n".join(part.text for part in parts if part.text)
                return text(words, place=place, field=field, empty=False)
    raise place.fail("history", "no user message holds the task's text, nor does trajectory[0].query")


def files(path: pathlib.Path) -> list[pathlib.Path]:
    """Every ``.traj`` below a folder, or the file."""
    return sorted(path.rglob("*.traj")) if path.is_dir() else [path]


ADAPTER = Adapter(name=FORMAT, coord_space="thousand", convert=convert, files=files)
