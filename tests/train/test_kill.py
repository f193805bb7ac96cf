"""Real processes on real records: killed at any moment and resumed, a run ends as if nothing had happened."""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
from orbax.checkpoint import v1 as ocp

from mage_jax.train.metrics import WALL_CLOCK_FIELDS, read_lines

ROOT = pathlib.Path(__file__).resolve().parents[2]
LAUNCHER = ROOT / "launch" / "train.py"
RECORDS = ROOT / "tests" / "data" / "miniwob" / "train.jsonl"
STEPS, EVERY = 12, 4

CONFIG = """
from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import *


def get_config(variant=""):
    ids = Tokenizer.load("toy").special_ids
    return TrainConfig(
        name="kill",
        model=ModelConfig(
            vision=VisionConfig(
                hidden_size=32, num_layers=1, num_heads=1, mlp_size=32, patch_size=16, num_channels=3,
                spatial_merge_size=2, rope_theta=1e4, layer_norm_eps=1e-6, frame_window_size=4,
            ),
            text=TextConfig(
                hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=16, mlp_size=32,
                vocab_size=Tokenizer.load("toy").vocab_size, rope_theta=5e6, rms_norm_eps=1e-6, max_positions=4096,
            ),
            tied_embeddings=False, image_token_id=ids.image_pad, video_token_id=ids.video_pad,
            vision_start_token_id=ids.vision_start, vision_end_token_id=ids.vision_end,
            bos_token_id=ids.endoftext, eos_token_ids=(ids.im_end,),
        ),
        steps={steps},
        data=DataConfig(
            records=({records!r},), tokenizer="toy", rows=4, tokens_per_row=320, patches_per_row=256, packing_bins=3
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=4),
        checkpoint=CheckpointConfig(every={every}),
        micro_batches=2,
        log_every=1,
    )
"""

# Dies inside the save of step ``argv[1]``: the arrays may be there, the folder is still a temporary one.
DIE_IN_SAVE = """
import os, signal, sys
sys.path.insert(0, {root!r})
from mage_jax.train import checkpoint
honest = checkpoint.JsonPart.save
async def save(self, directory):
    write = await honest(self, directory)
    async def killed():
        await write
        if isinstance(self.value, dict) and self.value.get("step") == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
    return killed()
checkpoint.JsonPart.save = save
from launch import train
train.main(sys.argv[2:])
"""


@pytest.fixture(scope="module")
def start(tmp_path_factory, compilation_cache):
    """Starts a run in a folder as a process of its own."""
    config = tmp_path_factory.mktemp("config") / "kill.py"
    config.write_text(CONFIG.format(records=str(RECORDS), steps=STEPS, every=EVERY))
    environment = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(compilation_cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # The default code generator compiles for half a minute here; the slow test below uses it.
        "XLA_FLAGS": "--xla_backend_optimization_level=0",
    }

    def start(folder, *arguments, program=(str(LAUNCHER),), flags=None):
        command = [sys.executable, *program, f"--config={config}", f"--workdir={folder}", *arguments]
        extra = {} if flags is None else {"XLA_FLAGS": flags}
        log = (folder.parent / f"{folder.name}.log").open("ab")
        return subprocess.Popen(command, env=environment | extra, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT)

    return start


def finish(process, folder, expected=0):
    assert process.wait(timeout=300) == expected, (folder.parent / f"{folder.name}.log").read_text()[-4000:]


def wait_for_step(process, folder, step, *, name="consumed.jsonl"):
    """Returns as soon as ``step`` is in the consumed file."""
    file = folder / name
    deadline = time.monotonic() + 300
    while not file.exists() or file.read_bytes().count(b"\n") < step:
        assert process.poll() is None, (folder.parent / f"{folder.name}.log").read_text()[-4000:]
        assert time.monotonic() < deadline
        time.sleep(0.002)


def kill(process):
    process.send_signal(signal.SIGKILL)
    assert process.wait(timeout=60) == -signal.SIGKILL


def logged(folder):
    """What a run wrote besides arrays."""
    lines = read_lines(folder / "metrics.jsonl")
    return {
        "metrics": [{k: v for k, v in line.items() if k not in WALL_CLOCK_FIELDS} for line in lines],
        "consumed": (folder / "consumed.jsonl").read_text(),
        "data": (folder / "checkpoints" / str(STEPS) / "data" / "process_0-of-1.json").read_text(),
    }


