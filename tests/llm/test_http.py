"""The HTTP backend against a real server on the loopback interface that misbehaves on cue."""

import email.utils
import json
import logging
import random
import socket
import threading
import time

import pytest

from mage_jax.llm.client import LLMError, Message, Usage
from mage_jax.llm.http import (
    HttpClient,
    HttpConfig,
    HttpConfigError,
    HttpConnectionError,
    HttpReplyError,
    HttpStatusError,
    retry_after,
)
from tests.llm.helpers import PNG, TOKEN, Answer, completion, request, serve

FAST = {"backoff": 0.01, "max_backoff": 0.02, "timeout": 5.0}


@pytest.fixture
def server():
    with serve() as state:
        yield state


def _client(server, *, waits=None, **changes):
    config = HttpConfig(server.url, **(FAST | changes))
    return HttpClient(config) if waits is None else HttpClient(config, sleep=waits.append, jitter=lambda: 0.5)


def test_a_reply_is_read_whole(server):
    with _client(server) as client:
        reply = client.complete(request())
    assert (reply.text, reply.model, reply.finish_reason, reply.id) == ("hello", "m-2026", "stop", "call-1")
    assert reply.usage == Usage(prompt=100, cached_prompt=40, completion=7)
    assert reply.parsed is None and reply.cost_usd is None and not reply.replayed


def test_what_is_sent(server):
    schema = {"type": "object"}
    messages = (Message("system", "s"), Message("user", "é", (PNG, PNG)), Message("user", "", (PNG,)))
    with _client(server) as client:
        client.complete(request(messages=messages, schema=schema, seed=3, temperature=0.5, max_tokens=9))
    body = server.calls[0]
    assert body.pop("_path") == "/v1/chat/completions"
    content = body["messages"][1]["content"]
    assert [item["type"] for item in content] == ["image_url", "image_url", "text"]
    assert content[0]["image_url"]["url"].startswith("data:image/png;base64,")
    assert [item["type"] for item in body["messages"][2]["content"]] == ["image_url"]
    assert body["response_format"]["json_schema"]["schema"] == schema
    assert (body["model"], body["seed"], body["temperature"], body["max_tokens"]) == ("m", 3, 0.5, 9)
    assert not {"purpose", "phase", "labels"} & set(body)
    assert "Authorization" not in server.headers[0]


def test_dialects(server):
    with _client(server, json_mode="json_object", max_tokens_field="max_completion_tokens") as client:
        client.complete(request(schema={"type": "object"}))
    assert server.calls[0]["response_format"] == {"type": "json_object"}
    assert "max_completion_tokens" in server.calls[0] and "max_tokens" not in server.calls[0]
    with _client(server, json_mode="none") as client:
        client.complete(request(schema={"type": "object"}))
    assert "response_format" not in server.calls[1] and "seed" not in server.calls[1]


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_passing_failure_is_tried_again(server, status):
    server.script = [Answer(status, b"busy"), Answer(status, b"busy")]
    waits = []
    with _client(server, waits=waits, backoff=1.0, max_backoff=30.0) as client:
        assert client.complete(request()).text == "hello"
    assert waits == [0.75, 1.5]  # 1 s and 2 s, times 0.75


def test_attempts_are_bounded_and_waits_grow_to_a_limit(server):
    server.default = Answer(503, b"down for maintenance")
    waits = []
    client = _client(server, waits=waits, max_retries=4, backoff=1.0, max_backoff=3.0)
    with client, pytest.raises(HttpStatusError) as caught:
        client.complete(request())
    assert caught.value.status == 503 and caught.value.attempts == 5 == len(server.calls)
    for part in (server.url, "503", "down for maintenance", "5 attempts"):
        assert part in str(caught.value)
    assert waits == [0.75, 1.5, 2.25, 2.25]


def test_retry_after_is_honoured_and_bounded(server):
    server.script = [Answer(429, b"", {"Retry-After": "7"})]
    waits = []
    with _client(server, waits=waits) as client:
        client.complete(request())
    assert len(waits) == 1 and 7 <= waits[0] < 7.1
    server.script = [Answer(429, b"", {"Retry-After": "3600"})]
    with _client(server, waits=waits) as client, pytest.raises(HttpStatusError, match="wait 3600 s") as caught:
        client.complete(request())
    assert caught.value.attempts == 1 and len(waits) == 1


