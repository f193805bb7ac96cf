"""Where a run starts from, in this order: its own newest checkpoint, ``init_from``, scratch. And what it may change.

A run folder belongs to one model and one order of data. Resuming with another geometry or data order is refused by the
name of the field; other changes are allowed and said.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import shutil
from typing import Any

import grain
import jax
from jax.sharding import Mesh

from mage_jax.agent.tokenizer import Tokenizer
from mage_jax.config import ConfigError, TrainConfig, to_dict
from mage_jax.data import preprocessor
from mage_jax.data.loader import make_loader
from mage_jax.data.packed import write_json
from mage_jax.sharding import param_shardings
from mage_jax.train.checkpoint import CheckpointError, Checkpoints, Meta
from mage_jax.train.optimizer import Optimizer
from mage_jax.train.state import TrainState, abstract_state, init_state, state_from_params
from mage_jax.weights.load import load_model, read_config
from mage_jax.weights.model_dir import ASSETS, MODEL_FILE, read_model_file, resolve, start_run_folder

CONFIG_FILE = "config.json"
CHECKPOINTS_FOLDER = "checkpoints"

# Dotted fields (or groups of them) that make a run what it is.
IDENTITY = ("model", "data", "seed", "param_dtype", "optimizer.frozen")
# Exceptions inside them: record files may have moved, their content is checked by the loader's own fingerprint.
FREE = ("data.records", "data.eval_records", "data.packed")


@dataclasses.dataclass(frozen=True)
class Plan:
    """How a run will start.

    Attributes:
      config: resolved: its ``model`` is the geometry that is really trained.
      tokenizer: what the loader uses: the checkpoint's own tokenizer where the config names none.
      resume_step: step of its own checkpoint to continue, None to start at 0.
      origin: one line for people.
      notes: further lines: what differs from the config or from the checkpoint.
    """

    config: TrainConfig
    tokenizer: str
    resume_step: int | None
    origin: str
    notes: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Start:
    """The state to begin with; ``data_state`` is None for a fresh iterator."""

    state: TrainState
    data_state: Any
    samples_consumed: int


def plan_start(config: TrainConfig, workdir: pathlib.Path, checkpoints: Checkpoints) -> Plan:
    """Decides where to start and resolves the geometry; reads no arrays.

    Raises:
      CheckpointError: the run's own checkpoint belongs to a run that this config cannot continue.
      WeightsError: ``init_from`` is not a checkpoint.
    """
    step = checkpoints.latest
    if step is not None:
        if config.init_from:  # its geometry was taken when the run began; the folder may be gone by now
            config = dataclasses.replace(config, model=read_model_file(workdir)[0])
        notes = check_resumable(checkpoints.meta(step), config, where=str(workdir))
        tokenizer = _tokenizer(config, workdir / ASSETS)
        return Plan(config, tokenizer, step, f"continues its own checkpoint at step {step} in {workdir}", tuple(notes))
    if not config.init_from:
        return Plan(config, _tokenizer(config, None), None, f"starts from random weights (seed {config.seed})")
    model = read_config(config.init_from)
    changed = _differences(_plain(config.model), _plain(model), "model")
    notes = [f"the geometry of {config.init_from} replaces config.model ({', '.join(changed)})"] if changed else []
    config = dataclasses.replace(config, model=model)
    assets = resolve(config.init_from).assets
    tokenizer = _tokenizer(config, assets)
    if tokenizer != config.data.tokenizer:
        notes.append(f"tokenizer: {tokenizer}")
    limits = preprocessor.load(assets, vision=model.vision)
    if limits != config.data.image:
        notes.append(
            f"config.data.image is {config.data.image}, the checkpoint was made with {limits}; the config's holds"
        )
    return Plan(config, tokenizer, None, f"starts from the weights of {config.init_from}", tuple(notes))


def _tokenizer(config: TrainConfig, assets: pathlib.Path | None) -> str:
    """The tokenizer that the config names, else that of the checkpoint that the run began from."""
    if config.data.tokenizer:
        return config.data.tokenizer
    if assets is None:
        raise ConfigError(
            'config.data.tokenizer: is empty and there is no init_from to take one from; name one, or "toy"'
        )
    own = assets / "tokenizer.json"
    if not own.is_file():
        raise ConfigError(f"config.data.tokenizer: is empty and {assets} has no tokenizer.json; name one")
    return str(own)


def check_resumable(meta: Meta, config: TrainConfig, *, where: str) -> list[str]:
    """Lines about harmless differences between a checkpoint and the config that would continue it.

    Raises:
      CheckpointError: a difference that would make it another run; every such field is named.
    """
    if meta.process_count != jax.process_count():
        raise CheckpointError(
            f"{where}: was written by {meta.process_count} processes, this run has {jax.process_count()}; each process"
            " holds its own part of the data, so resume with the same number or start a new run with init_from"
        )
    if meta.data_workers != config.data.workers:
        raise CheckpointError(
            f"{where}: config.data.workers was {meta.data_workers}, is {config.data.workers}; the order of samples"
            " depends on it, so resume with the same number or start a new run with init_from"
        )
    refused, notes = [], []
    for field, (old, new) in _differences(meta.config, _plain(config), "config").items():
        line = f"{field} was {old!r}, is {new!r}"
        (refused if _is_identity(field.removeprefix("config.")) else notes).append(line)
    if refused:
        raise CheckpointError(
            f"{where}: cannot be continued with this config: {'; '.join(refused)}. Use the old values, or another"
            " workdir (with init_from to keep the weights)"
        )
    return notes


def begin(plan: Plan, workdir: pathlib.Path, *, optimizer: Optimizer, mesh: Mesh, checkpoints: Checkpoints) -> Start:
    """Makes or restores the state, and writes ``model.json``, assets and ``config.json``."""
    config = plan.config
    if plan.resume_step is not None:
        restored = checkpoints.restore(abstract_state(config, optimizer, mesh), step=plan.resume_step)
        _write_config(workdir, config)
        return Start(restored.state, restored.data_state, restored.meta.samples_consumed)
    if config.init_from:
        loaded = load_model(config.init_from, dtype=config.param_dtype, shardings=param_shardings(config.model, mesh))
        _describe_run(workdir, plan, source=loaded.source, assets=loaded.assets)
        state = state_from_params(config, optimizer, mesh, loaded.params)
    else:
        _describe_run(workdir, plan, source=None, assets=None)
        state = init_state(config, optimizer, mesh)
    return Start(state, None, 0)


def make_dataset(config: TrainConfig, *, evaluation: bool = False) -> grain.IterDataset:
    """This process's loader of ``HostBatch``es."""
    return make_loader(
        config.data,
        vision=config.model.vision,
        tokenizer=Tokenizer.load(config.data.tokenizer),
        image_token_id=config.model.image_token_id,
        seed=config.seed,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
        eval=evaluation,
    )


