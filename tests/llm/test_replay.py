"""Cassettes: what was recorded answers again without the server, and nothing else does."""

import json
import threading

import pytest

from mage_jax.llm.client import Message
from mage_jax.llm.http import HttpClient, HttpConfig, HttpStatusError
from mage_jax.llm.jsonl import AppendLog, JsonlError
from mage_jax.llm.ledger import Ledger, LedgerClient, Price, PriceTable
from mage_jax.llm.replay import CassetteClient, CassetteError, CassetteMiss
from tests.llm.helpers import JPEG, OTHER_PNG, PNG, TOKEN, Answer, Scripted, completion, request, serve


def test_recorded_calls_answer_with_the_server_down(tmp_path, monkeypatch):
    monkeypatch.setenv("LLM_TOKEN", TOKEN)
    path = tmp_path / "folder" / "calls.jsonl"
    asked = [request(str(i), messages=(Message("user", str(i), (PNG,)),)) for i in range(3)]
    with serve() as server:
        server.reply = lambda body: Answer(body=completion("answer to " + body["messages"][0]["content"][1]["text"]))
        with HttpClient(HttpConfig(server.url, token_env="LLM_TOKEN", max_retries=0)) as http:
            cassette = CassetteClient(path, http, mode="record")
            first = [cassette.complete(r) for r in asked]
            server.stop()
            again = [CassetteClient(path, http, mode="replay").complete(r) for r in asked]
    only = CassetteClient(path, mode="replay_only")
    assert [r.text for r in first] == ["answer to 0", "answer to 1", "answer to 2"] and len(only) == 3
    assert not any(r.replayed for r in first)
    assert again == [only.complete(r) for r in asked] == [r.replace(replayed=True) for r in first]
    written = b"".join(p.read_bytes() for p in tmp_path.rglob("*") if p.is_file())
    assert TOKEN.encode() not in written and b"Bearer" not in written and PNG not in written


def test_modes(tmp_path):
    path = tmp_path / "calls.jsonl"
    assert CassetteClient(path, Scripted("one"), mode="record").complete(request()).text == "one"
    inner = Scripted("two")
    replay = CassetteClient(path, inner, mode="replay")
    assert replay.complete(request()).text == "one" and not inner.asked
    assert replay.complete(request(seed=1)).text == "two"
    assert replay.complete(request(seed=1)).replayed
    assert CassetteClient(path, Scripted("three"), mode="record").complete(request()).text == "three"
    assert CassetteClient(path, mode="replay_only").complete(request()).text == "three"  # the newest wins
    before = path.read_bytes()
    CassetteClient(path, mode="replay_only").complete(request(purpose="other", labels={"task": "t"}))
    assert path.read_bytes() == before and before.count(b"\n") == 3


def test_a_miss_names_the_cassette_and_what_is_nearest(tmp_path):
    path = tmp_path / "calls.jsonl"
    recorder = CassetteClient(path, Scripted("a", "b"), mode="record")
    recorder.complete(request(purpose="forge/judge"))
    recorder.complete(request("Why?", purpose="rationale"))
    only = CassetteClient(path, mode="replay_only")
    with pytest.raises(CassetteMiss) as caught:
        only.complete(request(purpose="forge/judges", temperature=1.0))
    for part in (str(path), "'forge/judges'", "'forge/judge'", "temperature"):
        assert part in str(caught.value)
    assert "messages" not in str(caught.value)
    path.write_text("")
    with pytest.raises(CassetteMiss, match="is empty"):
        CassetteClient(path, mode="replay_only").complete(request())


def test_failures_are_not_recorded(tmp_path):
    path = tmp_path / "calls.jsonl"
    with serve() as server, HttpClient(HttpConfig(server.url)) as http:
        server.script = [Answer(400, b"no")]
        cassette = CassetteClient(path, http)
        with pytest.raises(HttpStatusError):
            cassette.complete(request())
        assert not path.exists()
        assert cassette.complete(request()).text == "hello"