def test_retry_after_forms():
    now = 1_800_000_000.0
    assert retry_after(email.utils.formatdate(now + 30, usegmt=True), now) == 30
    assert retry_after("1.5", now) == 1.5
    for useless in (None, "", "soon", "-3", "nan", "inf", email.utils.formatdate(now - 30, usegmt=True)):
        assert retry_after(useless, now) == 0


@pytest.mark.parametrize("status", [400, 401, 404, 301])
def test_a_lasting_failure_is_not_tried_again(server, status):
    server.script = [Answer(status, b'{"error": "no such model"}', {"Location": "http://127.0.0.1:9/"})]
    with _client(server) as client, pytest.raises(HttpStatusError) as caught:
        client.complete(request())
    assert caught.value.status == status and len(server.calls) == 1 and "no such model" in str(caught.value)


def test_broken_connections_are_tried_again(server):
    server.script = [Answer(hang_up=True), Answer(hang_up=True)]
    with _client(server) as client:
        assert client.complete(request()).text == "hello"
    assert len(server.calls) == 3


def test_nobody_listens():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with HttpClient(HttpConfig(url, max_retries=1, **FAST)) as client, pytest.raises(HttpConnectionError) as caught:
        client.complete(request())
    assert url in str(caught.value) and caught.value.attempts == 2


@pytest.mark.parametrize("slow", [Answer(delay=1.0), Answer(drip=0.02)], ids=["silent", "dripping"])
def test_slow_answers_end(server, slow):
    server.default = slow
    start = time.monotonic()
    with _client(server, timeout=0.3, max_retries=1) as client, pytest.raises(HttpConnectionError, match="in time"):
        client.complete(request())
    assert time.monotonic() - start < 3 and len(server.calls) == 2


def _broken(**changes):
    choice = {"message": {"role": "assistant", "content": "x"}, "finish_reason": "stop"}
    return completion(choices=[choice | changes])


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b"<html>gateway</html>", "not JSON"),
        (b"", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"[]", "must be an object"),
        ({"error": {"message": "out of memory"}}, "out of memory"),
        ({}, "choices"),
        (completion(choices=[]), "choices"),
        (completion(choices=["x"]), "choices"),
        (_broken(message=None), "choices[0].message"),
        (_broken(message={"role": "user", "content": "x"}), "role"),
        (_broken(message={"role": "assistant", "content": None, "refusal": "I will not"}), "I will not"),
        (_broken(message={"role": "assistant", "content": [1]}), "content"),
        (_broken(message={"role": "assistant", "content": "\ud800"}), "surrogate"),
        (_broken(finish_reason=None), "finish_reason"),
        (_broken(finish_reason="tool_calls"), "finish_reason"),
        (completion(usage=None), "usage"),
        (completion(usage={"prompt_tokens": "3", "completion_tokens": 1}), "usage.prompt_tokens"),
        (completion(usage={"prompt_tokens": True, "completion_tokens": 1}), "usage.prompt_tokens"),
        (completion(usage={"prompt_tokens": 3, "completion_tokens": -1}), "Usage.completion"),
        (completion(usage={"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": []}), "details"),
        (
            completion(
                usage={"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": 4}}
            ),
            "cached",
        ),
        (completion(model=None), "model"),
    ],
)
def test_malformed_answers_are_named_and_not_paid_twice(server, body, told):
    server.default = Answer(body=body)
    with _client(server) as client, pytest.raises(HttpReplyError) as caught:
        client.complete(request())
    assert told in str(caught.value) and server.url in str(caught.value) and "200" in str(caught.value)
    assert len(server.calls) == 1


def test_optional_parts_may_be_absent(server):
    body = completion(usage={"prompt_tokens": 3, "completion_tokens": 1, "prompt_tokens_details": None})
    del body["id"]
    server.default = Answer(body=body)
    with _client(server) as client:
        reply = client.complete(request())
    assert reply.usage == Usage(3, 0, 1) and reply.id == ""


