"""Requests, images and keys: what is refused, and what decides that two requests are the same."""

import base64
import dataclasses
import hashlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mage_jax.llm.client import (
    Client,
    InvalidRequest,
    Message,
    Reply,
    Request,
    Usage,
    canonical_json,
    canonical_request,
    data_uri,
    decode_image,
    request_key,
)
from mage_jax.llm.offline import OfflineClient
from tests.llm.helpers import JPEG, OTHER_PNG, PNG, request

JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def _reversed(value):
    """The same JSON value, with every object's keys in the opposite order."""
    if isinstance(value, dict):
        return {key: _reversed(value[key]) for key in reversed(value)}
    return [_reversed(item) for item in value] if isinstance(value, list) else value


@given(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=5))
def test_the_key_does_not_depend_on_the_order_of_keys(schema):
    assert canonical_json(schema) == canonical_json(_reversed(schema))
    assert request_key(request(schema=schema)) == request_key(request(schema=_reversed(schema)))


@given(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=5))
def test_the_canonical_request_survives_a_trip_to_disk(schema):
    canonical = canonical_request(request(schema=schema))
    assert canonical_json(json.loads(json.dumps(canonical))) == canonical_json(canonical)


@pytest.mark.parametrize(
    "changes",
    [
        {"model": "n"},
        {"max_tokens": 7},
        {"temperature": 0.5},
        {"seed": 1},
        {"schema": {"type": "object"}},
        {"messages": (Message("user", "other"),)},
        {"messages": (Message("system", "What is on the screen?"),)},
        {"messages": (Message("user", "What is on the screen?", (PNG,)),)},
        {"messages": (Message("user", "What is on the screen?"), Message("assistant", "x"))},
    ],
)
def test_whatever_decides_the_answer_changes_the_key(changes):
    assert request_key(request(**changes)) != request_key(request())


def test_images_count_by_content():
    def key(*images):
        return request_key(request(messages=(Message("user", "x", images),)))

    uri = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert key(PNG) == key(uri)
    assert len({key(PNG), key(OTHER_PNG), key(PNG, OTHER_PNG), key(OTHER_PNG, PNG)}) == 4
    assert data_uri(PNG) == uri and decode_image(uri) == ("image/png", PNG)
    assert decode_image(JPEG)[0] == "image/jpeg"


def test_bookkeeping_is_not_part_of_the_key():
    other = request(purpose="other", phase="authoring", labels={"skill": "s"})
    assert request_key(other) == request_key(request())
    assert request_key(request(temperature=0)) == request_key(request(temperature=0.0))


def test_the_key_is_stable():
    # A change here makes every recorded cassette useless: raise KEY_VERSION with it.
    example = request(schema={"type": "object"}, messages=(Message("user", "é", (PNG,)),), seed=3)
    image = hashlib.sha256(PNG).hexdigest()
    spelt = (
        '{"max_tokens":1024,"messages":[{"images":["' + image + '"],"role":"user","text":"\\u00e9"}],"model":"m",'
        '"schema":{"type":"object"},"seed":3,"temperature":0.0,"version":1}'
    )
    assert request_key(example) == hashlib.sha256(spelt.encode()).hexdigest()


def test_a_request_keeps_its_own_copy_of_the_schema():
    schema = {"type": "object"}
    first = request(schema=schema)
    schema["type"] = "array"
    assert first.schema == {"type": "object"}
    assert hash(first) == hash(request(schema={"type": "object"}))


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: Message("tool", "x"), "Message.role"),
        (lambda: Message("user", ""), "Message.text"),
        (lambda: Message("user", "\ud800"), "lone surrogate"),
        (lambda: Message("assistant", "x", (PNG,)), "Message.images"),
        (lambda: Message("user", "x", [PNG]), "must be a tuple"),
        (lambda: Message("user", "x", (b"GIF",)), "not PNG"),
        (lambda: Message("user", "x", ("https://host/a.png",)), "send the file's bytes"),
        (lambda: Message("user", "x", ("data:image/png;base64,%%%",)), "base64"),
        (lambda: Message("user", "x", ("data:image/png;base64,",)), "is empty"),
        (lambda: request(messages=()), "Request.messages"),
        (lambda: request(model=" "), "Request.model"),
        (lambda: request(purpose=""), "Request.purpose"),
        (lambda: request(max_tokens=0), "Request.max_tokens"),
        (lambda: request(max_tokens=True), "Request.max_tokens"),
        (lambda: request(temperature=float("nan")), "Request.temperature"),
        (lambda: request(seed=1.5), "Request.seed"),
        (lambda: request(phase="once"), "Request.phase"),
        (lambda: request(schema={"a": float("nan")}), "Request.schema"),
        (lambda: request(schema={"a": object()}), "Request.schema"),
        (lambda: request(labels={"task": 3}), "Request.labels['task']"),
        (lambda: Usage(1, 2, 0), "Usage.cached_prompt"),
        (lambda: Usage(-1, 0, 0), "Usage.prompt"),
        (lambda: Reply("x", Usage(0, 0, 0), "m", "done"), "Reply.finish_reason"),
        (lambda: Reply("x", Usage(0, 0, 0), "m", "stop", cost_usd=float("inf")), "Reply.cost_usd"),
    ],
)
def test_wrong_values_are_named(build, field):
    with pytest.raises(InvalidRequest) as caught:
        build()
    assert field in str(caught.value)


def test_structs_are_frozen_and_backends_fit_the_protocol():
    with pytest.raises(dataclasses.FrozenInstanceError):
        request().model = "n"
    assert isinstance(OfflineClient([]), Client)
    assert Usage(3, 1, 2) + Usage(1, 1, 1) == Usage(4, 2, 3)
    assert Usage(3, 1, 2).uncached_prompt == 2
    assert isinstance(request(), Request)