def outcome(folder):
    """Everything that two equal runs have in common."""
    with ocp.training.Checkpointer(folder / "checkpoints") as checkpointer:
        parts = dict.fromkeys(("params", "optimizer", "trainer"))
        arrays = jax.tree.leaves_with_path(checkpointer.load_checkpointables(STEPS, parts))
    return {
        **logged(folder),
        "arrays": {jax.tree_util.keystr(path): np.asarray(leaf).tobytes() for path, leaf in arrays},
        "config": (folder / "config.json").read_text(),
    }


def assert_same_outcome(got, want):
    assert [line["loss"] for line in got["metrics"]] == [line["loss"] for line in want["metrics"]]
    assert got == want
    assert len(want["arrays"]) > 50 and len(want["metrics"]) == STEPS


@pytest.fixture(scope="module")
def uninterrupted(start, tmp_path_factory):
    folder = tmp_path_factory.mktemp("uninterrupted") / "run"
    finish(start(folder), folder)
    return outcome(folder)


def test_killed_three_times_it_ends_the_same(start, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    moments = random.Random(7)

    process = start(folder)  # before the first checkpoint
    wait_for_step(process, folder, moments.randint(1, EVERY - 1))
    kill(process)
    assert not [path for path in (folder / "checkpoints").iterdir() if path.name.isdecimal()]

    in_save = ("-c", DIE_IN_SAVE.format(root=str(ROOT)), str(2 * EVERY))  # in the second save
    process = start(folder, program=in_save)
    finish(process, folder, expected=-signal.SIGKILL)
    left = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert str(EVERY) in left and str(2 * EVERY) not in left
    assert any("tmp" in name for name in left), left

    process = start(folder)  # after it resumed from the first checkpoint, somewhere before the end
    wait_for_step(process, folder, moments.randint(EVERY + 1, STEPS - 1))
    kill(process)

    finish(start(folder), folder)
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [str(STEPS), str(2 * EVERY)]
    assert_same_outcome(outcome(folder), uninterrupted)
    samples = [json.loads(line)["samples"] for line in (folder / "consumed.jsonl").read_text().splitlines()]
    assert sum(len(row) for step in samples for row in step) > STEPS


def test_sigterm_saves_and_exits_with_status_0(start, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_step(process, folder, 2)
    process.send_signal(signal.SIGTERM)
    finish(process, folder)
    log = (tmp_path / "run.log").read_text()
    assert "SIGTERM: will save and stop" in log and "run the same command again to continue" in log
    step = len(read_lines(folder / "consumed.jsonl"))
    assert 2 <= step < STEPS and (folder / "checkpoints" / str(step)).is_dir()
    finish(start(folder), folder)
    assert_same_outcome(outcome(folder), uninterrupted)


@pytest.mark.slow
def test_optimised_code_is_deterministic_between_processes(start, tmp_path):
    """The default compiler options, nothing set for determinism: two processes, one of them killed, same bits."""
    first, second = tmp_path / "first", tmp_path / "second"
    finish(start(first, flags=""), first)
    process = start(second, flags="")
    wait_for_step(process, second, EVERY + 2)
    kill(process)
    finish(start(second, flags=""), second)
    assert_same_outcome(outcome(second), outcome(first))


@pytest.mark.slow
def test_worker_processes_are_killed_and_resumed_exactly(start, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    workers = "--config.data.workers=2"
    finish(start(first, workers), first)
    process = start(second, workers)
    wait_for_step(process, second, EVERY + 2)
    kill(process)
    finish(start(second, workers), second)
    assert_same_outcome(outcome(second), outcome(first))
    finish(start(second), second, expected=1)
    assert "config.data.workers was 2, is 0" in (tmp_path / "second.log").read_text()


@pytest.mark.slow
def test_resuming_on_four_devices_stays_close(start, uninterrupted, tmp_path):
    folder = tmp_path / "run"
    process = start(folder)
    wait_for_step(process, folder, EVERY)
    process.send_signal(signal.SIGTERM)
    finish(process, folder)
    split = len(read_lines(folder / "metrics.jsonl"))
    four = "--xla_backend_optimization_level=0 --xla_force_host_platform_device_count=4"
    sizes = ("--config.mesh.data=2", "--config.mesh.fsdp=2", "--config.micro_batches=1")
    finish(start(folder, *sizes, flags=four), folder)
    got, want = logged(folder), uninterrupted
    assert got["consumed"] == want["consumed"] and got["data"] == want["data"]
    assert got["metrics"][:split] == want["metrics"][:split]
    losses = [[line["loss"] for line in run["metrics"]] for run in (got, want)]
    np.testing.assert_allclose(*losses, rtol=1e-5)
    assert "micro_batches was 2, is 1" in (tmp_path / "run.log").read_text()
