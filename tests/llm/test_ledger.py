"""Costs: exact prices, sums by any column, and a file that survives killed writers."""

import fcntl
import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.llm.client import Reply, Usage
from mage_jax.llm.jsonl import AppendLog, JsonlError
from mage_jax.llm.ledger import (
    BudgetExceeded,
    Ledger,
    LedgerClient,
    LedgerError,
    Price,
    PriceTable,
    UnknownModel,
    format_summary,
    read_rows,
    summarise,
)
from tests.llm.helpers import Scripted, request

PRICES = PriceTable("2026-11", {"m": Price(prompt=2.0, cached_prompt=0.5, completion=8.0), "local": None})


def _reply(prompt=1_000_000, cached=400_000, completion=250_000, **changes):
    return Reply(
        **({"text": "x", "usage": Usage(prompt, cached, completion), "model": "m-1", "finish_reason": "stop"} | changes)
    )


def _ledger(tmp_path):
    return Ledger(tmp_path / "ledger.jsonl", PRICES, clock=lambda: 0.0)


def test_a_row_holds_what_the_cost_report_needs(tmp_path):
    ledger = _ledger(tmp_path)
    labels = {"round": "1", "stage": "author", "skill": "calc.sum"}
    row = ledger.add(request(purpose="forge/author", phase="authoring", labels=labels), _reply(), seconds=1.5)
    assert row["usd"] == pytest.approx(0.6 * 2.0 + 0.4 * 0.5 + 0.25 * 8.0)
    assert (row["prompt_uncached"], row["prompt_cached"], row["completion"]) == (600_000, 400_000, 250_000)
    assert (row["phase"], row["labels"], row["prices"], row["model"]) == ("authoring", labels, "2026-11", "m")
    assert row["reply_model"] == "m-1" and row["time"] == "1970-01-01T00:00:00.000+00:00"
    assert ledger.rows() == [row]


def test_an_unknown_model_is_refused_before_anything_is_paid(tmp_path):
    inner = Scripted("a")
    client = LedgerClient(inner, _ledger(tmp_path))
    with pytest.raises(UnknownModel, match=r"'n'.*known: local, m.*unpriced"):
        client.complete(request(model="n"))
    assert not inner.asked and not (tmp_path / "ledger.jsonl").exists()


def test_spending_ends_at_the_limit(tmp_path):
    once = (6 * 2 + 4 * 0.5 + 3 * 8) / 1e6
    client = LedgerClient(Scripted("a"), _ledger(tmp_path), limit_usd=1.5 * once)
    client.complete(request())
    inner = Scripted("b", "c")
    client = LedgerClient(inner, _ledger(tmp_path), limit_usd=1.5 * once)  # what an older run spent counts
    client.complete(request())
    assert client.spent_usd == pytest.approx(2 * once)
    with pytest.raises(BudgetExceeded, match="limit_usd"):
        client.complete(request())
    assert inner.texts == ["c"] and len(client._ledger.rows()) == 2


def test_an_unpriced_model_is_counted_apart(tmp_path):
    ledger = _ledger(tmp_path)
    client = LedgerClient(Scripted("a", "b"), ledger)
    assert client.complete(request(model="local")).cost_usd is None
    assert client.complete(request()).cost_usd == pytest.approx((6 * 2 + 4 * 0.5 + 3 * 8) / 1e6)
    (total,) = ledger.summary(by=())
    assert (total.calls, total.unpriced_calls) == (2, 1) and total.usd == pytest.approx(38 / 1e6)


def test_sums_per_purpose_model_phase_and_label(tmp_path):
    ledger = _ledger(tmp_path)
    ledger.add(request(purpose="author", phase="authoring", labels={"skill": "a"}), _reply())
    ledger.add(request(purpose="judge", labels={"skill": "a", "task": "1"}), _reply(replayed=True))
    ledger.add(request(purpose="judge", labels={"skill": "b", "task": "2"}), _reply())
    ledger.add(request(purpose="judge", model="local"), _reply())
    by_default = {tuple(s.group.values()): s.calls for s in ledger.summary()}
    assert by_default == {("author", "m"): 1, ("judge", "local"): 1, ("judge", "m"): 2}
    phases = {s.group["phase"]: s for s in ledger.summary(by=("phase",))}
    assert phases["authoring"].usd == pytest.approx(3.4) and phases["recurring"].usd == pytest.approx(3.4)
    assert phases["recurring"].replayed_usd == pytest.approx(3.4) and phases["recurring"].tokens == 3 * 1_250_000
    assert [s.group["skill"] for s in ledger.summary(by=("skill",))] == ["", "a", "b"]
    assert summarise([], by=()) == []
    with pytest.raises(LedgerError, match="'usd'"):
        ledger.summary(by=("usd",))
    table = format_summary(ledger.summary()).splitlines()
    assert len(table) == 4 and table[0].split()[:3] == ["purpose", "model", "calls"]


@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 10**6), st.integers(0, 10**6)), max_size=8))
def test_the_sum_of_costs_is_the_cost_of_the_sum(counts):
    price = Price(3.0, 0.3, 15.0)
    usages = [Usage(a + b, b, c) for a, b, c in counts]
    total = sum(usages, Usage(0, 0, 0))
    assert sum(price.usd(u) for u in usages) == pytest.approx(price.usd(total), rel=1e-12)