def test_threads_with_one_question_pay_once(tmp_path):
    with serve() as server, HttpClient(HttpConfig(server.url)) as http:
        server.default = Answer(delay=0.05)
        cassette = CassetteClient(tmp_path / "calls.jsonl", http)
        threads = [threading.Thread(target=cassette.complete, args=(request(seed=i % 2),)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(server.calls) == 2 == len(cassette)


def test_pictures_can_be_kept_by_hash(tmp_path):
    cassette = CassetteClient(
        tmp_path / "calls.jsonl", Scripted("a", "b"), mode="record", image_dir=tmp_path / "images"
    )
    cassette.complete(request(messages=(Message("user", "x", (PNG, JPEG)),)))
    cassette.complete(request(messages=(Message("user", "y", (PNG, OTHER_PNG)),)))
    files = sorted((tmp_path / "images").iterdir())
    assert {f.read_bytes() for f in files} == {PNG, OTHER_PNG, JPEG} and len(files) == 3
    hashes = {h for _, row in AppendLog(cassette.path).rows() for h in row["request"]["messages"][0]["images"]}
    assert {f.stem for f in files} == hashes


def test_replayed_calls_cost_nothing_again(tmp_path):
    prices = PriceTable("p", {"m": Price(1.0, 0.1, 10.0)})
    ledger = Ledger(tmp_path / "ledger.jsonl", prices)
    client = LedgerClient(CassetteClient(tmp_path / "calls.jsonl", Scripted("a")), ledger, limit_usd=1.0)
    for _ in range(3):
        client.complete(request())
    (sums,) = ledger.summary()
    assert (sums.calls, sums.replayed_calls) == (3, 2)
    assert sums.replayed_usd == pytest.approx(2 * sums.usd)
    assert client.spent_usd == sums.usd > 0


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda row: row["request"].update(model="n"), "key does not fit"),
        (lambda row: row.pop("reply"), "exactly key"),
        (lambda row: row.update(extra=1), "exactly key"),
        (lambda row: row["reply"].pop("usage"), "reply"),
        (lambda row: row["reply"]["usage"].update(cached_prompt=99), "cached_prompt"),
        (lambda row: row["reply"].update(finish_reason="x"), "finish_reason"),
        (lambda row: row.update(purpose=3), "purpose"),
    ],
)
def test_a_damaged_cassette_is_named_with_its_line(tmp_path, edit, told):
    path = tmp_path / "calls.jsonl"
    cassette = CassetteClient(path, Scripted("a", "b"), mode="record")
    cassette.complete(request())
    cassette.complete(request(seed=1))
    lines = path.read_text().splitlines()
    row = json.loads(lines[1])
    edit(row)
    path.write_text(f"{lines[0]}\n{json.dumps(row)}\n")
    with pytest.raises(CassetteError) as caught:
        CassetteClient(path, mode="replay_only")
    assert f"{path}:2" in str(caught.value) and told in str(caught.value)


def test_unusable_set_ups_are_refused(tmp_path):
    with pytest.raises(CassetteError, match="no such cassette"):
        CassetteClient(tmp_path / "none.jsonl", mode="replay_only")
    with pytest.raises(CassetteError, match="needs a client"):
        CassetteClient(tmp_path / "none.jsonl")
    with pytest.raises(CassetteError, match="mode 'play'"):
        CassetteClient(tmp_path / "none.jsonl", mode="play")
    (tmp_path / "bad.jsonl").write_text('{"a": 1\n')
    with pytest.raises(JsonlError, match=r"bad.jsonl:1"):
        CassetteClient(tmp_path / "bad.jsonl", mode="replay_only")


def test_a_torn_recording_is_recorded_again(tmp_path):
    path = tmp_path / "calls.jsonl"
    cassette = CassetteClient(path, Scripted("a", "b"), mode="record")
    cassette.complete(request())
    cassette.complete(request(seed=1))
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CassetteMiss):
        CassetteClient(path, mode="replay_only").complete(request(seed=1))
    inner = Scripted("c")
    assert CassetteClient(path, inner).complete(request(seed=1)).text == "c" and len(inner.asked) == 1
    only = CassetteClient(path, mode="replay_only")
    assert [only.complete(request(seed=s)).text for s in (None, 1)] == ["a", "c"]
