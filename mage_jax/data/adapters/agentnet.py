"""AgentNet, the desktop demonstrations of OpenCUA: JSONL, one task a line, pyautogui code per step.

Read: ``task_id, instruction, natural_language_task, actual_task, task_completed, alignment_score, efficiency_score,
task_difficulty, reason, traj: [{index, image, value: {observation, thought, action, code, last_step_correct,
last_step_redundant, reflection}}]``; ``domain`` and ``apps`` are let through. A step's picture is the screen *before*
its code runs.

Choices: the thought is ``observation`` followed by ``thought``, the Action line ``action``; steps whose
``last_step_correct`` is false or ``last_step_redundant`` is true stay as history but are not supervised;
``instruction`` is the task's text; ``task_completed`` is a model's opinion, so the outcome is "unverified" and the
opinion a label.

Uncertain, hence strict: that ``index`` counts steps from 0, that the two ``last_step_*`` flags speak of the step they
stand in, and how far a wheel click of each recording system goes (``ReadOptions.scroll_per_click``).
"""

from __future__ import annotations

from collections.abc import Iterator

from mage_jax.data.adapters.base import Adapter, Context, Grid, Item, identifier, items, text
from mage_jax.data.adapters.code import read_code
from mage_jax.data.adapters.turns import agent_turn, episode, screenshot
from mage_jax.data.episode_schema import Episode

FORMAT = "agentnet"
_LABELS = (
    "natural_language_task",
    "actual_task",
    "task_completed",
    "alignment_score",
    "efficiency_score",
    "task_difficulty",
    "reason",
    "domain",
    "apps",
)
_STEP = ("observation", "thought", "action", "code", "last_step_correct", "last_step_redundant", "reflection")


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One task to one episode. Raises AdapterError."""
    place = item.place
    record = context.fields(
        item.record(), place=place, field="", required=("task_id", "instruction", "traj"), optional=_LABELS
    )
    steps = items(record["traj"], place=place, field="traj")
    parts = []
    for i, step in enumerate(steps):
        field = f"traj[{i}]"
        step = context.fields(step, place=place, field=field, required=("index", "image", "value"))
        if type(step["index"]) is not int or step["index"] != i:
            raise place.fail(f"{field}.index", f"must count steps from 0; expected {i}, got {step['index']!r:.80}")
        value = context.fields(
            step["value"], place=place, field=f"{field}.value", required=("thought", "action", "code"), optional=_STEP
        )
        image = context.image(step["image"], place=place, field=f"{field}.image")
        parts.append((f"{field}.value", value, image))
    turns = []
    for i, (field, value, image) in enumerate(parts):
        flags = {}
        for name in ("last_step_correct", "last_step_redundant"):
            flags[name] = value.get(name)
            if flags[name] is not None and type(flags[name]) is not bool:
                raise place.fail(f"{field}.{name}", f"must be true, false or null, got {flags[name]!r:.80}")
        words = [
            text(value.get(name) or "", place=place, field=f"{field}.{name}").strip()
            for name in ("observation", "thought")
        ]
        turns.append(
            agent_turn(
                i + 1,
                think="\n".join(word for word in words if word),
                action=text(value["action"] or "", place=place, field=f"{field}.action"),
                calls=read_code(
                    text(value["code"], place=place, field=f"{field}.code"),
                    grid=Grid(context.coord_space, (image.width, image.height)),
                    scroll_per_click=context.options.scroll_per_click,
                    place=place,
                    field=f"{field}.code",
                ),
                results=[screenshot(parts[i + 1][2])] if i + 1 < len(parts) else [],
                supervised=flags["last_step_correct"] is not False and flags["last_step_redundant"] is not True,
                place=place,
                field=field,
            )
        )
    yield episode(
        context,
        format=FORMAT,
        record_id=identifier(record["task_id"], place=place, field="task_id"),
        place=place,
        prompt="agent",
        instruction=text(record["instruction"], place=place, field="instruction", empty=False),
        initial=(screenshot(parts[0][2]),),
        turns=turns,
        labels={name: record[name] for name in _LABELS if name in record},
    )


ADAPTER = Adapter(name=FORMAT, coord_space="unit", convert=convert)
