"""Every public format: a small hand-written file to episodes, and its faults by file, line and field."""

import json
import pathlib
import shutil
import subprocess

import pytest

from mage_jax.agent.parser import parse
from mage_jax.data.adapters import ADAPTERS
from mage_jax.data.adapters.base import AdapterError, ReadOptions, read_items
from mage_jax.data.episodes import read_episodes
from mage_jax.data.image_store import ImageStore
from mage_jax.data.import_records import ImportFailed, import_records, main

HERE = pathlib.Path(__file__).parent / "adapters"
FILES = {
    "openai": "openai.jsonl",
    "sharegpt": "sharegpt.jsonl",
    "agentnet": "agentnet.jsonl",
    "scalecua": "scalecua.jsonl",
    "osatlas": "osatlas.json",
    "screenspot": "screenspot.json",
    "openhands": "openhands.jsonl",
    "sweagent": "acme__box-12.traj",
    "osworld": "osworld/results",
}


def _import(source, out, format, *, on_error="fail", limit=None, **options):
    options = ReadOptions(**{"name": format, **options})
    summary = import_records(source, out, format=format, options=options, on_error=on_error, limit=limit)
    return list(read_episodes(out / "episodes.jsonl", store=ImageStore(out / "images"))), summary


def _fixture(tmp_path, format, **options):
    if format == "osworld":
        options["tasks"] = HERE / "osworld/tasks"
    return _import(HERE / FILES[format], tmp_path / "out", format, **options)[0]


def _trace(tool, arguments):
    """An OpenHands record of one call."""
    answer = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": tool, "arguments": arguments}}]}
    return {"instance_id": "x", "messages": [{"role": "user", "content": "Do it."}, answer]}


def _calls(turn):
    return [call.arguments.get("command", call.arguments) for call in turn.parsed.calls]


def test_every_adapter_has_a_fixture():
    assert set(FILES) | {"episodes"} == set(ADAPTERS)


@pytest.mark.parametrize("format", FILES)
def test_agent_turns_are_valid_responses_and_own_episodes_round_trip(tmp_path, format):
    episodes = _fixture(tmp_path, format)
    for episode in episodes:
        for turn in episode.turns if episode.prompt == "agent" else ():
            read = parse(turn.text)
            assert [c.arguments() for c in read.calls] == [c.arguments for c in turn.parsed.calls]
            assert (read.think, read.action) == (turn.parsed.think, turn.parsed.action)
    again, _ = _import(tmp_path / "out", tmp_path / "again", "episodes")
    assert again == episodes
    for name in ("episodes.jsonl",):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    pictures = [sorted(p.name for p in (tmp_path / d / "images").rglob("*")) for d in ("out", "again")]
    assert pictures[0] == pictures[1]


def test_openai(tmp_path):
    gui, text, chat = _fixture(tmp_path, "openai", licence="MIT")
    assert (
        gui.episode_id == "openai/gui-1" and gui.source.licence == "MIT" and gui.source.place.endswith("openai.jsonl:1")
    )
    assert gui.system == "You operate a computer." and gui.instruction == "Save the file as café.txt."
    assert gui.screen == (200, 100) and len(gui.initial) == 1
    assert [turn.channel for turn in gui.turns] == ["computer_use", "bash", "computer_use"]
    assert (
        gui.turns[0].parsed.think == "The File menu is at the top."
        and gui.turns[0].parsed.action == "Open the File menu."
    )
    assert gui.turns[0].results[0].kind == "screenshot"
    assert gui.turns[1].parsed.think == "Check the folder first." and gui.turns[1].parsed.action == "Run `ls`."
    assert [r.parts[0].text for r in gui.turns[1].results] == ["café.txt", "/tmp_workspace"]
    assert text.turns[0].text.endswith("\n</tool_call>") and _calls(text.turns[0]) == ["echo '</tool_call>'"]
    assert text.turns[0].results[0].kind == "output" and text.turns[0].results[0].parts[0].text == "</tool_call>"
    assert chat.episode_id == "openai/openai:3" and chat.prompt == "chat"
    assert [turn.text for turn in chat.turns] == ["4.", "8."] and chat.turns[0].results[0].kind == "user"


