"""Trajectory filters on plain sequences: thresholds, and steps that are kept, masked or cut out."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.data.filters import Decision, FilterConfig, FilterError, decide, filter_trajectories, repeats


def _call(action="click", **arguments):
    return {"name": "computer_use", "arguments": {"action": action} | arguments}


@dataclasses.dataclass
class Step:
    observation: object = None
    failed: bool | None = None
    redundant: bool | None = None
    calls: tuple = (_call(),)


@dataclasses.dataclass
class Trajectory:
    steps: list
    score: float | None = 1.0
    id: str = "t"


LOOSE = FilterConfig(max_bad_fraction=1.0)


def _fates(steps, **config):
    return decide(Trajectory(steps), dataclasses.replace(LOOSE, **config)).fates


def test_scores_are_compared_with_the_threshold():
    config = FilterConfig(min_score=0.5)
    rejected = [decide(Trajectory([Step()], score=s), config).rejected for s in (0.0, 0.49, 0.5, 1)]
    assert rejected == ["low_score", "low_score", "", ""]


def test_a_missing_score_is_what_the_config_says():
    with pytest.raises(FilterError, match="t: score"):
        decide(Trajectory([Step()], score=None), FilterConfig())
    assert decide(Trajectory([Step()], score=None), FilterConfig(unscored="reject")).rejected == "unscored"
    assert decide(Trajectory([Step()], score=None), FilterConfig(unscored="keep")).rejected == ""


def test_failed_steps_are_masked():
    decision = decide(Trajectory([Step("a"), Step("b", failed=True), Step("c", failed=False)]), LOOSE)
    assert decision == Decision("", ("keep", "mask", "keep"), 0)
    assert decision.kept == (0, 1, 2) and decision.weights == (1.0, 0.0, 1.0)


def test_only_steps_without_a_trace_are_cut_out():
    steps = [Step("a", redundant=True), Step("a", redundant=True), Step("b"), Step("b", redundant=True)]
    decision = decide(Trajectory(steps), LOOSE)
    assert decision.fates == ("drop", "mask", "keep", "mask")  # the second changed the screen, the last is the end
    assert decision.demoted == 2 and decision.kept == (1, 2, 3) and decision.weights == (0.0, 1.0, 0.0)
    assert _fates([Step(redundant=True), Step()]) == ("mask", "keep")  # unknown observations are never equal


def test_the_stricter_policy_wins():
    both = [Step("a", failed=True, redundant=True), Step("a")]
    assert _fates(both, failed="mask", redundant="drop")[0] == "drop"
    assert _fates(both, failed="mask", redundant="keep")[0] == "mask"
    assert _fates(both, failed="keep", redundant="keep")[0] == "keep"


def test_repetitions_are_found():
    a, b = _call(coordinate=[1, 2]), {"arguments": {"coordinate": [1, 2], "action": "click"}, "name": "computer_use"}
    same = [Step("x", calls=(a,)), Step("x", calls=(b,)), Step("x"), Step("y")]
    assert [repeats(same, i) for i in range(4)] == [False, True, False, False]
    assert _fates(same) == ("keep", "drop", "keep", "keep")
    effective = [Step("x"), Step("x"), Step("y")]  # the second click opened it: it is the useful one
    assert not repeats(effective, 1)
    waiting = [Step("x", calls=(_call("wait", time=1),))] * 3
    assert not repeats(waiting, 1)
    assert not repeats([Step(), Step(), Step()], 1)
    assert not repeats([Step("x", calls=()), Step("x", calls=()), Step("x")], 1)
    assert _fates([Step("x"), Step("x", redundant=False), Step("x")]) == ("keep",) * 3  # a judge's word comes first


def test_too_many_or_too_few():
    bad = Step("a", failed=True)
    assert decide(Trajectory([Step("b"), bad]), FilterConfig(max_bad_fraction=0.5)).rejected == ""
    assert (
        decide(Trajectory([Step("b"), bad, bad]), FilterConfig(max_bad_fraction=0.5)).rejected == "too_many_bad_steps"
    )
    assert decide(Trajectory([bad]), LOOSE).rejected == "too_few_steps"
    assert decide(Trajectory([Step()]), FilterConfig(min_steps=2)).rejected == "too_few_steps"


def test_the_report_counts():
    trajectories = [
        Trajectory([Step("a"), Step("b", failed=True)], id="1"),
        Trajectory([Step("a")], score=0.0, id="2"),
        Trajectory([Step("a", redundant=True), Step("a"), Step("c", redundant=True), Step("d")], id="3"),
    ]
    kept, report = filter_trajectories(trajectories, LOOSE)
    assert [t.id for t, _ in kept] == ["1", "3"] and report.kept == 2 and report.trajectories == 3
    assert report.rejected == {"low_score": 1} and report.demoted == 1
    assert report.steps == {"keep": 3, "mask": 2, "drop": 1}


@pytest.mark.parametrize("score", [-0.1, 1.1, float("nan"), True])
def test_scores_outside_the_range_are_errors(score):
    with pytest.raises(FilterError, match="t: score"):
        decide(Trajectory([Step()], score=score), FilterConfig())


def test_an_empty_trajectory_is_an_error():
    with pytest.raises(FilterError, match="t: steps"):
        decide(Trajectory([]), FilterConfig())


@pytest.mark.parametrize(
    "change", [{"min_score": 2}, {"failed": "cut"}, {"unscored": "x"}, {"min_steps": 0}, {"max_bad_fraction": -1}]
)
def test_a_wrong_config_is_named(change):
    with pytest.raises(FilterError, match=f"FilterConfig.{next(iter(change))}"):
        FilterConfig(**change)


STEPS = st.builds(
    Step, st.sampled_from([None, "a", "b"]), st.sampled_from([None, True, False]), st.sampled_from([None, True, False])
)


@given(st.lists(STEPS, min_size=1, max_size=8), st.sampled_from(["keep", "mask", "drop"]))
def test_cutting_never_changes_what_a_kept_step_saw_last(steps, policy):
    decision = decide(Trajectory(steps), dataclasses.replace(LOOSE, failed=policy, redundant=policy))
    assert len(decision.weights) == len(decision.kept) and decision.fates[-1] != "drop"
    for i, fate in enumerate(decision.fates):
        if fate == "drop":
            assert steps[i].observation is not None and steps[i].observation == steps[i + 1].observation
    assert policy != "keep" or set(decision.fates) == {"keep"}
