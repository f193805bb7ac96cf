"""The structs of tasks and episodes; ``mage_jax.data.episodes`` reads, writes and checks them.

Calls are in the protocol's own terms, coordinates in [0, 999] on both axes; ``Episode.coord_space`` only remembers
what the source used. Times are seconds, log-probabilities nats.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal

from mage_jax.data import strict_json

FORMAT_VERSION = 1

Channel = Literal["computer_use", "bash", "none"]  # of a turn; "none": it holds no call that was read
CoordSpace = Literal["pixel", "unit", "thousand"]
# "unverified": nobody judged the end state (a demonstration). The others are those of the RL design.
OutcomeKind = Literal[
    "success",
    "fail",
    "step_budget",
    "context_overflow",
    "parse_fail",
    "turn_cap",
    "agent_timeout",
    "env_fail",
    "eval_fail",
    "infra_timeout",
    "aborted",
    "unverified",
]
# Outcomes without a reward: what happened says nothing about the agent. Never in group statistics, never trained by RL.
EXCLUDED = frozenset({"env_fail", "eval_fail", "infra_timeout", "aborted", "unverified"})


# Tasks


@dataclasses.dataclass(frozen=True, kw_only=True)
class EnvSpec:
    """Where a task runs. ``image`` names a snapshot; ``screen`` is (width, height) in pixels; ``clock`` ISO time."""

    rung: str
    image: str | None = None
    screen: tuple[int, int] | None = None
    network: Literal["none", "allowlist"] = "none"
    clock: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class SetupStep:
    """One OSWorld-compatible step of setup or postconfig."""

    type: str
    parameters: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asset:
    """A file that the setup needs; never fetched without its hash."""

    path: str
    sha256: str
    bytes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class VerifierSpec:
    """How the end state is judged. Never shown to the agent: see ``TaskSpec.for_agent``."""

    kind: Literal["program", "osworld", "rubric", "web"]
    entry: str
    params: Mapping[str, Any]
    expected_ref: str | None = None
    postconfig: tuple[SetupStep, ...] = ()
    conj: Literal["and", "or"] = "and"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """Budgets: turns, seconds of agent and tool time in total, seconds of one tool call, tokens of one turn."""

    max_turns: int = 50
    agent_s: float = 3600.0
    tool_s: float = 300.0
    tokens: int = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class TaskSpec:
    """One task. ``instruction`` is the only text that the agent sees; ``task_id`` may be ``digest()``."""

    format_version: int = FORMAT_VERSION
    run_id: str
    created_ns: int  # 0: not recorded
    task_id: str
    source: str
    licence: str
    round: int = 0
    skill_ids: tuple[str, ...] = ()
    apps: tuple[str, ...] = ()
    domain: str
    instruction: str
    env: EnvSpec
    setup: tuple[SetupStep, ...] = ()
    assets: tuple[Asset, ...] = ()
    verifier: VerifierSpec | None = None
    channels: tuple[Literal["computer_use", "bash"], ...]
    limits: Limits = Limits()
    infeasible: bool = False  # the right end is terminate(failure)
    oracle_ref: str | None = None
    digests: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gates: Mapping[str, bool] = dataclasses.field(default_factory=dict)
    split: Literal["rl", "sft", "eval"]
    contamination: str | None = None

    def for_agent(self) -> TaskSpec:
        """The copy that may lie beside the agent: without verifier, oracle and their digests."""
        return dataclasses.replace(self, verifier=None, oracle_ref=None, digests={}, gates={})

    def digest(self) -> str:
        """blake2b of everything that makes the task what it is (not its id, run, time, gates or split)."""
        same = {"task_id": "", "run_id": "", "created_ns": 0, "gates": {}, "split": "sft", "contamination": None}
        text = strict_json.dumps(strict_json.encode(dataclasses.replace(self, **same)), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# Turns


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredImage:
    """A picture of the image store and its size in pixels."""

    sha256: str
    width: int
    height: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A piece of an observation: text or a picture, exactly one."""

    text: str | None = None
    image: StoredImage | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observation:
    """What answers a turn, or opens an episode.

    "screenshot": one picture, taken after all calls of the turn. "output": one text, merged stdout and stderr of one
    command. "user": what a person wrote, text and pictures in order. ``seconds`` is how long it took, None if unknown.
    """

    kind: Literal["screenshot", "output", "user"]
    parts: tuple[Part, ...]
    seconds: float | None = None
    status: Literal["ok", "error", "timeout"] = "ok"

    @property
    def images(self) -> tuple[StoredImage, ...]:
        return tuple(part.image for part in self.parts if part.image is not None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call:
    """One tool call: ``{"name": ..., "arguments": {...}}`` of the protocol."""

    name: str
    arguments: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Parsed:
    """A response taken apart. ``action`` is the one-line summary that later prompts fold to; None if it has none."""

    think: str | None
    action: str | None
    calls: tuple[Call, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnError:
    """Why a response could not be executed: the error's class name and its message."""

    kind: str
    message: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplerSpec:
    """The distribution that the tokens were drawn from. ``top_k`` 0 is off."""

    temperature: float
    top_p: float
    top_k: int
    seed: int
    max_new_tokens: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptImage:
    """A picture of the prompt: patch grid (frames, rows, columns), and its tokens ``[start, end)`` in prompt_ids."""

    sha256: str
    width: int
    height: int
    grid: tuple[int, int, int]
    token_span: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Window:
    """Turn indices that the prompt held folded, whole, and those whose following screenshot it showed (0: initial)."""

    folded: tuple[int, ...]
    full: tuple[int, ...]
    shots: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampled:
    """Exactly what the engine read and drew. Known for turns of our own policy, None for imported ones.

    ``gen_logp[i]`` is log mu of ``gen_ids[i]``, under the weights of version ``gen_version[i]``.
    """

    prompt_ids: tuple[int, ...]
    gen_ids: tuple[int, ...]
    gen_logp: tuple[float, ...]
    gen_version: tuple[int, ...]
    sampler: SamplerSpec
    images: tuple[PromptImage, ...]
    window: Window
    finish: Literal["stop", "length", "abort"]
    queue_s: float
    gen_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Turn:
    """One generation and what answered it.

    Attributes:
      index: from 1; resampled attempts at the same turn share it, the last may be accepted.
      attempt: from 0.
      accepted: whether its calls were executed and it stands in later prompts.
      supervised: whether supervised training may learn from it (a demonstrator's mistake stays as history only).
      channel: of its calls.
      text: the raw response, exactly; never edited.
      parsed, error: one of the two.
      results: in order; one screenshot for computer_use, one output a command for bash.
      sampled: token ids and log-probs, None when unknown.
    """

    index: int
    attempt: int = 0
    accepted: bool = True
    supervised: bool = True
    channel: Channel
    text: str
    parsed: Parsed | None
    error: TurnError | None = None
    results: tuple[Observation, ...] = ()
    sampled: Sampled | None = None


# Episodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Source:
    """Where an episode comes from: format read or program that wrote it, data set, file:line there, licence."""

    format: str
    name: str
    place: str
    licence: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """The outcome class and a word on it."""

    kind: OutcomeKind
    detail: str = ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalResult:
    """What the verifier said. ``repeat_agrees`` is None when it ran once."""

    score: float
    parts: Mapping[str, float]
    log_ref: str | None
    verifier_hash: str | None
    repeat_agrees: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Versions:
    """Weight versions: when the episode started, and the oldest and newest that generated a token of it."""

    start: int
    min: int
    max: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Episode:
    """A task's turns, complete in itself for supervised training.

    Attributes:
      prompt: "agent", the full agent schema; "grounding", the click-only prompt; "chat", plain conversation, whose
        opening message is ``initial`` and whose ``instruction`` is empty.
      system: the source's own system text, None for the project's.
      screen: (width, height) of the screenshots in pixels, None without any or when they differ.
      initial: what stood beside the instruction before turn 1.
      reward: None exactly when the outcome is in ``EXCLUDED``.
      labels: what the source says about it (scores, difficulty, ...), untouched.
    """

    format_version: int = FORMAT_VERSION
    run_id: str
    created_ns: int  # 0: not recorded
    episode_id: str
    task_id: str
    group_id: str | None = None
    slot: str | None = None
    attempt: int = 0
    seed: int | None = None
    host: str | None = None
    source: Source
    prompt: Literal["agent", "grounding", "chat"]
    system: str | None = None
    instruction: str
    coord_space: CoordSpace
    screen: tuple[int, int] | None = None
    initial: tuple[Observation, ...] = ()
    turns: tuple[Turn, ...]
    outcome: Outcome
    reward: float | None = None
    eval: EvalResult | None = None
    versions: Versions | None = None
    timing: Mapping[str, float] = dataclasses.field(default_factory=dict)
    final_state_digest: str | None = None
    labels: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def n_calls(self) -> int:
        """Calls of accepted turns."""
        return sum(len(turn.parsed.calls) for turn in self.turns if turn.accepted and turn.parsed)

    @property
    def n_tokens(self) -> int:
        """Sampled tokens, rejected attempts included."""
        return sum(len(turn.sampled.gen_ids) for turn in self.turns if turn.sampled)

    def images(self) -> Iterator[StoredImage]:
        """Every picture seen, in order; the same one may come again."""
        for observation in self.initial + tuple(o for turn in self.turns for o in turn.results):
            yield from observation.images

    def image_hashes(self) -> set[str]:
        """Every picture that the image store must hold: those seen, and those of sampled prompts."""
        prompts = {image.sha256 for turn in self.turns if turn.sampled for image in turn.sampled.images}
        return {image.sha256 for image in self.images()} | prompts
