"""Two processes as two hosts: one is asked to stop, both save at the same step, and both continue."""

import json
import os
import signal
import socket
import subprocess
import sys

import pytest

from mage_jax.train.metrics import read_lines
from tests.train.test_kill import CONFIG, LAUNCHER, RECORDS, ROOT, wait_for_step

pytestmark = pytest.mark.slow
STEPS = 400


@pytest.fixture
def start(tmp_path, compilation_cache):
    config = tmp_path / "hosts.py"
    config.write_text(CONFIG.format(records=str(RECORDS), steps=STEPS, every=STEPS))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
        "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
    }

    def start(folder, *arguments, count=2):
        with socket.socket() as free:
            free.bind(("localhost", 0))
            address = f"localhost:{free.getsockname()[1]}"
        command = [sys.executable, str(LAUNCHER), f"--config={config}", f"--workdir={folder}", *arguments]
        if count > 1:
            command += ["--distributed", f"--coordinator={address}", f"--processes={count}"]
        log = (folder.parent / f"{folder.name}.log").open("ab")
        return [
            subprocess.Popen(
                [*command, *([f"--process={index}"] if count > 1 else [])],
                env=environment,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
            )
            for index in range(count)
        ]

    return start


def test_two_hosts_stop_together_and_resume(start, tmp_path):
    folder = tmp_path / "run"
    log = tmp_path / "run.log"
    hosts = start(folder)
    names = [f"consumed-{index}-of-2.jsonl" for index in range(2)]
    wait_for_step(hosts[0], folder, 3, name=names[0])
    hosts[1].send_signal(signal.SIGTERM)
    assert [host.wait(timeout=300) for host in hosts] == [0, 0], log.read_text()[-4000:]
    step = len(read_lines(folder / "metrics.jsonl"))
    assert 3 <= step < STEPS
    for index, name in enumerate(names):
        assert len(read_lines(folder / name)) == step
        assert (folder / "checkpoints" / str(step) / "data" / f"process_{index}-of-2.json").is_file()

    hosts = start(folder, f"--config.steps={step + 2}")
    assert [host.wait(timeout=300) for host in hosts] == [0, 0], log.read_text()[-4000:]
    assert [line["step"] for line in read_lines(folder / "metrics.jsonl")] == list(range(1, step + 3))
    seen = [json.dumps(read_lines(folder / name)) for name in names]
    assert seen[0] != seen[1], "both hosts read the same records"

    (alone,) = start(folder, f"--config.steps={step + 4}", count=1)
    assert alone.wait(timeout=300) == 1
    assert "was written by 2 processes, this run has 1" in log.read_text()
