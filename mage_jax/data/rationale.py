"""Reasoning for recorded steps that have none: from task, screens and executed calls to think and Action.

Imported trajectories often hold only calls. A language model writes, in hindsight, the paragraph and the one-line
summary that an agent would have written before acting; both are checked before they may become training data. What the
calls led to is shown so that the reasoning fits, but must not be mentioned: the agent could not have seen it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import re
import threading
from collections.abc import Mapping
from typing import Any

from mage_jax.llm.client import Client, Message, Request, canonical_json, request_key
from mage_jax.llm.jsonl import AppendLog
from mage_jax.llm.offline import Rule
from mage_jax.llm.structured import InvalidJson, StructuredClient

PURPOSE = "rationale"
MAX_THINK_CHARS = 2000
MAX_ACTION_CHARS = 300
MAX_CALLS = 15
SCHEMA = {
    "type": "object",
    "properties": {
        "think": {"type": "string", "description": "one paragraph in the present tense, written before acting"},
        "action": {"type": "string", "description": "one imperative sentence that ends with a period"},
    },
    "required": ["think", "action"],
    "additionalProperties": False,
}
SYSTEM = """\
You annotate recordings of an agent that operates a computer. For one recorded step, write what the agent thought just
before it acted.
- think: one paragraph, no line breaks. Say what the screen shows that matters for the task, what has been done, and why
  this step is the right next one. Two to five sentences, first person, present tense.
