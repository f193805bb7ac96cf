"""The quickstart's whole path at six steps, by the commands that users type, and generation's error messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from launch.generate import main as generate
from launch.quickstart import is_hit

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "tests/data/miniwob/images/click-test-0.png"


@pytest.fixture(scope="module")
def smoke(tmp_path_factory):
    run = tmp_path_factory.mktemp("quickstart") / "run"
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    result = subprocess.run(
        [sys.executable, "launch/quickstart.py", "--smoke", "--run", str(run)],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return run, result.stdout


def test_the_whole_path_runs_and_says_what_it_did(smoke):
    run, printed = smoke
    summary = json.loads((run / "summary.json").read_text())
    assert summary["steps"] == 6
    assert summary["loss"][1] < summary["loss"][0]
    equal, tensors = summary["tensors_equal_after_reimport"]
    assert equal == tensors > 30
    assert summary["clicks_on_held_out_pages"][1] == 17
    for line in ("training loss", "bit-equal", "loss.png", "$ python launch/train.py"):
        assert line in printed
    assert (run / "loss.png").read_bytes()[:4] == b"\x89PNG"


def test_exported_folder_has_what_servers_need(smoke):
    exported = smoke[0] / "hf"
    names = {p.name for p in exported.iterdir()}
    assert {"config.json", "generation_config.json", "tokenizer.json", "preprocessor_config.json"} <= names
    assert "model.safetensors" in names or "model.safetensors.index.json" in names


def test_generate_streams_an_answer(smoke, capsys):
    argv = ["--model", str(smoke[0] / "hf"), "--image", str(PAGE), "--prompt", "Click the button."]
    assert generate([*argv, "--max_new_tokens", "5", "--chunk", "2"]) == 0
    out = capsys.readouterr()
    assert "prompt tokens (35 visual)" in out.err
    again = [*argv, "--max_new_tokens", "5", "--temperature", "1", "--top_p", "0.9", "--top_k", "20", "--seed", "3"]
    assert generate(again) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--model": "no/such"}, "no/such"),
        ({"--image": "no-such.png"}, "no-such.png"),
        ({"--image": __file__}, "test_quickstart.py"),
        ({"--tokenizer": "no-such.json"}, "no-such.json"),
        ({"--top_p": "0"}, "top_p"),
    ],
)
def test_generate_names_what_is_wrong(smoke, capsys, change, message):
    flags = {"--model": str(smoke[0] / "hf"), "--image": str(PAGE), "--prompt": "x", "--max_new_tokens": "2"} | change
    assert generate([word for pair in flags.items() for word in pair]) == 1
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error


def test_a_checkpoint_without_tokenizer_says_what_to_do(capsys):
    golden = ROOT / "tests/golden/model/A_square"
    assert generate(["--model", str(golden), "--prompt", "x"]) == 1
    assert "--tokenizer" in capsys.readouterr().err


def test_a_foreign_tokenizer_is_refused(capsys):
    golden = ROOT / "tests/golden/model/A_square"  # its image token is 505, the toy tokenizer's 504
    assert generate(["--model", str(golden), "--prompt", "x", "--tokenizer", "toy"]) == 1
    assert "belongs to another checkpoint" in capsys.readouterr().err


def test_hits_are_judged_in_pixels():
    record = {"image_size": [160, 210], "target_box": [24, 96, 96, 168]}
    answer = lambda x, y: json.dumps({"arguments": {"coordinate": [x, y]}})
    assert is_hit(answer(375, 629), record)
    assert is_hit(answer(150, 458), record) and not is_hit(answer(149, 457), record)
    assert not is_hit(answer(700, 629), record)
    assert not is_hit("no call", record)
    assert np.isscalar(is_hit("", record))
