"""Faults of every public format are named by file, line and field, and coordinates never leave their space."""

import copy
import json
import pathlib
import tempfile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mage_jax.data.adapters import ADAPTERS
from mage_jax.data.adapters.base import AdapterError, Context, Grid, Item, Place, ReadOptions
from mage_jax.data.image_store import ImageStore
from mage_jax.data.import_records import ImportFailed, episode_line, import_records

HERE = pathlib.Path(__file__).parent / "adapters"

USER = {"role": "user", "content": "Do it."}


def _call(name, arguments, **more):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": name, "arguments": arguments}}],
        **more,
    }


def _step(code="pyautogui.click(0.5, 0.5)", index=0, image="a.png", **value):
    return {"index": index, "image": image, "value": {"thought": "t", "action": "a", "code": code, **value}}


def _task(*steps, **more):
    return {"task_id": "t", "instruction": "i", "traj": list(steps), **more}


def _scalecua(answer):
    return {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nq"}, {"from": "gpt", "value": answer}],
    }


def _trace(*messages, **more):
    return {"instance_id": "x", "messages": [USER, *messages], **more}


def _traj(action, **more):
    return {"trajectory": [{"thought": "t", "action": action, "observation": "o", **more}]}


FAULTS = [
    ("openai", [], "line: must be a JSON object"),
    ("openai", {}, "messages: is missing"),
    ("openai", {"messages": [USER], "x": 1}, "x: unknown field"),
    ("openai", {"messages": [{"role": "robot"}]}, r"messages\[0\]\.role: unknown role 'robot'"),
    (
        "openai",
        {"messages": [USER, USER, _call("bash", {"command": "ls"})]},
        r"messages\[1\]: exactly one user message",
    ),
    ("openai", {"messages": [USER]}, "messages: has no answer"),
    (
        "openai",
        {"messages": [USER, _call("browser", {})]},
        r"messages\[1\]\.tool_calls\[0\]\.name: unknown tool 'browser'",
    ),
    ("openai", {"messages": [USER, _call("bash", "{")]}, r"tool_calls\[0\]\.arguments: is not JSON"),
    (
        "openai",
        {"messages": [USER, _call("bash", {})]},
        r"messages\[1\]\.calls\[0\]: bash needs the argument 'command'",
    ),
    (
        "openai",
        {"messages": [USER, _call("computer_use", {"action": "click", "coordinate": [1000, 5]})]},
        r"tool_calls\[0\]\.arguments\.coordinate\.x: 1000 is outside 0 <= v <= 999 of space thousand",
    ),
    (
        "openai",
        {"messages": [USER, _call("bash", {"command": "ls"}), _call("bash", {"command": "ls"})]},
        "turn 1: nothing answers",
    ),
    (
        "openai",
        {"messages": [USER, _call("bash", {"command": "ls"}), {"role": "tool", "content": ""}] + [{"role": "tool"}]},
        r"messages\[3\]: answers no open call",
    ),
    ("openai", {"messages": [USER, {"role": "assistant", "content": "<tool_call>"}]}, r"messages\[1\]\.content: "),
    (
        "openai",
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "none.png"}]}]},
        r"content\[0\]\.image: .*none\.png cannot be read",
    ),
    (
        "openai",
        {"messages": [{"role": "user", "content": [{"type": "image", "image": "http://x/a.png"}]}]},
        "must be a local file",
    ),
    ("sharegpt", {"messages": []}, "conversations: is missing"),
    (
        "sharegpt",
        {"image": "a.png", "conversations": [{"from": "gpt", "value": "x"}]},
        "image: 1 images, but 0 <image>",
    ),
    ("sharegpt", {"conversations": [{"from": "gpt", "value": "x"}]}, r"conversations\[0\]: an answer stands before"),
    ("agentnet", _task(), "traj: must be a list of at least one"),
    ("agentnet", {"task_id": "t"}, "instruction: is missing"),
    ("agentnet", _task(_step(index=1)), r"traj\[0\]\.index: must count steps from 0"),
    (
        "agentnet",
        _task(_step("pyautogui.click(500, 0.5)")),
        r"traj\[0\]\.value\.code: code line 1: pyautogui\.click\.x: 500 is outside",
    ),
    ("agentnet", _task(_step("import os\nos.system('x')")), r"traj\[0\]\.value\.code: code line 1: Import: "),
    (
        "agentnet",
        _task(_step(last_step_correct="yes")),
        r"traj\[0\]\.value\.last_step_correct: must be true, false or null",
    ),
    ("agentnet", _task(_step(thought="</think>")), r"traj\[0\]\.value: a thought cannot hold"),
    ("agentnet", _task(_step(image="b.png")), r"traj\[0\]\.image: .*--images names the folder"),
    ("agentnet", _task(_step(image="bad.png")), r"traj\[0\]\.image: the picture: "),
    ("agentnet", _task(_step(), mood="good"), "mood: unknown field"),
    (
        "scalecua",
        _scalecua("<action>swipe(0.1)</action>"),
        r"conversations\[1\]\.value\.action: code line 1: swipe: is not a known call",
    ),
    ("scalecua", _scalecua("well <action>click(0.1, 0.1)</action>"), r"conversations\[1\]\.value: must be one answer"),
    ("scalecua", _scalecua("<action>click(1.1, 0.1)</action>"), r"click\.x: 1\.1 is outside"),
    (
        "scalecua",
        {**_scalecua("<action>click(0.1, 0.1)</action>"), "width": 5},
        "width: is 5, but the picture is 200x100",
    ),
    (
        "osatlas",
        {"img_filename": "a.png", "instruction": "i", "bbox": [0.1, 0.1, 1.2, 0.2]},
        r"bbox\[2\]: 1\.2 is outside",
    ),
    (
        "osatlas",
        {"img_filename": "a.png", "instruction": "i", "bbox": [0.5, 0.1, 0.2, 0.2]},
        "bbox: is not left, top, right, bottom",
    ),
    ("osatlas", {"img_filename": "a.png", "instruction": "i", "bbox": "x"}, "bbox: must be four numbers"),
    (
        "osatlas",
        {"img_filename": "a.png", "elements": [{"bbox": [0, 0, 1, 1]}]},
        r"elements\[0\]\.instruction: is missing",
    ),
    (
        "screenspot",
        {"img_filename": "a.png", "instruction": "i", "bbox": [190, 0, 11, 5]},
        r"bbox\[2\]: 201 is outside 0 <= v <= 200",
    ),
    ("screenspot", {"instruction": "i", "bbox": [0, 0, 1, 1]}, "img_filename: must be str"),
    ("openhands", _trace(), "messages: has no assistant message"),
    ("openhands", _trace(_call("browser", {})), r"messages\[1\]\.tool_calls\[0\]\.name: unknown tool 'browser'"),
    (
        "openhands",
        _trace(_call("execute_bash", {"command": "C-c", "is_input": "true"})),
        r"arguments\.is_input: input to a running",
    ),
    (
        "openhands",
        _trace(_call("str_replace_editor", {"command": "undo_edit", "path": "/a"})),
        r"arguments\.command: the editor's 'undo_edit'",
    ),
    ("openhands", _trace(_call("think", {"thought": "hm"})), "messages: ends with a thought"),
    ("openhands", _trace({"role": "assistant", "content": "Done."}), r"messages\[1\]\.content: "),
    ("openhands", _trace(_call("finish", {"message": "x"}), resolved=2), "resolved: must be 0, 1 or -1"),
    ("openhands", {"instance_id": "x", "messages": "[{"}, "messages: is not JSON"),
    ("sweagent", _traj("open setup.py 3"), r"trajectory\[0\]\.action: open is SWE-agent's own command"),
    ("sweagent", _traj("  "), r"trajectory\[0\]\.action: is empty"),
    ("sweagent", _traj("ls"), "history: no user message"),
    ("episodes", {}, "format_version: is missing"),
    ("osworld", {"step_num": 1, "action": "DONE", "x": 1}, "x: unknown field"),
    ("osworld", {"step_num": "1", "action": "DONE"}, "step_num: must count up"),
    ("osworld", {"step_num": 1, "action": 5}, "action: must be str"),
    ("osworld", {"step_num": 1, "action": "pyautogui.click(1, 1)"}, "is in pixels, but no screenshot"),
    ("osworld", {"step_num": 1, "action": "DONE", "screenshot_file": "b.png"}, "screenshot_file: .*cannot be read"),
]


