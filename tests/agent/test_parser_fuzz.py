"""Random and mutated responses: a whole valid turn or a ProtocolError, nothing else, in bounded time."""

import random

import pytest

from mage_jax.agent.calls import ACTIONS, ToolCall, turn_text
from mage_jax.agent.errors import ProtocolError
from mage_jax.agent.parser import parse
from mage_jax.agent.repair import parse_with_repairs
from mage_jax.agent.spans import split_text

PIECES = (
    *("<think>", "</think>", "Action:", "<tool_call>", "</tool_call>", "<|im_end|>", "\n", " ", '"', "\\"),
    *("{", "}", "[", "]", ",", ":", "null", "true", "NaN", "1e999", "-1", "1000", "0.5"),
    *("\\u12", "\\ud800", "\ud800", "\x00", "é", "日", "\u2028", "\u00a0"),
    *('"name"', '"arguments"', '"action"', '"bash"', '"computer_use"', '"command"'),
    *(f'"{action}"' for action in ACTIONS),
)
CALLS = (
    [ToolCall(name="bash", command='echo "</tool_call>"\nls \\d')],
    [ToolCall(name="computer_use", action="click", coordinate=(5, 999), button="right")] * 2,
    [ToolCall(name="computer_use", action="keypress", keys=("ctrl", "s"))],
    [ToolCall(name="computer_use", action="scroll", scroll_x=0, scroll_y=-500.5, coordinate=(1, 2))],
    [ToolCall(name="computer_use", action="terminate", status="success", msg_to_user="é")],
)


def _random_text(rng):
    return "".join(rng.choices(PIECES, k=rng.randrange(40)))


def _mutated_turn(rng):
    text = turn_text(think="I see it.\nTwo lines.", action="Go.", calls=rng.choice(CALLS))
    for _ in range(rng.randrange(1, 4)):
        a, b = sorted(rng.randrange(len(text) + 1) for _ in range(2))
        b = min(b, a + rng.choice((0, 1, 2, 20, 1000)))
        middle = rng.choice(("", rng.choice(PIECES), text[a:b] * 2, _random_text(rng)))
        text = text[:a] + middle + text[b:]
    return text


def _fuzz(number, seed):
    rng = random.Random(seed)
    outcomes = dict.fromkeys(("strict", "repaired", "refused"), 0)
    for _ in range(number):
        text = (_mutated_turn if rng.random() < 0.8 else _random_text)(rng)
        spans = split_text(text)
        assert "".join(text[s.start : s.end] for s in spans) == text and all(s.start < s.end for s in spans)
        try:
            turn = parse(text)
        except ProtocolError as error:
            assert error.code != "protocol"
            turn = None
        try:
            repaired = parse_with_repairs(text)
        except ProtocolError:
            assert turn is None
            outcomes["refused"] += 1
            continue
        assert (turn is None) == bool(repaired.repairs)
        if turn is not None:
            assert repaired.turn == turn
            again = parse(turn_text(think=turn.think, action=turn.action, calls=turn.calls))
            assert (again.think, again.action, again.calls) == (turn.think, turn.action, turn.calls)
            kinds = [s.kind for s in turn.spans]
            assert kinds.count("tool_call") == len(turn.calls)
            assert [kinds.count(k) for k in ("think_open", "think_close", "action")] == [1, 1, 1]
        assert repaired.turn.raw == text
        outcomes["repaired" if repaired.repairs else "strict"] += 1
    return outcomes


@pytest.mark.parametrize(("number", "seed"), [(5_000, 0), (100_000, 1)])
def test_fuzz(number, seed):
    outcomes = _fuzz(number, seed)
    assert min(outcomes.values()) > number // 100, outcomes  # the mutations reach all three
