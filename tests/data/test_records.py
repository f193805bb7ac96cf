"""Records: both shapes to one form, random access, and errors that name file, line and field."""

import base64
import json
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import ImageConfig
from mage_jax.data.parse import RecordError, parse_record
from mage_jax.data.records import RecordSet
from mage_jax.data.samples import make_sample, materialise, plan
from tests.data.helpers import VISION

TOY = Tokenizer.load("toy")
USER = {"role": "user", "content": "hi"}
ANSWER = {"role": "assistant", "content": "yes"}
HUMAN = {"from": "human", "value": "hi"}
GPT = {"from": "gpt", "value": "yes"}


def _parse(data, source_file="/data/set.jsonl", line=7):
    return parse_record(json.dumps(data), source_file=source_file, line=line)


def _write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def _image(path, width=64, height=64):
    rgb = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
    Image.fromarray(rgb).save(path)
    return path


def test_both_shapes_become_the_same_record():
    openai = _parse(
        {
            "id": "a",
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "image", "image": "x/1.png"}, {"type": "text", "text": "What?"}]},
                ANSWER,
            ],
        }
    )
    sharegpt = _parse(
        {
            "id": "a",
            "image": "x/1.png",
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": "<image>\nWhat?"},
                GPT,
            ],
        }
    )
    assert openai == sharegpt
    assert openai.images[0].path == "/data/x/1.png"
    assert openai.where == "/data/set.jsonl:7"


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("<image>\nA", [None, "A"]),
        ("A\n<image>", ["A", None]),
        ("A <image> B", ["A ", None, " B"]),
        ("<image>\n<image>\nA", [None, None, "A"]),
        ("<image>\n\nA", [None, "\nA"]),
        ("<image>", [None]),
        ("A\n<image>\nB<image>", ["A\n", None, "B", None]),
    ],
)
def test_placeholders(value, expected):
    record = _parse(
        {"image": ["i.png"] * expected.count(None), "conversations": [{"from": "human", "value": value}, GPT]}
    )
    assert [item.get("text") for item in record.messages[0]["content"]] == expected


def test_image_tag_in_an_answer_is_text():
    record = _parse({"conversations": [HUMAN, {"from": "gpt", "value": "use <image>"}]})
    assert record.messages[1]["content"] == "use <image>" and not record.images


def test_where_images_may_be(tmp_path):
    encoded = _image(tmp_path / "a.png").read_bytes()
    uri = "data:image/png;base64," + base64.b64encode(encoded).decode()
    urls = ["a.png", "/abs/b.png", "../c.png", "file:///d%20e.png", uri]
    content = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    content.append({"type": "image_url", "image_url": "f.png"})
    record = _parse({"messages": [{"role": "user", "content": content}, ANSWER]})
    paths = [image.path for image in record.images]
    assert paths[:4] == ["/data/a.png", "/abs/b.png", "/data/../c.png", "/d e.png"] and paths[5] == "/data/f.png"
    assert record.images[4].encoded == encoded


def test_ids():
    assert _parse({"messages": [USER, ANSWER]}).id == "set:7"
    assert _parse({"id": 5, "messages": [USER, ANSWER]}).id == "5"


