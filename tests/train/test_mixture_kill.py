"""A real run on a best-fit mixture with two worker processes: killed and resumed, it ends as an unbroken one."""

import collections
import json
import os
import subprocess
import sys

import pytest

from tests.train.test_kill import (
    CONFIG,
    EVERY,
    LAUNCHER,
    RECORDS,
    ROOT,
    STEPS,
    assert_same_outcome,
    finish,
    kill,
    outcome,
    wait_for_step,
)

DATA = """data=DataConfig(
            mixture=(SourceConfig("many", ({many!r},), 3.0), SourceConfig("few", ({few!r},))),
            packer="best_fit", window=12, workers=2,
            tokenizer="toy", rows=4, tokens_per_row=320, patches_per_row=256,
        ),
        optimizer"""


@pytest.mark.slow
def test_a_mixture_with_workers_is_killed_and_resumed_exactly(tmp_path, compilation_cache):
    lines = [json.loads(line) for line in RECORDS.read_text().splitlines()]
    for line in lines:
        for part in line["messages"][0]["content"]:
            if part["type"] == "image":
                part["image"] = str(RECORDS.parent / part["image"])
    paths = {"many": tmp_path / "many.jsonl", "few": tmp_path / "few.jsonl"}
    for name, path in paths.items():
        chosen = lines[:60] if name == "many" else lines[60:]
        path.write_text("".join(json.dumps(line) + "\n" for line in chosen))
    text = CONFIG.format(records="", steps=STEPS, every=EVERY)
    begin, end = text.index("data=DataConfig("), text.index("optimizer=")
    data = DATA.format(many=str(paths["many"]), few=str(paths["few"]))
    config = tmp_path / "mixture.py"
    config.write_text(text[:begin] + data + text[end + len("optimizer") :])
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }

    def start(folder):
        command = [sys.executable, str(LAUNCHER), f"--config={config}", f"--workdir={folder}"]
        log = (tmp_path / f"{folder.name}.log").open("ab")
        return subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    first, second = tmp_path / "first", tmp_path / "second"
    finish(start(first), first)
    for step in (EVERY + 2, 2 * EVERY + 1):
        process = start(second)
        wait_for_step(process, second, step)
        kill(process)
    finish(start(second), second)
    assert_same_outcome(outcome(second), outcome(first))
    consumed = [json.loads(line)["samples"] for line in (second / "consumed.jsonl").read_text().splitlines()]
    counts = collections.Counter(i.partition("/")[0] for step in consumed for row in step for i in row)
    assert set(counts) == {"many", "few"} and 2 < counts["many"] / counts["few"] < 4
