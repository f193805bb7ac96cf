"""OSWorld result folders: ``<domain>/<task id>/{traj.jsonl, result.txt, step_*.png}``, one episode a folder.

A line of ``traj.jsonl`` is ``step_num, action_timestamp, action, response, reward, done, info, screenshot_file`` (older
trees lack ``response``); lines of one ``step_num`` are the actions of one response, and a picture shows the state
*after* its action. The task's words are not in the folder: ``--tasks`` names the folder of task definitions,
``<domain>/<task id>.json`` with ``instruction``.

``action`` is pyautogui code in pixels, WAIT (3 seconds, the harness's pause), DONE, FAIL, or a call of the protocol as
an object ``{"name", "arguments"}`` (0-999 whatever ``--coord_space`` says), which is how a runner records bash; its
output then stands in ``info.output``. A response that the protocol's parser reads is kept byte for byte and gives the
calls, whatever code it was turned into; any other is split into thought and Action line and rewritten.

Choices: the picture before turn 1 is ``initial_state.png`` if there is one; without it turn 1 is history, not
supervised, as nobody acts without a view. ``result.txt`` holds the score, which is the reward: 1 is "success", less
"fail". Without it the outcome is "unverified"; a line ``{"Error": ...}`` makes it "env_fail".

Uncertain, hence strict: whether newer trees write other fields, and other forms of ``action``.
"""

from __future__ import annotations

import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

from mage_jax.agent.errors import ProtocolError
from mage_jax.agent.parser import Turn as ProtocolTurn
from mage_jax.agent.parser import parse
from mage_jax.data import strict_json
from mage_jax.data.adapters.base import Adapter, Context, Grid, Item, Place, text
from mage_jax.data.adapters.code import read_code
from mage_jax.data.adapters.turns import (
    agent_turn,
    computer,
    episode,
    output,
    screenshot,
    split_response,
    stored_calls,
)
from mage_jax.data.episode_schema import Episode, EvalResult, Observation, Outcome, Parsed, StoredImage, Turn

FORMAT = "osworld"
TRAJECTORY = "traj.jsonl"
WAIT_SECONDS = 3.0
_REQUIRED = ("step_num", "action")
_OPTIONAL = ("action_timestamp", "response", "reward", "done", "info", "screenshot_file")
_WORDS = {
    "WAIT": computer("wait", time=WAIT_SECONDS),
    "DONE": computer("terminate", status="success"),
    "FAIL": computer("terminate", status="failure"),
}


def files(path: pathlib.Path) -> list[pathlib.Path]:
    """Every trajectory below a folder."""
    return sorted(path.rglob(TRAJECTORY)) if path.is_dir() else [path]


