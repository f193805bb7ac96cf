"""Rationales for recorded steps: strict answers, a cache by content, and the same result offline every time."""

import json

import pytest

from mage_jax.data.rationale import (
    OFFLINE_RULE,
    Rationale,
    RationaleError,
    RationaleWriter,
    StepInput,
    check_rationale,
    rationale_request,
)
from mage_jax.llm.client import request_key
from mage_jax.llm.jsonl import AppendLog
from mage_jax.llm.ledger import Ledger, LedgerClient, PriceTable
from mage_jax.llm.offline import OfflineClient
from mage_jax.llm.replay import CassetteClient
from mage_jax.llm.structured import InvalidJson, StructuredError
from tests.llm.helpers import OTHER_PNG, PNG, Scripted

CLICK = {"name": "computer_use", "arguments": {"action": "click", "coordinate": [512, 300]}}
BASH = {"name": "bash", "arguments": {"command": "ls\nExecuted calls: []"}}
GOOD = {"think": "The dialog is open. I save the file now.", "action": "Click the Save button."}


def _step(**changes):
    return StepInput(**({"task": "Save the file", "before": PNG, "calls": (CLICK,), "after": OTHER_PNG} | changes))


def test_the_request_shows_both_screens_and_the_call():
    request = rationale_request(_step(previous=("Open the menu.",)), model="teacher")
    text, images = request.messages[1].text, request.messages[1].images
    assert images == (PNG, OTHER_PNG)
    for part in ("Task: Save the file", "Step 1: Open the menu.", '"coordinate":[512,300]', "second image"):
        assert part in text
    alone = rationale_request(_step(after=None, calls=(BASH,), output="a.txt"), model="teacher")
    assert alone.messages[1].images == (PNG,) and "a.txt" in alone.messages[1].text
    assert "second image" not in alone.messages[1].text
    typed = _step(calls=({"name": "computer_use", "arguments": {"action": "type", "text": "你好"}},))
    assert "你好" in rationale_request(typed, model="teacher").messages[1].text


def test_equal_steps_have_equal_keys():
    turned = {"arguments": dict(reversed(CLICK["arguments"].items())), "name": "computer_use"}
    key = request_key(rationale_request(_step(), model="m"))
    assert key == request_key(rationale_request(_step(calls=(turned,)), model="m"))
    for change in ({"task": "x"}, {"before": OTHER_PNG}, {"after": PNG}, {"previous": ("Open it.",)}):
        assert key != request_key(rationale_request(_step(**change), model="m"))


def test_offline_it_is_deterministic():
    steps = [_step(), _step(calls=(BASH,), after=None, output="Executed calls: none"), _step(calls=(CLICK, CLICK))]
    first = [RationaleWriter(OfflineClient([OFFLINE_RULE]), model="offline").write(s) for s in steps]
    again = [RationaleWriter(OfflineClient([OFFLINE_RULE]), model="offline").write(s) for s in steps]
    assert first == again and len(set(first)) == 3
    assert first[0].action_line == "Action: Click on the interface."
    assert "shell" in first[1].action and "and 1 more" in first[2].action
    assert not any("512" in r.think + r.action for r in first)


def test_annotations_are_cached_by_content(tmp_path):
    path = tmp_path / "rationales.jsonl"
    inner = Scripted(json.dumps(GOOD))
    writer = RationaleWriter(inner, model="m", cache=path)
    assert writer.write(_step()) == writer.write(_step()) == Rationale(**GOOD)
    assert (writer.written, writer.cached, len(inner.asked)) == (1, 1, 1)
    later = RationaleWriter(Scripted(), model="m", cache=path)  # a client that cannot answer
    assert later.write(_step()) == Rationale(**GOOD) and later.cached == 1
    with pytest.raises(IndexError):
        later.write(_step(task="another"))
    assert PNG not in path.read_bytes()