def _describe_run(workdir: pathlib.Path, plan: Plan, *, source: Any, assets: Any) -> None:
    """``model.json``, ``config.json`` and ``assets/`` of a run at step 0.

    Assets are made afresh, since an attempt that failed before its first checkpoint may have left others, and hold the
    tokenizer and image limits that the run really uses: what is exported must preprocess as it was trained.
    """
    if jax.process_index() != 0:
        return
    config, folder = plan.config, workdir / ASSETS
    tokenizer = Tokenizer.load(plan.tokenizer)  # before the removal: it may lie in there
    shutil.rmtree(folder, ignore_errors=True)
    start_run_folder(workdir, config=config.model, source=source, assets=assets)
    folder.mkdir(exist_ok=True)
    own = folder / "tokenizer.json"
    if not own.exists() or Tokenizer.load(own).fingerprint != tokenizer.fingerprint:
        tokenizer.save(folder)
    limits = folder / preprocessor.FILE
    if not limits.exists() or preprocessor.load(folder, vision=config.model.vision) != config.data.image:
        kept = json.loads(limits.read_text(encoding="utf-8")) if limits.exists() else {}
        kept.pop("size", None)  # says the same in other words
        write_json(limits, {**kept, **preprocessor.to_hf(config.data.image, config.model.vision)})
    _write_config(workdir, config)


def _write_config(workdir: pathlib.Path, config: TrainConfig) -> None:
    if jax.process_index() == 0:
        write_json(workdir / CONFIG_FILE, to_dict(config))


def _is_identity(field: str) -> bool:
    def inside(names: tuple[str, ...]) -> bool:
        return any(field == name or field.startswith(f"{name}.") for name in names)

    return inside(IDENTITY) and not inside(FREE)


def _plain(config: Any) -> Any:
    """As it comes back from JSON, so that tuples compare equal to lists."""
    return json.loads(json.dumps(to_dict(config)))


def _differences(old: Any, new: Any, name: str) -> dict[str, tuple[Any, Any]]:
    """Dotted field -> (old, new) of every leaf that differs."""
    if isinstance(old, dict) and isinstance(new, dict):
        found: dict[str, tuple[Any, Any]] = {}
        for key in [*old, *(k for k in new if k not in old)]:
            found |= _differences(old.get(key), new.get(key), f"{name}.{key}")
        return found
    return {} if old == new else {name: (old, new)}


def check_run_folder(workdir: pathlib.Path) -> None:
    """Raises ``ConfigError`` if the folder exists and is not a run's, rather than write into it."""
    found = {path.name for path in workdir.iterdir() if not path.name.startswith(".")} if workdir.is_dir() else set()
    if {MODEL_FILE, "params"} <= found:
        raise ConfigError(f"workdir: {workdir} is a model folder; give it as init_from, and another workdir")
    if found and not found & {MODEL_FILE, CONFIG_FILE, CHECKPOINTS_FOLDER}:
        raise ConfigError(f"workdir: {workdir} holds other files ({', '.join(sorted(found)[:5])}); choose a new folder")
