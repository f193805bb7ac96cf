"""The command line of launch/train.py: overrides, and one-line errors that name what is wrong."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from mage_jax.config import TrainConfig
from mage_jax.config_flags import HelpRequested, UsageError, load_config, override, parse_command_line, run_main
from tests.train.helpers import tiny_train_config

ROOT = pathlib.Path(__file__).resolve().parents[2]

FILE = """
from mage_jax.config import ConfigError
from tests.train.helpers import tiny_train_config


def get_config(variant=""):
    if variant not in ("", "long"):
        raise ConfigError(f"unknown variant {variant!r}; known: long")
    return tiny_train_config(steps=100 if variant else 8)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "tiny.py"
    path.write_text(FILE)
    return path


def parse(file, *arguments):
    return parse_command_line([f"--config={file}", *arguments], cls=TrainConfig, usage="text")[0]


def test_variants_and_overrides(file):
    assert parse(file).steps == 8 and parse(f"{file}:long").steps == 100
    config = parse(
        file,
        "--config.optimizer.learning_rate=2",
        "--config.data.records=('a.jsonl','b.jsonl')",
        "--config.optimizer.frozen=vision",
        "--config.optimizer.frozen=merger",
        "--noconfig.data.shuffle",
        "--config.data.workers",
        "2",
    )
    assert config.optimizer.learning_rate == 2.0 and isinstance(config.optimizer.learning_rate, float)
    assert config.data.records == ("a.jsonl", "b.jsonl") and config.optimizer.frozen == ("vision", "merger")
    assert config.data.shuffle is False and config.data.workers == 2
    assert config.model == tiny_train_config().model


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        (
            "--config.optimizer.lerning_rate=1",
            r"\.lerning_rate: config.optimizer has no field .*did you mean learning_rate",
        ),
        ("--config.optimiser.eps=1", "config has no field 'optimiser' .did you mean optimizer"),
        ("--config.steps.more=1", "--config.steps.more: config.steps has no field 'more'"),
        ("--config.model=3", "--config.model: is a group"),
        ("--config.steps=abc", "--config.steps=abc: invalid literal for int"),
        ("--config.steps=3.5", "--config.steps=3.5"),
        ("--config.data.shuffle=perhaps", "--config.data.shuffle=perhaps"),
        ("--config.data.image.max_pixels=()", "max_pixels"),
        ("--config.steps=-3", "TrainConfig.steps: must be positive"),
        ("--config.optimizer.frozen=('eyes',)", "OptimizerConfig.frozen: 'eyes' not in"),
        ("--config.steps", "Missing value for flag --config.steps"),
        ("--stepz=3", "Unknown command line flag 'stepz'"),
        ("leftover", "unexpected argument: leftover"),
        ("--config=other.py", "--config: given twice"),
    ],
)
def test_what_is_wrong_is_named_in_one_line(file, argument, message):
    with pytest.raises(UsageError, match=message) as error:
        parse(file, argument)
    assert "\n" not in str(error.value)


def test_config_files_that_do_not_work(file, tmp_path):
    with pytest.raises(UsageError, match=r"no file nowhere\.py"):
        parse("nowhere.py")
    with pytest.raises(UsageError, match=r"tiny\.py:huge: unknown variant 'huge'; known: long"):
        parse(f"{file}:huge")
    with pytest.raises(UsageError, match="is missing; --help explains"):
        parse_command_line([], cls=TrainConfig, usage="")
    for name, text, message in (
        ("empty.py", "", "has no function get_config"),
        ("dict.py", "def get_config(): return {}", "returned dict"),
        ("fixed.py", "def get_config(): return {}", "has no variants"),
        ("notes.txt", "", "is not a Python file"),
    ):
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            load_config(f"{path}:v" if "variants" in message else str(path), cls=TrainConfig)


def test_help_and_exit_codes(file, capsys):
    def main(argv):
        parse_command_line(argv, cls=TrainConfig, usage="how to")
        return 0

    with pytest.raises(HelpRequested, match="text"):
        parse(file, "--help")
    assert run_main(main, ["--help"]) == 0 and capsys.readouterr().out == "how to\n"
    assert run_main(main, [f"--config={file}", "--config.seed=x"]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert run_main(main, [f"--config={file}"]) == 0
    assert override(tiny_train_config(), []) == tiny_train_config()


def launch(*arguments):
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(ROOT / "launch" / "train.py"), *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_launcher_itself(file, tmp_path):
    start = time.monotonic()
    done = launch("--help")
    assert done.returncode == 0 and "--workdir=DIR" in done.stdout and "exit status" in done.stdout
    assert time.monotonic() - start < 20
    done = launch(f"--config={file}", "--config.optimizer.lerning_rate=1")
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "lerning_rate" in done.stderr
    done = launch(f"--config={file}", f"--workdir={tmp_path / 'run'}")  # a model for another tokenizer
    assert done.returncode == 1, done.stderr
    assert "train.py: image_token_id" in done.stderr and done.stderr.count("\n") == 1
    done = launch(f"--config={file}", f"--workdir={tmp_path / 'run'}", "--config.mesh.data=3")
    assert done.returncode == 2 and "mesh: data 3 x fsdp 1 is not the 1 devices" in done.stderr
    done = launch(f"--config={file}", f"--workdir={tmp_path / 'run'}", "--processes=2")
    assert done.returncode == 2 and "need --distributed" in done.stderr