def test_calls_in_flight_are_limited(server):
    server.default = Answer(delay=0.05)
    with _client(server, concurrency=3) as client:
        threads = [threading.Thread(target=client.complete, args=(request(str(i)),)) for i in range(9)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(server.calls) == 9 and server.most_in_flight <= 3


def test_the_environment_has_no_say(server, monkeypatch, tmp_path):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    netrc = tmp_path / "netrc"
    netrc.write_text("machine 127.0.0.1 login me password hunter2\n")
    monkeypatch.setenv("NETRC", str(netrc))
    with _client(server, max_retries=0) as client:
        assert client.complete(request()).text == "hello"
    assert "Authorization" not in server.headers[0]


def test_the_token_goes_into_the_header_and_nowhere_else(server, monkeypatch, caplog):
    monkeypatch.setenv("LLM_TOKEN", TOKEN)
    caplog.set_level(logging.DEBUG)
    server.script = [Answer(), Answer(401, f"bad key {TOKEN}".encode()), Answer(body=f"bad {TOKEN}".encode())]
    with _client(server, token_env="LLM_TOKEN", max_retries=0) as client:
        client.complete(request())
        assert server.headers[0]["Authorization"] == f"Bearer {TOKEN}"
        texts = [repr(client), str(client), repr(client.config)]
        for _ in range(2):
            with pytest.raises(LLMError) as caught:
                client.complete(request())
            texts.append(str(caught.value))
    assert "bad key [token]" in texts[-2]
    assert not [text for text in (*texts, caplog.text) if TOKEN in text]


def test_an_answer_that_repeats_the_token_is_withheld(server, monkeypatch):
    monkeypatch.setenv("LLM_TOKEN", TOKEN)
    server.default = Answer(body=completion(f"your key is {TOKEN}"))
    with _client(server, token_env="LLM_TOKEN") as client, pytest.raises(HttpReplyError, match="withheld") as caught:
        client.complete(request())
    assert TOKEN not in str(caught.value)
    monkeypatch.setenv("LLM_TOKEN", "EMPTY")  # the placeholder that local servers want is no secret
    server.default = Answer(body=completion("EMPTY"))
    with _client(server, token_env="LLM_TOKEN") as client:
        assert client.complete(request()).text == "EMPTY"


def test_an_unusable_token_is_named_but_not_shown(monkeypatch):
    config = HttpConfig("http://127.0.0.1:1/v1", token_env="LLM_TOKEN")
    monkeypatch.delenv("LLM_TOKEN", raising=False)
    with pytest.raises(HttpConfigError, match="LLM_TOKEN is not set"):
        HttpClient(config)
    for bad in (f"{TOKEN}\n", f"Bearer {TOKEN}", f"{TOKEN}é"):
        monkeypatch.setenv("LLM_TOKEN", bad)
        with pytest.raises(HttpConfigError, match="LLM_TOKEN") as caught:
            HttpClient(config)
        assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"base_url": ""}, "base_url"),
        ({"base_url": None}, "base_url"),
        ({"base_url": "127.0.0.1:80"}, "base_url"),
        ({"base_url": "ftp://host"}, "base_url"),
        ({"base_url": "http://host:99999"}, "base_url"),
        ({"base_url": f"http://me:{TOKEN}@host/v1"}, "base_url"),
        ({"base_url": f"http://host/v1?key={TOKEN}"}, "base_url"),
        ({"timeout": 0}, "timeout"),
        ({"max_retries": -1}, "max_retries"),
        ({"concurrency": 0}, "concurrency"),
        ({"concurrency": 1.5}, "concurrency"),
        ({"proxy": f"http://me:{TOKEN}@proxy"}, "proxy"),
        ({"json_mode": "xml"}, "json_mode"),
        ({"max_tokens_field": "n"}, "max_tokens_field"),
    ],
)
def test_a_wrong_config_is_named(changes, field):
    with pytest.raises(HttpConfigError) as caught:
        HttpConfig(**({"base_url": "http://127.0.0.1/v1"} | changes))
    assert f"HttpConfig.{field}" in str(caught.value) and TOKEN not in str(caught.value)


def test_mixed_weather(server):
    rng = random.Random(0)
    kinds = [Answer(), Answer(429, b""), Answer(500, b"{"), Answer(hang_up=True)]
    server.script = [rng.choice(kinds) for _ in range(60)]
    with _client(server, max_retries=30, backoff=0.001) as client:
        assert {client.complete(request(str(i))).text for i in range(15)} == {"hello"}
    assert json.dumps(server.calls[0]["messages"]) == '[{"role": "user", "content": "0"}]'