def test_sharegpt(tmp_path):
    first, second = _fixture(tmp_path, "sharegpt")
    assert [(p.text, p.image is not None) for p in first.initial[0].parts] == [
        (None, True),
        ("What colour is it?", False),
    ]
    assert first.turns[1].text == "Yes, <image> is text here."
    assert second.system == "Be short." and len({image.sha256 for image in second.images()}) == 2


def test_agentnet(tmp_path):
    (episode,) = _fixture(tmp_path, "agentnet", scroll_per_click=120)
    assert [_calls(turn)[0]["action"] for turn in episode.turns] == [
        "triple_click", "keypress", "drag", "scroll", "type", "terminate",
    ]  # fmt: skip
    assert _calls(episode.turns[0])[0]["coordinate"] == [250, 500]
    assert _calls(episode.turns[2]) == [{"action": "drag", "start": [100, 200], "end": [400, 200]}]
    assert _calls(episode.turns[3]) == [{"action": "scroll", "scroll_x": 0, "scroll_y": -600}]
    assert _calls(episode.turns[4])[0]["text"] == "Tom's <title>"
    assert [turn.supervised for turn in episode.turns] == [True, False, False, True, True, True]
    assert episode.turns[0].parsed.action == "Triple click the title to select it."
    assert (
        episode.turns[0].parsed.think == "A desktop.\nStep 0 is next."
        and episode.turns[4].parsed.think == "Step 4 is next."
    )
    shots = [episode.initial[0].images[0]] + [turn.results[0].images[0] for turn in episode.turns[:-1]]
    assert [shots.index(shot) for shot in shots] == [0, 1, 1, 0, 0, 1]  # the picture of step i precedes its code
    assert episode.turns[-1].results == () and episode.labels["alignment_score"] == 9


def test_scalecua(tmp_path):
    agent, grounding, chat = _fixture(tmp_path, "scalecua")
    assert agent.turns[0].parsed.think == "The file is selected." and len(agent.turns[0].parsed.calls) == 2
    assert agent.instruction.startswith("Task: rename the file\nPrevious operations")
    assert grounding.prompt == "grounding" and _calls(grounding.turns[0])[0]["coordinate"] == [200, 300]
    assert grounding.turns[0].text.startswith("<tool_call>\n") and chat.prompt == "chat"


def test_grounding(tmp_path):
    atlas = _fixture(tmp_path, "osatlas")
    assert [_calls(e.turns[0])[0]["coordinate"] for e in atlas] == [[200, 300], [200, 300], [500, 500]]
    assert [e.episode_id for e in atlas] == ["osatlas/osatlas:2", "osatlas/osatlas:13.0", "osatlas/osatlas:13.1"]
    spots, _ = _import(HERE / FILES["screenspot"], tmp_path / "spots", "screenspot")
    # centre (40.5, 30.5) is in pixel (40, 30) of 200 x 100; the box in the corner touches the border
    assert [_calls(e.turns[0])[0]["coordinate"] for e in spots] == [[200, 300], [975, 950]]
    assert spots[0].labels == {"bbox": [20, 20, 41, 21], "data_type": "icon", "data_source": "windows"}


