"""The loop in one process on synthetic batches: its order, its ways to stop, and what it writes."""

import dataclasses
import json
import logging
import os
import signal

import jax
import numpy as np
import pytest

from mage_jax.config import CheckpointConfig, ConfigError
from mage_jax.train import checkpoint as checkpoint_module
from mage_jax.train import loop
from mage_jax.train.loop import TrainError, train
from mage_jax.train.metrics import WALL_CLOCK_FIELDS, read_lines
from mage_jax.train.plots import plot_run
from mage_jax.train.runtime import CompileWatch
from tests.train.helpers import SyntheticDataset, datasets_of, tiny_train_config

CONFIG = tiny_train_config(checkpoint=CheckpointConfig(every=3, keep=2))


def run(folder, config=CONFIG, **changes):
    dataset = SyntheticDataset(config, **changes)
    return train(config, folder, datasets=datasets_of(dataset)), dataset


def lines_without_clock(folder, name="metrics.jsonl"):
    return [{k: v for k, v in line.items() if k not in WALL_CLOCK_FIELDS} for line in read_lines(folder / name)]


def steps_in(folder):
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One uninterrupted run of 8 steps ."""
    folder = tmp_path_factory.mktemp("finished")
    result, dataset = run(folder)
    return folder, result, dataset


def test_a_run_writes_what_it_promises(finished):
    folder, result, dataset = finished
    assert (result.step, result.reason) == (8, "done")
    assert steps_in(folder) == [6, 8]  # the newest two; the last step although 3 does not divide it
    assert dataset.drawn == list(range(8)), "a batch was drawn that no step used"
    metrics = read_lines(folder / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 9))
    assert {"loss", "accuracy", "grad_norm", "param_norm", "update_norm", "learning_rate", "tokens"} <= set(metrics[0])
    assert metrics[-1]["tokens_per_second"] > 0 and metrics[-1]["packing_efficiency"] < 1
    consumed = read_lines(folder / "consumed.jsonl")
    assert consumed[2] == {"step": 3, "samples": [[f"sample-2-{row}"] for row in range(4)]}
    meta = json.loads((folder / "checkpoints" / "8" / "meta" / "value.json").read_text())
    assert (meta["step"], meta["samples_consumed"], meta["process_count"]) == (8, 32, 1)
    assert json.loads((folder / "config.json").read_text())["steps"] == 8
    assert (folder / "assets" / "tokenizer.json").exists() and (folder / "model.json").exists()
    assert any((folder / "tensorboard").iterdir())
    assert plot_run(folder).read_bytes()[:4] == b"\x89PNG"


def test_logged_floats_read_back_to_the_same_bits(finished):
    folder, result, _ = finished
    last = read_lines(folder / "metrics.jsonl")[-1]
    assert last == {"step": 8, **result.values}
    assert np.float32(last["grad_norm"]) == last["grad_norm"]


def test_continuing_a_finished_run_does_nothing(finished):
    folder, _, _ = finished
    before = (folder / "metrics.jsonl").read_bytes(), (folder / "consumed.jsonl").read_bytes()
    result, dataset = run(folder)
    assert (result.step, dataset.drawn) == (8, [])
    assert before == ((folder / "metrics.jsonl").read_bytes(), (folder / "consumed.jsonl").read_bytes())


def test_sigterm_saves_and_the_rest_continues_as_if_nothing_happened(tmp_path, finished):
    whole, _, _ = finished

    def terminate(number, batch):
        if number == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return batch

    handler = signal.getsignal(signal.SIGTERM)
    result, _ = run(tmp_path, edit=terminate)
    assert (result.step, result.reason) == (5, "signal")
    assert signal.getsignal(signal.SIGTERM) is handler
    assert steps_in(tmp_path) == [3, 5]
    result, dataset = run(tmp_path)
    assert (result.step, dataset.drawn) == (8, [5, 6, 7])
    assert lines_without_clock(tmp_path) == lines_without_clock(whole)
    assert (tmp_path / "consumed.jsonl").read_bytes() == (whole / "consumed.jsonl").read_bytes()


def test_a_lost_save_is_recomputed_to_the_same_files(tmp_path, finished):
    """Steps 7 and 8 are logged, but their checkpoint is gone: the run goes back to 6 and its files do, too."""
    whole, _, _ = finished
    run(tmp_path)
    checkpoint_module.ocp.training.Checkpointer(tmp_path / "checkpoints").delete(8)
    with (tmp_path / "consumed.jsonl").open("a") as file:
        file.write('{"step": 9, "sam')  # a line that a kill cut short
    _, dataset = run(tmp_path)
    assert dataset.drawn == [6, 7]
    assert lines_without_clock(tmp_path) == lines_without_clock(whole)
    assert (tmp_path / "consumed.jsonl").read_bytes() == (whole / "consumed.jsonl").read_bytes()


def test_the_batch_is_drawn_after_the_save(tmp_path, monkeypatch):
    drawn_at_save = []
    dataset = SyntheticDataset(CONFIG)
    honest = checkpoint_module.Checkpoints.save

    def save(self, step, *args, **kwargs):
        drawn_at_save.append((step, len(dataset.drawn), kwargs["data_state"]))
        return honest(self, step, *args, **kwargs)

    monkeypatch.setattr(checkpoint_module.Checkpoints, "save", save)
    train(CONFIG, tmp_path, datasets=datasets_of(dataset))
    assert drawn_at_save == [(step, step, {"next": step}) for step in (3, 6, 8)]


def test_a_loss_that_is_not_finite_stops_without_saving(tmp_path):
    def poison(number, batch):
        if number == 4:
            batch.rows.patches_bpc[:] = np.nan
        return batch

    config = dataclasses.replace(CONFIG, log_every=2)
    with pytest.raises(TrainError, match=r"step 6: (loss|grad_norm) is nan"):  # seen at the next step that looks
        run(tmp_path, config, edit=poison)
    assert steps_in(tmp_path) == [3]
    assert [line["step"] for line in read_lines(tmp_path / "metrics.jsonl")] == [2, 4]


def test_records_that_end_early_end_the_run_with_a_checkpoint(tmp_path):
    result, _ = run(tmp_path, length=4)
    assert (result.step, result.reason) == (4, "data")
    assert steps_in(tmp_path) == [3, 4]
    result, _ = run(tmp_path, length=4)
    assert (result.step, result.reason) == (4, "data")


def test_evaluation_is_logged_and_leaves_training_alone(tmp_path, finished):
    whole, _, _ = finished
    config = dataclasses.replace(CONFIG, eval_every=4, data=dataclasses.replace(CONFIG.data, eval_records=("x",)))
    evaluating = SyntheticDataset(config, length=2)
    train(config, tmp_path, datasets=datasets_of(SyntheticDataset(config), evaluating))
    lines = lines_without_clock(tmp_path)
    evals = [line for line in lines if "eval_loss" in line]
    assert [line["step"] for line in evals] == [4, 8]
    assert evals[0]["eval_loss"] > 0 and 0 <= evals[0]["eval_accuracy"] <= 1
    assert [line for line in lines if line not in evals] == lines_without_clock(whole)


def test_a_stop_request_during_evaluation_saves_that_step(tmp_path):
    config = dataclasses.replace(CONFIG, eval_every=4, data=dataclasses.replace(CONFIG.data, eval_records=("x",)))

    def terminate(number, batch):
        os.kill(os.getpid(), signal.SIGTERM)
        return batch

    datasets = datasets_of(SyntheticDataset(config), SyntheticDataset(config, length=2, edit=terminate))
    result = train(config, tmp_path, datasets=datasets)
    assert (result.step, result.reason) == (4, "signal") and steps_in(tmp_path) == [3, 4]


def test_records_that_end_in_a_bad_step_are_not_saved(tmp_path):
    def poison(number, batch):
        if number == 4:
            batch.rows.patches_bpc[:] = np.nan
        return batch

    with pytest.raises(TrainError, match="step 5"):
        run(tmp_path, dataclasses.replace(CONFIG, log_every=100), length=5, edit=poison)
    assert steps_in(tmp_path) == [3]


def test_evaluation_needs_records(tmp_path):
    with pytest.raises(ConfigError, match=r"eval_every: needs data\.eval_records"):
        run(tmp_path, dataclasses.replace(CONFIG, eval_every=4))


def test_recompilation_after_warm_up_is_warned_about(caplog):
    function = jax.jit(lambda x: x + 1)
    watch = CompileWatch(function)
    flags = []
    with caplog.at_level(logging.WARNING):
        for step, size in enumerate((3, 3, 3, 4, 4, 3), start=1):
            batch = {"tokens": np.zeros(size, np.float32)}
            function(batch["tokens"])
            flags.append(watch.check(step, batch))
    assert flags == [False, False, False, True, False, False]
    assert "step 4 was compiled again" in caplog.text and "(4,)" in caplog.text


def test_at_most_two_steps_are_in_flight(tmp_path, monkeypatch):
    waited = []
    honest = jax.block_until_ready

    class Jax:
        def __getattr__(self, name):
            return getattr(jax, name)

        def block_until_ready(self, value):
            waited.append(value)
            return honest(value)

    monkeypatch.setattr(loop, "jax", Jax())
    run(tmp_path, dataclasses.replace(CONFIG, log_every=8, checkpoint=CheckpointConfig(every=8)))
    assert len(waited) == 1 + (8 - loop.IN_FLIGHT)  # after the first step, and for each step beyond two


def test_a_step_state_is_resumed_bit_for_bit(tmp_path, finished):
    """All leaves, not only losses: parameters, moments, step, key and data state."""
    whole, _, _ = finished
    run(tmp_path, dataclasses.replace(CONFIG, steps=8), length=5)
    run(tmp_path)
    ocp = checkpoint_module.ocp
    names = ["params", "optimizer", "trainer"]
    with (
        ocp.training.Checkpointer(tmp_path / "checkpoints") as a,
        ocp.training.Checkpointer(whole / "checkpoints") as b,
    ):
        got, want = (c.load_checkpointables(8, dict.fromkeys(names)) for c in (a, b))
    assert len(jax.tree.leaves(got)) == len(jax.tree.leaves(want)) > 50
    jax.tree.map(np.testing.assert_array_equal, got, want)
    data = "checkpoints/8/data/process_0-of-1.json"
    assert (tmp_path / data).read_text() == (whole / data).read_text()
