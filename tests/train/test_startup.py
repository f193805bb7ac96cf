"""Where a run starts, and which changes it refuses by name."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from mage_jax.config import CheckpointConfig, ConfigError, ImageConfig, OptimizerConfig, to_dict
from mage_jax.data import preprocessor
from mage_jax.train.checkpoint import CheckpointError, Meta
from mage_jax.train.loop import train
from mage_jax.train.startup import check_resumable
from mage_jax.weights.load import load_model
from tests.train.helpers import SyntheticDataset, datasets_of, tiny_train_config

CONFIG = tiny_train_config(steps=2, checkpoint=CheckpointConfig(every=2))


def run(folder, config=CONFIG):
    lines = []
    result = train(config, folder, datasets=datasets_of(SyntheticDataset(config)), say=lines.append)
    return result, "\n".join(lines)


def saved_meta(config=CONFIG, **changes):
    plain = json.loads(json.dumps(to_dict(config)))
    return Meta(**{"step": 2, "process_count": 1, "data_workers": config.data.workers, "config": plain, **changes})


def changed(path, value, config=CONFIG):
    head, _, rest = path.partition(".")
    return dataclasses.replace(config, **{head: changed(rest, value, getattr(config, head)) if rest else value})


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("model.text.rope_theta", 1e4),
        ("model.vision.num_layers", 3),
        ("model.tied_embeddings", True),
        ("data.tokens_per_row", 64),
        ("data.packing_bins", 5),
        ("data.image.max_pixels", 4096),
        ("data.tokenizer", "other"),
        ("seed", 5),
        ("param_dtype", "bfloat16"),
        ("optimizer.frozen", ("vision",)),
    ],
)
def test_a_change_that_makes_another_run_is_refused_by_name(path, value):
    with pytest.raises(CheckpointError, match=rf"cannot be continued.*config\.{path} was .*, is ") as error:
        check_resumable(saved_meta(), changed(path, value), where="RUN")
    assert "workdir" in str(error.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("steps", 20),
        ("log_every", 5),
        ("checkpoint.every", 9),
        ("checkpoint.keep", 1),
        ("optimizer.learning_rate", 1e-5),
        ("micro_batches", 2),
        ("compute.remat", "full"),
        ("mesh.fsdp", 2),
        ("eval_every", 3),
        ("data.eval_records", ("held.jsonl",)),
        ("data.records", ("moved.jsonl",)),  # the loader compares the content
        ("name", "renamed"),
    ],
)
def test_a_harmless_change_is_allowed_and_noted(path, value):
    notes = check_resumable(saved_meta(), changed(path, value), where="RUN")
    assert len(notes) == 1 and notes[0].startswith(f"config.{path} was ")


def test_nothing_changed_is_nothing_said():
    assert check_resumable(saved_meta(), CONFIG, where="RUN") == []


def test_process_and_worker_counts_are_refused_with_a_reason():
    with pytest.raises(CheckpointError, match=r"written by 4 processes, this run has 1.*own part of the data"):
        check_resumable(saved_meta(process_count=4), CONFIG, where="RUN")
    with pytest.raises(CheckpointError, match=r"data\.workers was 2, is 0; the order of samples depends on it"):
        check_resumable(saved_meta(data_workers=2), CONFIG, where="RUN")


def test_the_order_of_starting_points(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    _, said = run(first)
    assert "starts from random weights (seed 0)" in said and "lm_head" in said and "devices: " in said

    # init_from: weights of another run, whose geometry replaces the config's.
    other = dataclasses.replace(CONFIG.model, text=dataclasses.replace(CONFIG.model.text, num_layers=1))
    config = dataclasses.replace(CONFIG, model=other, init_from=str(first), steps=1, seed=3)
    _, said = run(second, config)
    assert f"starts from the weights of {first}" in said
    assert f"the geometry of {first} replaces config.model (model.text.num_layers)" in said
    assert json.loads((second / "config.json").read_text())["model"] == json.loads(json.dumps(to_dict(CONFIG.model)))
    before, after = load_model(first).params, load_model(second).params
    moved = jax.tree.map(lambda a, b: float(np.abs(a - b).max()), before, after)
    assert 0 < max(jax.tree.leaves(moved)) < 2e-3, "one step at the warm-up's learning rate away"
    tokenizers = [(folder / "assets" / "tokenizer.json").read_bytes() for folder in (first, second)]
    assert tokenizers[0] == tokenizers[1]

    # Its own checkpoint wins, and is found even when what it was born from is gone.
    config = dataclasses.replace(config, steps=2, init_from=str(tmp_path / "gone"))
    result, said = run(second, config)
    assert f"continues its own checkpoint at step 1 in {second}" in said and result.step == 2
    assert "config.steps was 1, is 2" in said and "config.init_from was" in said


def test_a_changed_config_stops_before_anything_is_written(tmp_path):
    run(tmp_path)
    before = (tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "config.json").read_bytes()
    with pytest.raises(CheckpointError, match=r"config\.seed was 0, is 1"):
        run(tmp_path, dataclasses.replace(CONFIG, seed=1))
    assert before == ((tmp_path / "metrics.jsonl").read_bytes(), (tmp_path / "config.json").read_bytes())


def test_folders_that_are_not_runs_are_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"workdir: .* holds other files \(thesis\.txt\)"):
        run(tmp_path)
    with pytest.raises(ValueError, match="nowhere does not exist"):
        run(tmp_path / "new", dataclasses.replace(CONFIG, init_from=str(tmp_path / "nowhere")))


def test_the_tokenizer_of_the_checkpoint_is_used_unless_another_is_named(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run(first)
    unnamed = dataclasses.replace(CONFIG, data=dataclasses.replace(CONFIG.data, tokenizer=""))
    with pytest.raises(ConfigError, match=r"config\.data\.tokenizer: is empty and there is no init_from"):
        train(unnamed, tmp_path / "scratch")
    config = dataclasses.replace(unnamed, init_from=str(first))
    seen = []

    def datasets(config, *, evaluation):
        seen.append(config.data.tokenizer)
        return SyntheticDataset(config)

    lines = []
    train(dataclasses.replace(config, steps=1), second, datasets=datasets, say=lines.append)
    train(config, second, datasets=datasets)
    named = dataclasses.replace(config, data=dataclasses.replace(CONFIG.data, tokenizer=str(first / "assets")))
    train(named, tmp_path / "third", datasets=datasets)
    own, copied = (str(folder / "assets" / "tokenizer.json") for folder in (first, second))
    assert seen == [own, copied, str(first / "assets")]
    assert f"tokenizer: {own}" in lines
    config_file = json.loads((second / "config.json").read_text())
    assert config_file["data"]["tokenizer"] == "", "the config stays as it was written"


def test_other_image_limits_than_the_checkpoint_are_said(tmp_path):
    run(tmp_path / "first")
    image = ImageConfig(max_pixels=10_000)
    data = dataclasses.replace(CONFIG.data, image=image)
    config = dataclasses.replace(CONFIG, init_from=str(tmp_path / "first"), data=data)
    _, said = run(tmp_path / "second", config)
    assert "max_pixels=10000" in said and "the checkpoint was made with" in said and "max_pixels=4000000" in said


def test_frozen_runs_resume_too(tmp_path):
    config = dataclasses.replace(CONFIG, optimizer=OptimizerConfig(warmup_steps=0, frozen=("vision", "merger")))
    run(tmp_path, dataclasses.replace(config, steps=1))
    run(tmp_path, config)
    optimizer = tmp_path / "checkpoints" / "2" / "optimizer" / "_METADATA"
    assert "lm_head_vd" in optimizer.read_text() and "patch_embed" not in optimizer.read_text()


def test_assets_hold_what_the_run_really_used(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    run(first)
    other = tmp_path / "other.json"  # the same tokenizer as text of another form, so that its digest differs
    other.write_text((first / "assets" / "tokenizer.json").read_text() + "\n")
    (second / "assets").mkdir(parents=True)  # left by an attempt that failed before its first checkpoint
    (second / "assets" / "config.json").write_text("{}")
    (second / "config.json").write_text("{}")
    data = dataclasses.replace(CONFIG.data, tokenizer=str(other), image=ImageConfig(max_pixels=8192))
    run(second, dataclasses.replace(CONFIG, init_from=str(first), data=data))
    assert not (second / "assets" / "config.json").exists()
    assert (second / "assets" / "tokenizer.json").read_text() == other.read_text()
    assert preprocessor.load(second / "assets", vision=CONFIG.model.vision).max_pixels == 8192


@pytest.mark.parametrize(("field", "value"), [("seed", -1), ("seed", 2**31), ("steps", 2**31)])
def test_numbers_that_do_not_fit_are_named(field, value):
    with pytest.raises(ConfigError, match=rf"TrainConfig\.{field}"):
        dataclasses.replace(CONFIG, **{field: value})