def test_openhands(tmp_path):
    fixed, failed = _fixture(tmp_path, "openhands", licence="CC-BY-4.0")
    assert (fixed.outcome.kind, fixed.reward, fixed.source.licence) == ("success", 1.0, "MIT")
    assert (failed.outcome.kind, failed.reward, failed.source.licence) == ("fail", 0.0, "CC-BY-4.0")
    assert fixed.task_id == "openhands/acme__box-12" and fixed.system is None
    assert [turn.channel for turn in fixed.turns] == ["bash", "bash", "bash", "computer_use"]
    assert _calls(fixed.turns[1]) == [
        "find -L /repo -maxdepth 2 -not -path '*/.*' | sort",  # its answer says that it is a folder
        "cat -n /repo/box.py | sed -n '1,$p'",
    ]
    assert fixed.turns[1].parsed.action.startswith("Run `find -L /repo")
    assert fixed.turns[2].parsed.think == "The sign is wrong." and len(fixed.turns[0].results) == 1
    assert _calls(fixed.turns[3]) == [{"action": "terminate", "status": "success", "msg_to_user": "Fixed."}]


def test_editor_calls_become_commands_of_the_same_effect(tmp_path):
    fixed, failed = _fixture(tmp_path, "openhands")
    commands = [_calls(fixed.turns[2])[0], _calls(failed.turns[0])[0]]
    (tmp_path / "repo").mkdir()
    (tmp_path / "repo/box.py").write_text("return a - b\n")
    for command in commands:
        here = command.replace("/repo/", f"{tmp_path}/repo/")
        subprocess.run(["bash", "-c", here], check=True, timeout=30)
    assert (tmp_path / "repo/box.py").read_text() == "return a + b\n"
    assert (tmp_path / "repo/a b.txt").read_text() == "one\nEOF\n$HOME\n"
    again = subprocess.run(
        ["bash", "-c", commands[0].replace("/repo/", f"{tmp_path}/repo/")], capture_output=True, text=True, timeout=30
    )
    assert again.returncode and "old text occurs 0 times" in again.stderr


def test_sweagent(tmp_path):
    (episode,) = _fixture(tmp_path, "sweagent")
    assert episode.instruction == "Solve this issue: add() subtracts." and episode.outcome.kind == "unverified"
    assert [_calls(turn)[0] for turn in episode.turns[:2]] == ["ls -a", "sed -i 's/-/+/' setup.py"]
    assert episode.turns[2].channel == "computer_use" and episode.labels == {"exit_status": "submitted"}


def test_osworld(tmp_path):
    (episode,) = _fixture(tmp_path, "osworld")
    assert episode.instruction == "Write x into the file." and episode.episode_id == "osworld/os/task-1"
    assert (episode.outcome.kind, episode.reward, episode.eval.score) == ("success", 1.0, 1.0)
    assert [turn.channel for turn in episode.turns] == ["computer_use", "computer_use", "bash", "computer_use"]
    assert [turn.supervised for turn in episode.turns] == [
        False,
        True,
        True,
        True,
    ]  # nobody saw the screen before turn 1
    assert _calls(episode.turns[0]) == [{"action": "click", "coordinate": [250, 250]}]
    assert len(episode.turns[1].parsed.calls) == 2 and len(episode.turns[1].results) == 1
    assert episode.turns[2].results[0].parts[0].text == "x\n"


def test_osworld_outcomes(tmp_path):
    folder = tmp_path / "results/os/task-1"
    shutil.copytree(HERE / "osworld/results/os/task-1", folder)
    shutil.copy(folder / "step_2_a.png", folder / "initial_state.png")
    tasks = HERE / "osworld/tasks"
    for i, (result, kind, reward) in enumerate(
        (("0.5", "fail", 0.5), ("True", "success", 1.0), (None, "unverified", None))
    ):
        (folder / "result.txt").write_text(result or "") if result else (folder / "result.txt").unlink()
        (episode,), _ = _import(tmp_path / "results", tmp_path / f"out{i}", "osworld", tasks=tasks)
        assert (episode.outcome.kind, episode.reward) == (kind, reward) and episode.turns[0].supervised
    with open(folder / "traj.jsonl", "a") as file:
        file.write(json.dumps({"Error": "the machine went away"}) + "\n")
    (folder / "result.txt").write_text("0")
    (episode,), _ = _import(tmp_path / "results", tmp_path / "out", "osworld", tasks=tasks)
    assert episode.outcome.kind == "env_fail" and episode.reward is None
    with pytest.raises(ImportFailed, match=r"traj\.jsonl:1: instruction: is not in a result folder; give --tasks"):
        _import(tmp_path / "results", tmp_path / "none", "osworld")