@pytest.mark.parametrize(("format", "record", "reason"), FAULTS, ids=[f"{f}-{i}" for i, (f, _, _) in enumerate(FAULTS)])
def test_faults_name_file_line_and_field(tmp_path, format, record, reason):
    Image.new("RGB", (200, 100)).save(tmp_path / "a.png")
    (tmp_path / "bad.png").write_bytes(b"no picture")
    path = tmp_path / {"osworld": "traj.jsonl"}.get(format, "records.jsonl")
    path.write_text(json.dumps(record) + "\n")
    with pytest.raises(ImportFailed, match=rf"^{path}:1: .*{reason}"):
        import_records(path, tmp_path / "out", format=format, options=ReadOptions(name="set"))
    assert not (tmp_path / "out").exists() and not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("space", "value", "expected"),
    [
        ("pixel", 0, 0), ("pixel", 199, 995), ("pixel", 100.9, 500), ("pixel", 200, None), ("pixel", -1, None),
        ("unit", 0, 0), ("unit", 1, 999), ("unit", 0.5, 500), ("unit", 1.001, None), ("unit", -0.1, None),
        ("thousand", 0, 0), ("thousand", 999, 999), ("thousand", 5.0, 5), ("thousand", 1000, None),
        ("thousand", 5.5, None),
        ("unit", True, None), ("unit", "0.5", None), ("unit", float("nan"), None), ("pixel", 10**400, None),
    ],
)  # fmt: skip
def test_coordinates_in_every_space(space, value, expected):
    grid, place = Grid(space, (200, 100)), Place("set.jsonl", 12)
    if expected is None:
        with pytest.raises(AdapterError, match=r"^set\.jsonl:12: code\.x: ") as caught:
            grid.point(value, 0, place=place, field="code")
        assert caught.value.kind == "coordinate"
    else:
        assert grid.point(value, 0, place=place, field="code") == [expected, 0]


