"""Strict JSON: nothing is repaired, faults carry their path, second tries are bounded and counted."""

import copy
import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.llm.client import Usage
from mage_jax.llm.http import HttpClient, HttpConfig
from mage_jax.llm.offline import example
from mage_jax.llm.structured import (
    InvalidJson,
    SchemaError,
    StructuredClient,
    StructuredError,
    check_schema,
    decode_object,
    validate,
)
from tests.llm.helpers import Answer, Scripted, completion, request, serve

SCHEMA = {
    "type": "object",
    "properties": {
        "score": {"type": "integer"},
        "verdict": {"type": "string", "enum": ["pass", "fail"]},
        "steps": {"type": "array", "items": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
        "weight": {"type": "number"},
        "odd key": {"type": "object", "additionalProperties": {"type": "string"}},
    },
    "required": ["score"],
    "additionalProperties": False,
}
GOOD = '{"score": 3, "verdict": "pass"}'

NAMES = st.text(st.sampled_from("abcdé _"), min_size=1, max_size=4)
LEAVES = st.sampled_from([{"type": t} for t in ("string", "number", "integer", "boolean")]) | st.just(
    {"enum": ["x", 1, True, None]}
)


def _objects(inner):
    @st.composite
    def build(draw):
        properties = draw(st.dictionaries(NAMES, inner, max_size=3))
        schema = {"type": "object", "properties": properties, "additionalProperties": draw(st.booleans() | inner)}
        if properties:
            schema["required"] = draw(st.lists(st.sampled_from(sorted(properties)), unique=True))
        return schema

    return build()


SCHEMAS = st.recursive(
    LEAVES, lambda inner: _objects(inner) | st.builds(lambda i: {"type": "array", "items": i}, inner), max_leaves=8
)
WRONG = {"string": 1, "number": "x", "integer": 1.5, "boolean": 0, "array": {}, "object": []}


def _places(value, schema, path="$"):
    """(path, schema, setter) of every value under a declared schema, found independently of the validator."""
    yield path, schema
    if schema.get("type") == "object":
        for key, item in value.items():
            if key in schema["properties"]:
                yield from _places(item, schema["properties"][key], (path, key))
    if schema.get("type") == "array":
        for i, item in enumerate(value):
            yield from _places(item, schema["items"], (path, i))


def _replace(value, path, new):
    if path == "$":
        return new
    steps = []
    while path != "$":
        path, step = path
        steps.append(step)
    target = value
    for step in reversed(steps[1:]):
        target = target[step]
    target[steps[0]] = new
    return value


def _spell(path):
    if path == "$":
        return "$"
    parent, step = path
    if isinstance(step, int):
        return f"{_spell(parent)}[{step}]"
    plain = step.isascii() and step.isidentifier()
    return f"{_spell(parent)}.{step}" if plain else f"{_spell(parent)}[{json.dumps(step)}]"


@given(SCHEMAS, st.integers(0, 2**32))
def test_examples_of_a_schema_are_valid(schema, seed):
    check_schema(schema)
    value = example(schema, random.Random(seed))
    validate(value, schema)
    validate(json.loads(json.dumps(value)), schema)


@given(SCHEMAS, st.integers(0, 2**32), st.data())
def test_one_wrong_value_is_found_with_its_path(schema, seed, data):
    value = example(schema, random.Random(seed))
    path, sub = data.draw(st.sampled_from(list(_places(value, schema))))
    wrong = WRONG[sub["type"]] if "type" in sub else "not listed"
    broken = _replace(copy.deepcopy(value), path, wrong)
    with pytest.raises(InvalidJson) as caught:
        validate(broken, schema)
    assert caught.value.path == _spell(path)


@given(st.dictionaries(NAMES, SCHEMAS, min_size=1, max_size=3), st.data(), st.integers(0, 2**32))
def test_a_missing_required_key_is_found(properties, data, seed):
    key = data.draw(st.sampled_from(sorted(properties)))
    schema = {"type": "object", "properties": properties, "required": [key]}
    value = example(schema, random.Random(seed))
    del value[key]
    with pytest.raises(InvalidJson, match="is missing") as caught:
        validate(value, schema)
    assert caught.value.path == _spell(("$", key))


@given(st.dictionaries(st.text(max_size=5), st.none() | st.integers() | st.text(max_size=5) | st.lists(st.booleans())))
def test_every_object_is_decoded_as_it_is(value):
    assert decode_object(f" \n{json.dumps(value)}\t") == value


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not one JSON object"),
        ("[]", "must be an object, got array"),
        ("null", "got null"),
        (f"```json\n{GOOD}\n```", "not one JSON object"),
        (f"{GOOD} done", "Extra data"),
        (f"{GOOD}{GOOD}", "Extra data"),
        (GOOD[:-1], "not one JSON object"),
        ('{"a": 1, "a": 2}', "'a' occurs twice"),
        ('{"a": {"b": 1, "b": 1}}', "'b' occurs twice"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e999}', "out of range"),
        ('{"a": ' + "1" * 5000 + "}", "cannot be decoded"),
        ("{'a': 1}", "not one JSON object"),
        (r'{"a": "\ud800"}', "lone surrogate"),
        ('{"a": "\t"}', "control character"),
        ('{"a":' * 100_000, "$"),
    ],
)
def test_anything_else_than_one_object_is_refused(text, told):
    with pytest.raises(InvalidJson) as caught:
        decode_object(text)
    assert told in str(caught.value) and len(str(caught.value)) < 300