BAD = {
    "no shape": ({}, "messages: needs exactly one"),
    "both shapes": ({"messages": [USER, ANSWER], "conversations": [HUMAN, GPT]}, "messages: needs exactly one"),
    "list": ([], "line: must be a JSON object"),
    "no turns": ({"messages": []}, "messages: must be a list"),
    "turn": ({"messages": [1]}, r"messages\[0\]: must be an object"),
    "role": ({"messages": [USER, {"role": "tool", "content": ""}]}, r"messages\[1\]\.role: unknown role 'tool'"),
    "role list": ({"messages": [{"role": [], "content": ""}]}, r"messages\[0\]\.role: unknown role"),
    "from": ({"conversations": [{"from": "bing", "value": ""}]}, r"conversations\[0\]\.from: unknown role 'bing'"),
    "from list": ({"conversations": [{"from": ["gpt"], "value": ""}]}, r"conversations\[0\]\.from: unknown role"),
    "value": ({"conversations": [{"from": "gpt"}]}, r"conversations\[0\]\.value: must be a string"),
    "content": ({"messages": [{"role": "user"}]}, r"messages\[0\]\.content: must be a string"),
    "late system": ({"messages": [USER, ANSWER, {"role": "system", "content": ""}]}, r"messages\[2\]: a system turn"),
    "no assistant": ({"messages": [USER]}, "messages: has no assistant turn"),
    "no gpt": ({"conversations": [HUMAN]}, "conversations: has no assistant turn"),
    "item": ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\]\.content\[0\]\.type: must be"),
    "audio": ({"messages": [{"role": "user", "content": [{"type": "audio"}]}]}, "got 'audio'"),
    "no path": ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, r"content\[0\]\.image: must be"),
    "image answer": (
        {"messages": [{"role": "assistant", "content": [{"type": "image", "image": "a"}]}]},
        "assistant turn cannot hold",
    ),
    "web": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "http://x/a.png"}]}, ANSWER]},
        "must be a local file",
    ),
    "base64": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "data:image/png;base64,@@"}]}, ANSWER]},
        "is not base64",
    ),
    "data": (
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "data:image/png,x"}]}, ANSWER]},
        "a data URI must be",
    ),
    "too few": ({"image": [], "conversations": [{"from": "human", "value": "<image>"}, GPT]}, "image: 0 images, but 1"),
    "too many": ({"image": ["a", "b"], "conversations": [HUMAN, GPT]}, "image: 2 images, but 0"),
    "image type": ({"image": 3, "conversations": [HUMAN, GPT]}, r"image\[0\]: must be a string"),
    "id": ({"id": {}, "messages": [USER, ANSWER]}, "id: must be"),
    "surrogate": ({"messages": [USER, {"role": "assistant", "content": "\ud800"}]}, "lone surrogate"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_records_name_place_and_field(name):
    data, reason = BAD[name]
    with pytest.raises(RecordError, match=r"^/data/set\.jsonl:7: .*" + reason):
        _parse(data)


@pytest.mark.parametrize(
    "raw", [b"", b"\n", b"  \r\n", b"{", b"\xff\xfe", b"[" * 100_000, b"\xef\xbb\xbf{}", b"1" * 5000]
)
def test_lines_that_are_not_json(raw):
    with pytest.raises(RecordError, match=r"^s\.jsonl:1: line: "):
        parse_record(raw, source_file="s.jsonl", line=1)


@given(st.binary(max_size=200))
def test_random_bytes_raise_only_record_errors(raw):
    _parse_or_record_error(raw)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_URLS = st.sampled_from(["a.png", "http://x", "file://x/y", "data:,", "data:x;base64,é", "http://[", "x\0"]) | _JSON
_ITEMS = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image", "image_url", "x"]) | _JSON,
        "text": _JSON,
        "image": _URLS,
        "image_url": _URLS | st.fixed_dictionaries({"url": _URLS}),
    },
)
_TURNS = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "x"]) | _JSON,
        "content": st.text() | st.lists(_ITEMS | _JSON, max_size=3) | _JSON,
        "from": st.sampled_from(["human", "gpt", "system", "x"]) | _JSON,
        "value": st.sampled_from(["<image>", "a<image>\nb", ""]) | _JSON,
    },
)
_RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "id": _JSON,
        "image": _URLS | st.lists(_URLS, max_size=2),
        "messages": st.lists(_TURNS, max_size=3) | _JSON,
        "conversations": st.lists(_TURNS, max_size=3) | _JSON,
    },
)


@given(_RECORDS | _JSON)
def test_random_structures_raise_only_record_errors(data):
    _parse_or_record_error(json.dumps(data))


def _parse_or_record_error(raw):
    try:
        parse_record(raw, source_file="s.jsonl", line=3)
    except RecordError as error:
        assert str(error).startswith("s.jsonl:3: ")


def test_random_access_over_several_files(tmp_path):
    a = _write(tmp_path / "a.jsonl", [{"id": f"é{i}", "messages": [USER, ANSWER]} for i in range(3)])
    b = tmp_path / "b.jsonl"
    b.write_bytes(
        json.dumps({"messages": [USER, ANSWER]}).encode()
        + b"\r\n"
        + json.dumps({"conversations": [HUMAN, GPT]}).encode()
    )
    records = RecordSet([a, b])
    assert len(records) == 5
    assert [records[i].id for i in (4, 0, 3, -3)] == ["b:2", "é0", "b:1", "é2"]
    with pytest.raises(IndexError):
        records[5]
    again = pickle.loads(pickle.dumps(records))
    assert [r.id for r in again] == [r.id for r in records]
    assert len(RecordSet(a)) == 3
    assert RecordSet([a]).fingerprint != records.fingerprint == RecordSet([a, b]).fingerprint