# Random damage: one value of a good record replaced by anything is read, or is an AdapterError, nothing else.

_JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text(max_size=8)
    | st.sampled_from(["shot_0.png", "<tool_call>", "</think>", "{}", "[]", "<image>", "DONE", "bash", "\ud800"]),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=6), inner, max_size=2),
    max_leaves=4,
)


def _records(name):
    """The records of a fixture, decoded."""
    text = (HERE / name).read_text()
    if name.endswith(".jsonl"):
        return [json.loads(line) for line in text.splitlines()]
    value = json.loads(text)
    return value if isinstance(value, list) else [value]


def _paths(value, path=()):
    yield path
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        yield from _paths(child, (*path, key))


GOOD = {
    "openai": "openai.jsonl",
    "sharegpt": "sharegpt.jsonl",
    "agentnet": "agentnet.jsonl",
    "scalecua": "scalecua.jsonl",
    "osatlas": "osatlas.json",
    "screenspot": "screenspot.json",
    "openhands": "openhands.jsonl",
    "sweagent": "acme__box-12.traj",
    "osworld": "osworld/results/os/task-1/traj.jsonl",
}


@pytest.mark.parametrize("format", GOOD)
@given(data=st.data())
@settings(deadline=None, max_examples=60)
def test_random_damage_is_read_or_an_adapter_error(format, data):
    adapter, path = ADAPTERS[format], HERE / GOOD[format]
    records = copy.deepcopy(_records(GOOD[format]))
    i = data.draw(st.integers(0, len(records) - 1))
    damaged = data.draw(st.sampled_from([p for p in _paths(records[i]) if p]))
    at = records[i]
    for key in damaged[:-1]:
        at = at[key]
    at[damaged[-1]] = data.draw(_JSON)
    if format == "osworld":  # a folder is one record
        content = "".join(json.dumps(record) + "\n" for record in records).encode()
    else:
        content = json.dumps(records[i]).encode()
    with tempfile.TemporaryDirectory() as folder:
        options = ReadOptions(name="set", tasks=HERE / "osworld/tasks")
        context = Context(options, ImageStore(folder), adapter.coord_space)
        try:
            for episode in adapter.convert(Item(Place(str(path), 1), content), context):
                episode_line(episode, Place(str(path), 1))
        except AdapterError as error:
            assert str(error).startswith(f"{path}:")