@pytest.mark.parametrize(
    ("change", "path"),
    [
        ({"score": "3"}, "$.score"),
        ({"score": 3.0}, "$.score"),
        ({"score": True}, "$.score"),
        ({"score": None}, "$.score"),
        ({"verdict": "maybe"}, "$.verdict"),
        ({"weight": "1"}, "$.weight"),
        ({"weight": True}, "$.weight"),
        ({"steps": [{}, {"ok": 1}]}, "$.steps[1].ok"),
        ({"steps": {}}, "$.steps"),
        ({"odd key": {"x y": 1}}, '$["odd key"]["x y"]'),
        ({"new": 1}, "$.new"),
    ],
)
def test_faults_carry_their_path(change, path):
    with pytest.raises(InvalidJson) as caught:
        validate({"score": 1} | change, SCHEMA)
    assert caught.value.path == path and str(caught.value).startswith(f"{path}: ")


def test_an_integer_is_a_number():
    for value in (3, -3, 3.0, 0.5):
        validate({"score": 1, "weight": value}, SCHEMA)


def test_enum_is_exact():
    for value, option in ((1, True), (1, 1.0), (0, False), ("1", 1)):
        validate(value, {"enum": [value]})
        with pytest.raises(InvalidJson):
            validate(value, {"enum": [option]})
    validate({"b": 1, "a": [2]}, {"enum": [{"a": [2], "b": 1}]})


@pytest.mark.parametrize(
    ("schema", "told"),
    [
        ([], "schema: must be an object"),
        ({}, "needs type or enum"),
        ({"type": "null"}, "schema.type"),
        ({"type": ["string"]}, "schema.type"),
        ({"type": "string", "pattern": "x"}, "schema.pattern"),
        ({"type": "integer", "minimum": 0}, "schema.minimum"),
        ({"type": "string", "items": {"type": "string"}}, "schema.items"),
        ({"type": "array", "items": {"type": "x"}}, "schema.items.type"),
        ({"enum": []}, "schema.enum"),
        ({"type": "object", "properties": []}, "schema.properties"),
        ({"type": "object", "properties": {"a b": {"$ref": "#"}}}, 'schema.properties["a b"]'),
        ({"type": "object", "required": "a"}, "schema.required"),
        ({"type": "object", "required": ["a"], "additionalProperties": False}, "'a' is required"),
        ({"type": "object", "additionalProperties": 1}, "schema.additionalProperties"),
    ],
)
def test_a_schema_outside_the_subset_is_refused(schema, told):
    with pytest.raises(SchemaError) as caught:
        check_schema(schema)
    assert told in str(caught.value)


def test_invalid_replies_are_asked_for_again_with_the_fault():
    inner = Scripted("Sure!", '{"score": "3"}', GOOD, cost_usd=0.25)
    client = StructuredClient(inner)
    reply = client.complete(request(schema=SCHEMA))
    assert reply.parsed == {"score": 3, "verdict": "pass"} and reply.attempts == 3
    assert reply.usage == Usage(30, 12, 9) and reply.cost_usd == 0.75
    assert (client.asked, client.reasked, client.failed) == (1, 2, 0)
    original, last = inner.asked[0].messages, inner.asked[2].messages
    assert last[: len(original)] == original and len(last) == len(original) + 2
    assert last[-2].text == '{"score": "3"}' and "$.score: must be integer, got string" in last[-1].text


def test_tries_are_bounded():
    inner = Scripted("", "b", "c", "d")
    client = StructuredClient(inner, max_reasks=2)
    with pytest.raises(StructuredError, match=r"test.*3 calls") as caught:
        client.complete(request(schema=SCHEMA))
    assert caught.value.reply.usage == Usage(30, 12, 9) and inner.texts == ["d"]
    assert (client.asked, client.reasked, client.failed) == (1, 2, 1)
    with pytest.raises(StructuredError):
        StructuredClient(Scripted("a"), max_reasks=0).complete(request(schema=SCHEMA))
    with pytest.raises(ValueError, match="max_reasks"):
        StructuredClient(inner, max_reasks=-1)


@pytest.mark.parametrize(("reason", "told"), [("length", "max_tokens"), ("content_filter", "prompt")])
def test_a_cut_reply_is_not_asked_for_again(reason, told):
    inner = Scripted(GOOD, GOOD, finish_reason=reason)
    with pytest.raises(StructuredError, match=told):
        StructuredClient(inner).complete(request(schema=SCHEMA))
    assert len(inner.asked) == 1


def test_free_text_passes_through():
    client = StructuredClient(Scripted("hello"))
    assert client.complete(request()).text == "hello" and client.asked == 0
    with pytest.raises(SchemaError, match="schema"):
        client.ask(request(), check=print)
    with pytest.raises(SchemaError, match=r"schema\.minimum"):
        client.complete(request(schema={"type": "integer", "minimum": 1}))


def test_a_further_check_takes_part():
    def check(value):
        if value["score"] > 5:
            raise InvalidJson("$.score", "must be at most 5")

    inner = Scripted('{"score": 9}', '{"score": 5}')
    assert StructuredClient(inner).ask(request(schema=SCHEMA), check).parsed == {"score": 5}
    assert "at most 5" in inner.asked[1].messages[-1].text


def test_over_http():
    with serve() as server, HttpClient(HttpConfig(server.url)) as http:
        server.script = [Answer(body=completion("```json\n{}\n```")), Answer(body=completion(GOOD))]
        assert StructuredClient(http).complete(request(schema=SCHEMA)).parsed == {"score": 3, "verdict": "pass"}
        assert "without a code fence" in server.calls[1]["messages"][-1]["content"]
