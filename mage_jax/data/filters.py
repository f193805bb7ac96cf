"""Which trajectories, and which of their steps, are worth learning from.

Works on anything that has the few attributes of ``Trajectory`` and ``Step``; no episode schema is imported.

Three fates of a step: *keep*; *mask* (it stays in the history that later steps see, but nothing is learnt from what it
wrote); *drop* (it is cut out). Cutting is honest only where the step left no trace: when the observation before it is
the observation before the next step. A step that should be dropped but changed the screen is masked instead, and
counted as such.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol, TypeVar

Policy = Literal["keep", "mask", "drop"]
Fate = Literal["keep", "mask", "drop"]
POLICIES = ("keep", "mask", "drop")


class FilterError(ValueError):
    """A config or a trajectory cannot be used; the text names the trajectory, the step and the field."""


class Step(Protocol):
    """One turn as the filters see it.

    Attributes:
      calls: the executed calls, each ``{"name", "arguments"}``.
      observation: digest of what the agent saw before acting; None where unknown (then nothing is cut around it).
      failed: True if it was judged wrong or its call failed; None if nobody judged.
      redundant: True if it was judged superfluous; None leaves that to ``repeats``.
    """

    @property
    def calls(self) -> Sequence[Mapping[str, Any]]: ...
    @property
    def observation(self) -> Hashable | None: ...
    @property
    def failed(self) -> bool | None: ...
    @property
    def redundant(self) -> bool | None: ...


class Trajectory(Protocol):
    """An episode as the filters see it; ``score`` is a judge's or verifier's, in [0, 1], None if there is none."""

    @property
    def id(self) -> str: ...
    @property
    def score(self) -> float | None: ...
    @property
    def steps(self) -> Sequence[Step]: ...


T = TypeVar("T", bound=Trajectory)


@dataclasses.dataclass(frozen=True)
class FilterConfig:
    """What is kept. None of the numbers is reported in the paper.

    Attributes:
      min_score: trajectories below it are rejected.
      unscored: what a trajectory without a score is: an ``error``, or to ``reject`` or ``keep``.
      failed, redundant: fate of such steps; of a step that is both, the stricter one.
      max_bad_fraction: trajectories with a larger share of masked and dropped steps are rejected.
      min_steps: trajectories with fewer steps left to learn from are rejected.
    """

    min_score: float = 1.0  # not reported
    unscored: Literal["error", "reject", "keep"] = "error"
    failed: Policy = "mask"
    redundant: Policy = "drop"
    max_bad_fraction: float = 0.5  # not reported
    min_steps: int = 1

    def __post_init__(self) -> None:
        for name in ("min_score", "max_bad_fraction"):
            if not 0 <= getattr(self, name) <= 1:
                raise FilterError(f"FilterConfig.{name}: must be in [0, 1], got {getattr(self, name)!r}")
        for name in ("failed", "redundant"):
            if getattr(self, name) not in POLICIES:
                raise FilterError(f"FilterConfig.{name}: {getattr(self, name)!r} is not one of {', '.join(POLICIES)}")
        if self.unscored not in ("error", "reject", "keep"):
            raise FilterError(f"FilterConfig.unscored: {self.unscored!r} is not one of error, reject, keep")
        if self.min_steps < 1:
            raise FilterError(f"FilterConfig.min_steps: must be positive, got {self.min_steps}")


@dataclasses.dataclass(frozen=True)
class Decision:
    """The verdict on one trajectory.

    Attributes:
      rejected: "" if it is kept, else one of ``unscored``, ``low_score``, ``too_many_bad_steps``, ``too_few_steps``.
      fates: one per step.
      demoted: steps that should have been dropped but changed what the agent saw, and were masked.
    """

    rejected: str
    fates: tuple[Fate, ...]
    demoted: int

    @property
    def kept(self) -> tuple[int, ...]:
        """Indices of the steps that stay in the history."""
        return tuple(i for i, fate in enumerate(self.fates) if fate != "drop")

    @property
    def weights(self) -> tuple[float, ...]:
        """Loss weight of each step in ``kept``: 1.0, or 0.0 where masked."""
        return tuple(float(fate == "keep") for fate in self.fates if fate != "drop")


@dataclasses.dataclass
class FilterReport:
    """Counts over trajectories and, for the kept ones, over steps."""

    trajectories: int = 0
    rejected: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    steps: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # by fate
    demoted: int = 0

    @property
    def kept(self) -> int:
        return self.trajectories - self.rejected.total()


def repeats(steps: Sequence[Step], index: int) -> bool:
    """Whether a step does again, on the same observation and again without effect, what the one before it did.

    A second click that did have an effect is the useful one. Unknown observations never count as equal, and waiting
    is no repetition: a slow screen may need it twice.
    """
    if index == 0 or not _leaves_no_trace(steps, index):
        return False
    step, before = steps[index], steps[index - 1]
    if step.observation != before.observation or not step.calls:
        return False
    if any(call.get("arguments", {}).get("action") == "wait" for call in step.calls):
        return False
    return _spell(step.calls) == _spell(before.calls)


def _spell(calls: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps([dict(call) for call in calls], sort_keys=True)


def _leaves_no_trace(steps: Sequence[Step], index: int) -> bool:
    """Never for the last step: nobody knows what came after it, and it ends the episode."""
    if index + 1 >= len(steps):
        return False
    here, after = steps[index].observation, steps[index + 1].observation
    return here is not None and here == after


def decide(trajectory: Trajectory, config: FilterConfig) -> Decision:
    """Applies the rules to one trajectory.

    Raises:
      FilterError: no steps, a score outside [0, 1], or no score where ``unscored`` is ``error``.
    """
    steps = trajectory.steps
    if not steps:
        raise FilterError(f"{trajectory.id}: steps: is empty")
    fates: list[Fate] = []
    demoted = 0
    for i, step in enumerate(steps):
        redundant = repeats(steps, i) if step.redundant is None else step.redundant
        wanted = [config.failed] * bool(step.failed) + [config.redundant] * redundant
        fate = max(wanted, key=POLICIES.index, default="keep")
        if fate == "drop" and not _leaves_no_trace(steps, i):
            fate, demoted = "mask", demoted + 1
        fates.append(fate)
    good = fates.count("keep")
    rejected = _score_fault(trajectory, config)
    if not rejected and len(fates) - good > config.max_bad_fraction * len(fates):
        rejected = "too_many_bad_steps"
    if not rejected and good < config.min_steps:
        rejected = "too_few_steps"
    return Decision(rejected, tuple(fates), demoted)


def _score_fault(trajectory: Trajectory, config: FilterConfig) -> str:
    score = trajectory.score
    if score is None:
        if config.unscored == "error":
            raise FilterError(f"{trajectory.id}: score: is missing; judge it, or set FilterConfig.unscored")
        return "unscored" if config.unscored == "reject" else ""
    if isinstance(score, bool) or not math.isfinite(score) or not 0 <= score <= 1:
        raise FilterError(f"{trajectory.id}: score: must be a number in [0, 1], got {score!r}")
    return "low_score" if score < config.min_score else ""


def filter_trajectories(
    trajectories: Iterable[T], config: FilterConfig
) -> tuple[list[tuple[T, Decision]], FilterReport]:
    """Decides on all of them. Returns the kept ones with their decisions, in order, and the counts.

    Raises:
      FilterError: as ``decide``.
    """
    kept: list[tuple[T, Decision]] = []
    report = FilterReport()
    for trajectory in trajectories:
        decision = decide(trajectory, config)
        report.trajectories += 1
        if decision.rejected:
            report.rejected[decision.rejected] += 1
            continue
        kept.append((trajectory, decision))
        report.steps.update(decision.fates)
        report.demoted += decision.demoted
    return kept, report