def read(path: pathlib.Path) -> Iterator[Item]:
    """The whole folder is one record."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise Place(str(path), 1).fail("line", f"cannot be read ({error.strerror or error})") from None
    yield Item(Place(str(path), 1), raw, len(raw))


def convert(item: Item, context: Context) -> Iterator[Episode]:
    """One folder to one episode. Raises AdapterError, its line that of traj.jsonl."""
    file = pathlib.Path(item.place.file)
    folder, reader = file.parent, _Reader(context)
    for number, raw in enumerate(item.content.removesuffix(b"\n").split(b"\n"), start=1):
        reader.line(Place(str(file), number), raw)
    reader.flush()
    if not reader.turns:
        raise item.place.fail("line", "the trajectory has no action")
    domain, task_id = folder.parent.name, folder.name
    outcome, evaluation = _result(folder, reader.error)
    yield episode(
        context,
        format=FORMAT,
        record_id=f"{domain}/{task_id}",
        place=item.place,
        prompt="agent",
        instruction=_instruction(context, domain, task_id, item.place),
        initial=tuple(reader.initial),
        turns=reader.turns,
        outcome=outcome,
        reward=evaluation.score if evaluation else None,
        eval=evaluation,
        labels={"domain": domain},
    )


class _Reader:
    """Collects the lines of one response, then makes its turn."""

    def __init__(self, context: Context):
        self.context = context
        self.turns: list[Turn] = []
        self.initial: list[Observation] = []
        self.screen: StoredImage | None = None  # what the response of this step was given
        self.next_screen: StoredImage | None = None
        self.error: str | None = None
        self.step: int | None = None
        self.place: Place | None = None
        self.response = ""
        self.written: ProtocolTurn | None = None  # the response, where the protocol's parser reads it
        self.calls: list[dict[str, Any]] = []
        self.results: list[Observation] = []

    def line(self, place: Place, raw: bytes) -> None:
        record = strict_json.loads(raw, fail=place.fail)
        if isinstance(record, dict) and "Error" in record:
            self.error = text(str(record["Error"]), place=place, field="Error")
            return
        record = self.context.fields(record, place=place, field="", required=_REQUIRED, optional=_OPTIONAL)
        number = record["step_num"]
        if type(number) is not int or (self.step is not None and number not in (self.step, self.step + 1)):
            raise place.fail("step_num", f"must count up from {self.step}, got {number!r:.80}", "order")
        picture = None
        if record.get("screenshot_file") is not None:
            picture = self.picture(record["screenshot_file"], place)
        if number != self.step:
            self.flush()
            self.step, self.place = number, place
            self.response = text(record.get("response") or "", place=place, field="response")
            self.written = _written(self.response)
            if not self.turns:
                self.open(place, picture)
            self.next_screen = self.screen
        self.calls += self.read_action(record, place, picture)
        if picture is not None:
            # One view answers the whole response: the last. Outputs of commands all stay.
            self.results = [result for result in self.results if result.kind != "screenshot"] + [screenshot(picture)]
            self.next_screen = picture

    def picture(self, name: Any, place: Place) -> StoredImage:
        name = text(name, place=place, field="screenshot_file", empty=False)
        folder = pathlib.Path(place.file).parent
        try:
            return self.context.store_image((folder / name).read_bytes(), place=place, field="screenshot_file")
        except OSError as error:
            reason = f"{folder / name} cannot be read ({error.strerror or error})"
            raise place.fail("screenshot_file", reason, "image") from None

    def open(self, place: Place, picture: StoredImage | None) -> None:
        """The view before turn 1; without one, the screen's size is that of the picture after it."""
        first = pathlib.Path(place.file).parent / "initial_state.png"
        if first.is_file():
            self.screen = self.picture(first.name, place)
            self.initial = [screenshot(self.screen)]
        else:
            self.screen = picture

    def read_action(self, record: Any, place: Place, picture: StoredImage | None) -> list[dict[str, Any]]:
        action = record["action"]
        if isinstance(action, dict) and set(action) == {"name", "arguments"}:
            info = record.get("info")
            if action["name"] == "bash" and isinstance(info, dict) and "output" in info:
                self.results.append(output(text(info["output"], place=place, field="info.output")))
            return [action]
        code = text(action, place=place, field="action", empty=False).strip()
        if self.written is not None:
            return []
        if code in _WORDS:
            return [_WORDS[code]]
        screen = self.screen or picture
        return read_code(
            code,
            grid=Grid(self.context.coord_space, screen and (screen.width, screen.height)),
            scroll_per_click=self.context.options.scroll_per_click,
            place=place,
            field="action",
        )

    def flush(self) -> None:
        if self.place is None:
            return
        index, place = len(self.turns) + 1, self.place
        supervised = bool(self.turns or self.initial)
        results = tuple(self.results)
        if self.written is None:
            think, action = split_response(self.response)
            made = agent_turn(
                index,
                think=think,
                action=action,
                calls=self.calls,
                results=results,
                supervised=supervised,
                place=place,
                field="action",
            )
        else:
            turn = self.written
            parsed = Parsed(think=turn.think, action=turn.action, calls=stored_calls(turn.calls))
            made = Turn(
                index=index,
                supervised=supervised,
                channel=turn.channel,
                text=turn.raw,
                parsed=parsed,
                results=results,
            )
        self.turns.append(made)
        self.screen = self.next_screen
        self.place, self.calls, self.results = None, [], []


def _written(response: str) -> ProtocolTurn | None:
    try:
        return parse(response)
    except ProtocolError:
        return None


def _instruction(context: Context, domain: str, task_id: str, place: Place) -> str:
    if context.options.tasks is None:
        raise place.fail("instruction", "is not in a result folder; give --tasks, the folder of task definitions")
    path = context.options.tasks / domain / f"{task_id}.json"
    there = Place(str(path), 1)
    try:
        task = strict_json.loads(path.read_bytes(), fail=there.fail)
    except OSError as error:
        raise place.fail("instruction", f"{path} cannot be read ({error.strerror or error})", "task") from None
    if not isinstance(task, dict):
        raise there.fail("line", "must be a JSON object")
    return text(task.get("instruction"), place=there, field="instruction", empty=False)


def _result(folder: pathlib.Path, error: str | None) -> tuple[Outcome, EvalResult | None]:
    """The outcome by the runner's error, or by result.txt."""
    if error is not None:
        return Outcome(kind="env_fail", detail=error), None
    path = folder / "result.txt"
    if not path.is_file():
        return Outcome(kind="unverified", detail="no result.txt"), None
    place = Place(str(path), 1)
    content = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        score = float(json.loads(content.lower()))  # some trees write True and False
    except (TypeError, ValueError):
        raise place.fail("line", f"must be a score, got {content!r:.80}") from None
    if not math.isfinite(score) or not 0 <= score <= 1:
        raise place.fail("line", f"a score lies in [0, 1], got {score}")
    evaluation = EvalResult(score=score, parts={}, log_ref=None, verifier_hash=None)
    return Outcome(kind="success" if score == 1 else "fail"), evaluation


ADAPTER = Adapter(name=FORMAT, coord_space="pixel", convert=convert, files=files, read=read)
