"""The offline backend: a function of the request, the same everywhere."""

import subprocess
import sys

import pytest

from mage_jax.llm.client import Message
from mage_jax.llm.offline import IMAGE_TOKENS, OfflineClient, OfflineError, Rule, estimate_tokens, example_answer
from mage_jax.llm.structured import StructuredClient
from tests.llm.helpers import PNG, request

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "tags": {"type": "array", "items": {"enum": ["a", "b"]}}},
    "required": ["name", "tags", "more"],
}


def test_the_first_fitting_rule_answers():
    client = OfflineClient(
        [
            Rule("forge/judge", lambda r, rng: {"b": 1, "a": r.messages[0].text}),
            Rule("forge/*", "skill $skill, seed $seed: $text"),
            Rule("*", ["one", "two", "three"]),
        ]
    )
    assert client.complete(request("x", purpose="forge/judge")).text == '{"a":"x","b":1}'
    reply = client.complete(request("hi", purpose="forge/author", labels={"skill": "calc"}, seed=4))
    assert reply.text == "skill calc, seed 4: hi" and reply.finish_reason == "stop" and reply.model == "offline"
    chosen = [client.complete(request(seed=seed)).text for seed in range(30)]
    assert set(chosen) == {"one", "two", "three"}
    assert chosen == [client.complete(request(seed=seed)).text for seed in range(30)]
    assert client.calls == 62


def test_usage_is_counted():
    client = OfflineClient([Rule("*", "12345678")])
    usage = client.complete(request(messages=(Message("user", "abcde", (PNG,)),))).usage
    assert (usage.prompt, usage.cached_prompt, usage.completion) == (2 + IMAGE_TOKENS, 0, 2)
    assert [estimate_tokens(t) for t in ("", "a", "éé", "ééé")] == [0, 1, 1, 2]


def test_schemas_are_filled():
    client = StructuredClient(OfflineClient([Rule("*", example_answer)]))
    first = client.complete(request(schema=SCHEMA)).parsed
    assert set(first) == {"name", "tags", "more"} and client.reasked == 0
    assert client.complete(request(schema=SCHEMA)).parsed == first
    assert client.complete(request(schema=SCHEMA, seed=1)).parsed != first


def test_answers_are_the_same_in_another_process():
    code = (
        "from mage_jax.llm.offline import *\nfrom tests.llm.helpers import request\n"
        f"print(OfflineClient([Rule('*', example_answer)]).complete(request(schema={SCHEMA!r})).text)"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert told == OfflineClient([Rule("*", example_answer)]).complete(request(schema=SCHEMA)).text


@pytest.mark.parametrize(
    ("rules", "told"),
    [
        ([], "no rule for purpose 'test'; known patterns: none"),
        ([Rule("forge/*", "x")], "known patterns: 'forge/*'"),
        ([Rule("*", "$skill")], "skill"),
        ([Rule("*", "$")], "Invalid placeholder"),
        ([Rule("*", [])], "no template"),
        ([Rule("*", lambda r, rng: 3)], "got int"),
        ([Rule("*", "x" * 8000)], "max_tokens is 1024"),
        ([Rule("*", example_answer)], "needs a schema"),
    ],
)
def test_what_cannot_be_answered_is_named(rules, told):
    with pytest.raises(OfflineError) as caught:
        OfflineClient(rules).complete(request())
    assert told in str(caught.value)