def test_price_tables_are_data(tmp_path):
    path = tmp_path / "prices.json"
    models = {"m": {"prompt": 2, "cached_prompt": 0.5, "completion": 8.0}, "local": "unpriced"}
    path.write_text(json.dumps({"id": "2026-11", "models": models}))
    assert PriceTable.load(path) == PRICES


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not one JSON object"),
        ("[]", "must be an object"),
        ('{"id": "x"}', "exactly id"),
        ('{"id": "x", "models": {"m": 3}}', "models.m"),
        ('{"id": "x", "models": {"m": {"prompt": 1, "completion": 1}}}', "models.m"),
        ('{"id": "x", "models": {"m": {"prompt": -1, "cached_prompt": 0, "completion": 1}}}', "Price.prompt"),
        ('{"id": "x", "models": {"m": {"prompt": true, "cached_prompt": 0, "completion": 1}}}', "Price.prompt"),
        ('{"id": "x", "models": {"m": "unpriced", "m": "unpriced"}}', "twice"),
    ],
)
def test_a_wrong_price_table_is_named(tmp_path, text, told):
    path = tmp_path / "prices.json"
    path.write_text(text)
    with pytest.raises(LedgerError) as caught:
        PriceTable.load(path)
    assert str(path) in str(caught.value) and told in str(caught.value)
    with pytest.raises(LedgerError, match="cannot be read"):
        PriceTable.load(tmp_path / "none.json")


@pytest.mark.parametrize("keep", [1, 40, -2, -1])
def test_a_torn_last_row_is_cut_and_reported(tmp_path, caplog, keep):
    ledger = _ledger(tmp_path)
    for _ in range(3):
        ledger.add(request(), _reply())
    data = ledger.path.read_bytes()
    whole = data.index(b"\n", data.index(b"\n") + 1) + 1
    torn = data[whole:][:keep]
    ledger.path.write_bytes(data[:whole] + torn)
    assert len(ledger.rows()) == 2 and ledger.torn_bytes == len(torn)
    assert ledger.path.read_bytes() == data[:whole] + torn  # reading never writes
    later = _ledger(tmp_path)
    later.add(request(), _reply())
    assert later.torn_bytes == len(torn) and "unfinished last line" in caplog.text
    assert later.path.read_bytes() == data


def test_a_file_of_nothing_but_a_torn_row(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b"\0" * 200_000)  # longer than the block that is searched for a newline
    log = AppendLog(path)
    assert list(log.rows()) == []
    log.append({"a": 1})
    assert path.read_bytes() == b'{"a":1}\n'


def test_damage_that_is_not_a_torn_row_is_an_error(tmp_path):
    ledger = _ledger(tmp_path)
    ledger.add(request(), _reply())
    good = ledger.path.read_text()
    for bad, told in [
        ("{\n", "is not JSON"),
        ("3\n", "must be a JSON object"),
        ('{"version": 0}\n', "version"),
        (good.replace('"completion":250000', '"completion":"x"'), "completion"),
        (good.replace('"replayed":false', '"replayed":0'), "replayed"),
        (good.replace('"usd"', '"eur"'), "usd"),
    ]:
        ledger.path.write_text(good + bad + good)
        with pytest.raises((LedgerError, JsonlError)) as caught:
            ledger.rows()
        assert f"{ledger.path}:2" in str(caught.value) and told in str(caught.value)


def test_a_killed_writer_loses_at_most_its_last_row(tmp_path):
    path = tmp_path / "log.jsonl"
    code = (
        "import sys\nfrom mage_jax.llm.jsonl import AppendLog\nlog = AppendLog(sys.argv[1])\n"
        "for i in range(10**9):\n    log.append({'i': i, 'filler': 'x' * 5000})\n    print(i, flush=True)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True)
    for line in writer.stdout:
        if int(line) >= 20:
            break
    writer.send_signal(signal.SIGKILL)
    told = [int(line) for line in writer.stdout.read().split()]
    writer.wait()
    found = [row["i"] for _, row in AppendLog(path).rows()]
    assert found == list(range(len(found))) and len(found) > max(told, default=20)
    AppendLog(path).append({"i": len(found)})
    assert [row["i"] for _, row in AppendLog(path).rows()] == list(range(len(found) + 1))


def _write_many(path, name):
    log = AppendLog(path)
    for i in range(25):
        log.append({"name": name, "i": i, "filler": "é" * 3000})


def test_processes_share_a_file(tmp_path):
    path = tmp_path / "log.jsonl"
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_many, args=(path, name)) for name in "ab"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    rows = [row for _, row in AppendLog(path).rows()]
    for name in "ab":
        assert [row["i"] for row in rows if row["name"] == name] == list(range(25))


def test_a_writer_waits_for_another(tmp_path):
    log = AppendLog(tmp_path / "log.jsonl")
    log.append({"a": 1})
    with open(log.path, "r+b") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        writer = threading.Thread(target=log.append, args=({"a": 2},))
        writer.start()
        writer.join(0.2)
        assert writer.is_alive() and log.path.read_text() == '{"a":1}\n'
    writer.join(5)
    assert [row["a"] for _, row in log.rows()] == [1, 2]


def test_rows_that_cannot_be_written(tmp_path):
    log = AppendLog(tmp_path / "log.jsonl")
    for bad in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises(JsonlError, match=r"log\.jsonl.*not JSON"):
            log.append(bad)
    assert not log.path.exists()
    log.path.mkdir()
    with pytest.raises(JsonlError, match="cannot append"):
        log.append({})
    with pytest.raises(JsonlError, match="cannot be read"):
        list(log.rows())


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error():
    with pytest.raises(JsonlError, match="/dev/full: cannot append"):
        AppendLog("/dev/full").append({"a": 1})


def test_no_file_means_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