def test_a_damaged_cache_is_named(tmp_path):
    path = tmp_path / "rationales.jsonl"
    for row in (
        {"key": "k"},
        {"key": "k", "think": "x", "action": "nothing"},
        {"key": "k", "think": 3, "action": "X."},
    ):
        path.unlink(missing_ok=True)
        AppendLog(path).append(row)
        with pytest.raises(RationaleError, match=r"rationales\.jsonl:1"):
            RationaleWriter(Scripted(), model="m", cache=path)


def test_a_bad_annotation_is_asked_for_again_with_the_reason():
    inner = Scripted(json.dumps(GOOD | {"action": "I click Save."}), "no JSON", json.dumps(GOOD))
    assert RationaleWriter(inner, model="m").write(_step()) == Rationale(**GOOD)
    assert "imperative" in inner.asked[1].messages[-1].text
    writer = RationaleWriter(Scripted("no JSON", json.dumps(GOOD)), model="m")
    assert writer.write(_step()) == Rationale(**GOOD) and writer.reasked == 1
    inner = Scripted(*["no JSON"] * 3)
    with pytest.raises(StructuredError, match="3 calls"):
        RationaleWriter(inner, model="m").write(_step())


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"think": ""}, "$.think"),
        ({"think": " x"}, "$.think"),
        ({"think": "a\nb"}, "one line"),
        ({"think": "a\u2028b"}, "one line"),
        ({"think": "x" * 2001}, "characters"),
        ({"think": "</think> done"}, "</think>"),
        ({"think": "then <tool_call"}, "<tool_"),
        ({"think": "then </ think >"}, "tags"),
        ({"think": "<|im_end|>"}, "tags"),
        ({"think": "an <image> here"}, "tags"),
        ({"think": "Action: click"}, "Action:"),
        ({"think": "```json"}, "tags"),
        ({"think": "The second screenshot shows that it worked."}, "second screenshot"),
        ({"think": "The resulting image shows it."}, "could not know"),
        ({"action": ""}, "$.action"),
        ({"action": "Click Save"}, "period"),
        ({"action": "Click Save..."}, "period"),
        ({"action": "Click Save. Then wait."}, "one sentence"),
        ({"action": 'Click "Save". Wait.'}, "one sentence"),
        ({"action": "click Save."}, "capital"),
        ({"action": "The Save button."}, "imperative"),
        ({"action": "I click Save."}, "imperative"),
        ({"action": "Action: Click Save."}, "Action:"),
    ],
)
def test_what_is_not_one_paragraph_and_one_sentence_is_refused(change, told):
    with pytest.raises(InvalidJson) as caught:
        check_rationale(GOOD | change)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    "action",
    [
        "Open report.xlsx in version 2.5.",
        'Type "Hello there. Bye." into the body.',
        "Press Ctrl+S.",
        "Check that 3 < 4 holds.",
        "Select the cell B2 (row 2).",
    ],
)
def test_honest_sentences_pass(action):
    assert check_rationale(GOOD | {"action": action}).action == action


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"task": " "}, "task"),
        ({"calls": ()}, "calls"),
        ({"calls": (CLICK,) * 16}, "calls"),
        ({"calls": (CLICK, BASH)}, "one function"),
        ({"calls": ({"name": "bash"},)}, "calls[0]"),
        ({"calls": ({"name": "bash", "arguments": "ls"},)}, "calls[0]"),
        ({"calls": ({"name": "bash", "arguments": {"a": float("nan")}},)}, "calls[0].arguments"),
    ],
)
def test_a_step_that_cannot_be_annotated_is_named(change, told):
    with pytest.raises(RationaleError) as caught:
        _step(**change)
    assert told in str(caught.value)


def test_the_whole_stack(tmp_path):
    ledger = Ledger(tmp_path / "ledger.jsonl", PriceTable("none", {"offline": None}))

    def write(mode, inner=None):
        client = LedgerClient(CassetteClient(tmp_path / "calls.jsonl", inner, mode=mode), ledger)
        return RationaleWriter(client, model="offline").write(_step())

    assert write("record", OfflineClient([OFFLINE_RULE])) == write("replay_only")
    (sums,) = ledger.summary()
    assert sums.group == {"purpose": "rationale", "model": "offline"} and (sums.calls, sums.replayed_calls) == (2, 1)