def test_the_space_may_be_said(tmp_path):
    record = {"img_filename": str(HERE / "shot_0.png"), "instruction": "i", "bbox": [20, 20, 60, 40]}
    path = tmp_path / "mirror.jsonl"
    path.write_text(json.dumps(record) + "\n")
    for space, point in (("pixel", [200, 300]), ("thousand", [40, 30])):
        (episode,), _ = _import(path, tmp_path / space, "osatlas", coord_space=space)
        assert episode.coord_space == space and _calls(episode.turns[0])[0]["coordinate"] == point


def test_skipping_counts_faults_and_keeps_the_rest(tmp_path, capsys):
    good = _trace("finish", {"message": "x"})
    lines = [json.dumps(good), "{", json.dumps(_trace("browser", {})), json.dumps(good)]
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(lines) + "\n")
    command = ["--format", "openhands", "--in", str(path), "--out", str(tmp_path / "out")]
    assert main(command) == 1
    assert f"{path}:2: line: is not JSON" in capsys.readouterr().err and not (tmp_path / "out").exists()
    assert main([*command, "--on_error", "skip"]) == 0
    assert "4 records read, 3 skipped; wrote 1 episodes" in capsys.readouterr().out
    summary = json.loads((tmp_path / "out/summary.json").read_text())
    assert summary["skipped"] == {"malformed": 1, "foreign tool": 1, "duplicate id": 1}
    assert summary["examples"]["duplicate id"][0].startswith(f"{path}:4: id: 'openhands/x' is already used by {path}:1")
    assert main(command) == 1 and "exists; name a new folder" in capsys.readouterr().err


def test_limit_unknown_fields_and_nothing_to_read(tmp_path):
    episodes, summary = _import(HERE / "openai.jsonl", tmp_path / "one", "openai", limit=1)
    assert len(episodes) == summary.records == 1
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({**_trace("finish", {"message": "x"}), "extra": 1}))
    episodes, _ = _import(path, tmp_path / "two", "openhands", unknown_fields="ignore")
    assert len(episodes) == 1
    with pytest.raises(ImportFailed, match="no file of format openai is there"):
        _import(tmp_path / "nowhere.jsonl", tmp_path / "three", "openai")
    path.write_text("{\n")
    with pytest.raises(ImportFailed, match="no record could be imported"):
        _import(path, tmp_path / "three", "openhands", on_error="skip")


def test_json_arrays_know_their_lines(tmp_path):
    path = tmp_path / "a.json"
    path.write_text('[\n {"a": 1},\n\n {"a":\n 2}, {"a": 3}]\n')
    assert [(item.place.line, item.record()["a"]) for item in read_items(path)] == [(2, 1), (4, 2), (5, 3)]
    path.write_text('[{"a": 1}\n,\n {"a": }]')
    found = read_items(path)
    next(found)
    with pytest.raises(AdapterError, match=rf"^{path}:3: line: is not JSON"):
        next(found)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(AdapterError, match="export it as JSON lines"):
        next(read_items(tmp_path / "a.parquet"))


def test_inserting_counts_lines_as_the_editor_does(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes(b"one\r\ntwo\n")
    arguments = {"command": "insert", "path": str(file), "insert_line": 1, "new_str": "'{x}' $HOME\\n"}
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps(_trace("str_replace_editor", arguments)) + "\n")
    (episode,), _ = _import(path, tmp_path / "out", "openhands")
    subprocess.run(["bash", "-c", _calls(episode.turns[0])[0]], check=True, timeout=30)
    assert file.read_bytes() == b"one\r\n'{x}' $HOME\\n\ntwo\n"