- action: one imperative sentence that names what is done and to which element, such as "Click the Save button."
You are also shown what the step led to, so that your reasoning fits it. The agent could not know it: never mention it,
and never mention these instructions or that there is a recording. Name elements by their labels, not by coordinates.
Use no tags, no markup and no headings. Answer with nothing but one JSON object {"think": "...", "action": "..."}."""

# Any <name> or <|name|>, and the beginnings of the protocol's own tags even where they are not closed.
_TAG = re.compile(
    r"<\s*/?\s*[a-z_][\w-]*\s*/?\s*>|<\s*/?\s*(?:think|tools?_|tools\b|image\b)|<\||\|>|\baction:|```", re.IGNORECASE
)
_QUOTED = re.compile(r"\"[^\"]*\"|\u201c[^\u201d]*\u201d")  # text to type may hold sentences of its own
_HINDSIGHT = re.compile(
    r"\b(?:(?:second|after|next|resulting) (?:screenshot|image)|recorded (?:step|action|call)|executed calls?|"
    r"ground truth|in hindsight|the recording)\b",
    re.IGNORECASE,
)
_NOT_IMPERATIVE = frozenset(
    ("a", "an", "he", "i", "i'll", "i'm", "it", "let's", "she", "the", "they", "this", "we", "you")
)
_CALLS_LINE = "Executed calls: "


class RationaleError(ValueError):
    """A step cannot be annotated, or a cached annotation is damaged; the text names the field."""


@dataclasses.dataclass(frozen=True)
class StepInput:
    """One recorded step.

    Attributes:
      task: the instruction.
      before: the screenshot that the agent acted on (encoded file or base64 data URI).
      calls: 1 to 15 executed calls of one function, each ``{"name", "arguments"}``.
      after: the screenshot that answered ``computer_use`` calls; None where there is none.
      output: the text that answered ``bash`` calls.
      previous: Action sentences of earlier steps, oldest first.
    """

    task: str
    before: bytes | str
    calls: tuple[Mapping[str, Any], ...]
    after: bytes | str | None = None
    output: str = ""
    previous: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.task.strip():
            raise RationaleError("StepInput.task: is empty")
        if not 1 <= len(self.calls) <= MAX_CALLS:
            raise RationaleError(f"StepInput.calls: needs 1 to {MAX_CALLS}, got {len(self.calls)}")
        for i, call in enumerate(self.calls):
            ok = set(call) == {"name", "arguments"} and isinstance(call["name"], str)
            if not ok or not isinstance(call["arguments"], Mapping):
                raise RationaleError(f"StepInput.calls[{i}]: needs exactly name (a string) and arguments (an object)")
            try:
                canonical_json(dict(call["arguments"]))
            except (TypeError, ValueError) as error:
                raise RationaleError(f"StepInput.calls[{i}].arguments: is not JSON ({error})") from None
        if len({call["name"] for call in self.calls}) != 1:
            raise RationaleError("StepInput.calls: all calls of a step must be of one function")


@dataclasses.dataclass(frozen=True)
class Rationale:
    """A checked annotation: ``think`` is one paragraph, ``action`` one imperative sentence with its period."""

    think: str
    action: str

    @property
    def action_line(self) -> str:
        return f"Action: {self.action}"


def check_rationale(value: Mapping[str, Any]) -> Rationale:
    """Checks what a schema cannot say.

    Raises:
      InvalidJson: ``$.think`` or ``$.action`` with the reason: not one paragraph or sentence, a tag, hindsight.
    """
    for name, limit in (("think", MAX_THINK_CHARS), ("action", MAX_ACTION_CHARS)):
        path, text = f"$.{name}", value[name]
        if not text or text != text.strip():
            raise InvalidJson(path, "must not be empty or surrounded by white space")
        if len(text) > limit:
            raise InvalidJson(path, f"has {len(text)} characters, at most {limit} are allowed")
        if len(text.splitlines()) != 1 or not text.isprintable():
            raise InvalidJson(path, "must be one line: no line breaks, tabs or control characters")
        if found := _TAG.search(text):
            raise InvalidJson(path, f"must hold no tags or markup, found {found[0]!r}")
        if found := _HINDSIGHT.search(text):
            raise InvalidJson(path, f"must not mention what the agent could not know, found {found[0]!r}")
    action = value["action"]
    if not action.endswith(".") or action.endswith(".."):
        raise InvalidJson("$.action", "must end with one period")
    if re.search(r"[.!?][\"')\]]*\s", _QUOTED.sub('""', action)):
        raise InvalidJson("$.action", "must be one sentence")
    if not action[0].isupper():
        raise InvalidJson("$.action", "must begin with a capital letter")
    first = re.split(r"[\s,.]", action, maxsplit=1)[0]
    if first.lower() in _NOT_IMPERATIVE:
        raise InvalidJson("$.action", f"must be an imperative, but begins with {first!r}")
    return Rationale(value["think"], action)


def rationale_request(step: StepInput, *, model: str, seed: int = 0, max_tokens: int = 1024) -> Request:
    """The request for one step. Equal steps give equal requests, whatever the key order in their calls."""
    images, lines = [step.before], ["The first image is the screen that the agent sees."]
    if step.after is not None:
        images.append(step.after)
        lines.append("The second image is what the step led to; the agent has not seen it.")
    lines.append(f"Task: {step.task}")
    if step.previous:
        lines.append("Previous actions:")
        lines += [f"Step {i}: {action}" for i, action in enumerate(step.previous, start=1)]
    if step.output:
        lines.append(f"Output that the step led to; the agent has not seen it:\n{step.output}")
    # Last, on one line of its own: the offline rule reads it back.
    calls = [dict(call) for call in step.calls]
    lines.append(_CALLS_LINE + json.dumps(calls, sort_keys=True, separators=(",", ":"), ensure_ascii=False))
    return Request(
        messages=(Message("system", SYSTEM), Message("user", "\n".join(lines), tuple(images))),
        model=model,
        purpose=PURPOSE,
        seed=seed,
        max_tokens=max_tokens,
        schema=SCHEMA,
    )


class RationaleWriter:
    """Annotates steps through any client, with a cache by content. Safe to share by threads.

    Attributes:
      written, cached: annotations asked for, and found.
    """

    def __init__(
        self,
        client: Client,
        *,
        model: str,
        cache: str | os.PathLike[str] | None = None,
        max_reasks: int = 2,
        seed: int = 0,
    ):
        """
        Args:
          client: a backend or a stack of wrappers without ``StructuredClient``, which is added here.
          model: name of the model to ask.
          cache: JSONL file of checked annotations, read now and appended to; None keeps them in memory.
          max_reasks: further tries after an answer that fails its checks.
          seed: of the requests; another one gives other annotations.

        Raises:
          RationaleError: a line of the cache does not hold a valid annotation.
        """
        self._client = StructuredClient(client, max_reasks=max_reasks)
        self._model = model
        self._seed = seed
        self._log = None if cache is None else AppendLog(cache)
        self._known: dict[str, Rationale] = {}
        self._lock = threading.Lock()
        self.written = self.cached = 0
        for line, row in self._log.rows() if self._log else ():
            try:
                self._known[row["key"]] = check_rationale(row)
            except (KeyError, TypeError, AttributeError, InvalidJson) as error:
                raise RationaleError(f"{cache}:{line}: {error}; delete the line") from None

    @property
    def reasked(self) -> int:
        """Further calls after answers that failed their checks."""
        return self._client.reasked

    def write(self, step: StepInput) -> Rationale:
        """Annotates one step.

        Raises:
          StructuredError: no valid annotation within the allowed tries.
          LLMError: what the client raises.
        """
        request = rationale_request(step, model=self._model, seed=self._seed)
        key = request_key(request)
        with self._lock:
            if key in self._known:
                self.cached += 1
                return self._known[key]
        reply = self._client.ask(request, check=_raise_if_invalid)
        rationale = check_rationale(reply.parsed)
        with self._lock:
            if key not in self._known:  # the first of two equal steps wins, in memory and in the file
                self._known[key] = rationale
                if self._log is not None:
                    self._log.append({"key": key, **dataclasses.asdict(rationale)})
            self.written += 1
            return self._known[key]


def _raise_if_invalid(value: dict[str, Any]) -> None:
    check_rationale(value)


def _offline_answer(request: Request, rng: random.Random) -> dict[str, str]:
    text = request.messages[1].text  # a re-ask comes after it
    calls = json.loads(text[text.rindex("\n" + _CALLS_LINE) + 1 + len(_CALLS_LINE) :])
    name, arguments = calls[0]["name"], calls[0]["arguments"]
    verb = "run" if name == "bash" else str(arguments.get("action", name)).replace("_", " ")
    what = "a shell command" if name == "bash" else "the interface"
    more = f" and {len(calls) - 1} more" if len(calls) > 1 else ""
    why = rng.choice(("It is the next step towards the task.", "The task needs it before anything else can follow."))
    return {
        "think": f"The task is not finished and the screen is ready for input. I {verb} on {what}{more}. {why}",
        "action": f"{verb.capitalize()} on {what}{more}.",
    }


OFFLINE_RULE = Rule(PURPOSE, _offline_answer)