def test_only_offsets_are_kept(tmp_path):
    path = _write(
        tmp_path / "a.jsonl", [{"id": i, "messages": [USER, {**ANSWER, "content": "x" * 5000}]} for i in range(50)]
    )
    assert len(pickle.dumps(RecordSet(path))) < 2000


def test_opening_finds_bad_lines_and_double_ids(tmp_path):
    good = {"id": "same", "messages": [USER, ANSWER]}
    a = _write(tmp_path / "a.jsonl", [good])
    b = _write(tmp_path / "b.jsonl", [{"messages": [USER, ANSWER]}, good])
    with pytest.raises(RecordError, match=rf"{b}:2: id: 'same' is already used by {a}:1"):
        RecordSet([a, b])
    b.write_text(json.dumps(good) + "\n\n" + json.dumps(good) + "\n")
    with pytest.raises(RecordError, match=rf"{b}:2: line: is empty"):
        RecordSet([b])
    with pytest.raises(RecordError, match=r"none\.jsonl: cannot be read"):
        RecordSet([tmp_path / "none.jsonl"])
    (tmp_path / "empty.jsonl").touch()
    assert len(RecordSet([tmp_path / "empty.jsonl"])) == 0


def test_a_file_that_shrinks_is_noticed(tmp_path):
    path = _write(tmp_path / "a.jsonl", [{"messages": [USER, ANSWER]}] * 2)
    records = RecordSet(path)
    path.write_text("")
    with pytest.raises(RecordError, match=r"a\.jsonl:2: line: the file became shorter"):
        records[1]


def _image_record(tmp_path, name="a.png"):
    content = [{"type": "image", "image": name}, {"type": "text", "text": "What?"}]
    return _parse({"messages": [{"role": "user", "content": content}, ANSWER]}, str(tmp_path / "set.jsonl"), 1)


def test_sample_tokens_match_its_patches(tmp_path):
    _image(tmp_path / "a.png", 100, 60)
    sample = make_sample(_image_record(tmp_path), tokenizer=TOY, image=ImageConfig(), vision=VISION)
    assert sample.patches.dtype == np.uint8 and sample.patches.shape == (24, 768)
    assert np.count_nonzero(sample.tokens == TOY.special_ids.image_pad) == 6
    assert sample.patch_positions.shape == (24, 3) and set(sample.patch_windows) == {1}


def test_planning_decodes_nothing(tmp_path, monkeypatch):
    _image(tmp_path / "a.png")
    monkeypatch.setattr("PIL.ImageFile.ImageFile.load", lambda self: pytest.fail("decoded a picture"))
    planned = plan(_image_record(tmp_path), tokenizer=TOY, image=ImageConfig(), vision=VISION)
    assert planned.num_patches == 16


def test_image_problems_name_the_record(tmp_path):
    record = _image_record(tmp_path)
    kwargs = {"tokenizer": TOY, "image": ImageConfig(), "vision": VISION}
    with pytest.raises(RecordError, match=r"set\.jsonl:1: images\[0\]: no file .*a\.png"):
        plan(record, **kwargs)
    (tmp_path / "a.png").write_text("no picture")
    with pytest.raises(RecordError, match=r"set\.jsonl:1: images\[0\]: .*a\.png"):
        plan(record, **kwargs)
    planned = plan(_image_record(tmp_path, _image(tmp_path / "b.png").name), **kwargs)
    _image(tmp_path / "b.png", 128, 64)
    with pytest.raises(RecordError, match=r"set\.jsonl:1: images\[0\]: .*b\.png changed"):
        materialise(planned, image=ImageConfig(), vision=VISION)
    whole = (tmp_path / "b.png").read_bytes()
    (tmp_path / "b.png").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(RecordError, match=r"set\.jsonl:1: images\[0\]: .*b\.png"):
        materialise(plan(record := _image_record(tmp_path, "b.png"), **kwargs), image=ImageConfig(), vision=VISION)
    assert record.where.endswith("set.jsonl:1")
