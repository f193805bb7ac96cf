"""Model folders and run folders: where parameters, geometry and carried files lie.

A model folder, as converters write it::

    DIR/params/         parameters (orbax checkpointable "params")
    DIR/model.json      geometry, and which Hugging Face files the parameters came from
    DIR/assets/         every other file of the Hugging Face folder, unread

A run folder, as training writes it::

    RUN/model.json, RUN/assets/
    RUN/checkpoints/<step>/params/      and the optimiser and the rest beside it
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from mage_jax.config import ConfigError, ModelConfig, from_dict, to_dict
from mage_jax.weights.atomic import copy_tree
from mage_jax.weights.errors import WeightsError
from mage_jax.weights.hf_config import CONFIG_FILE, tie_flag
from mage_jax.weights.orbax_store import CHECKPOINT_METADATA, ITEM, TREE_METADATA
from mage_jax.weights.safetensors_io import INDEX_FILE, SINGLE_FILE, SafetensorsFolder

FORMAT = 1
MODEL_FILE = "model.json"
ASSETS = "assets"
CHECKPOINTS = "checkpoints"
_TOOL_FOLDERS = (".git", ".cache")  # left in a download by git and by the hub's client; not part of the model


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What a path turned out to be.

    Attributes:
      kind: "hf" (Hugging Face folder), "model" (model folder) or "run" (a step of a run folder).
      checkpoint: the Hugging Face folder, or the folder that holds ``params/``.
      root: the folder that holds ``model.json``; the Hugging Face folder itself.
      step: the step of a run; None otherwise.
    """

    kind: str
    checkpoint: Path
    root: Path
    step: int | None = None

    @property
    def assets(self) -> Path:
        """Folder with tokenizer and other carried files; it may be absent in a run folder."""
        return self.root if self.kind == "hf" else self.root / ASSETS


def resolve(path: str | Path) -> Resolved:
    """Finds the checkpoint that a path means: a model, run, step or Hugging Face folder.

    Raises:
      WeightsError: none of these, or a run without a complete checkpoint.
    """
    path = Path(path).absolute()
    if not path.is_dir():
        raise WeightsError(f"{path} {'is not a folder' if path.exists() else 'does not exist'}")
    if (path / MODEL_FILE).is_file():
        if _is_complete(path):
            return Resolved("model", path, path)
        if (path / CHECKPOINTS).is_dir():
            steps = complete_steps(path)
            if not steps:
                raise WeightsError(f"{path / CHECKPOINTS}: holds no complete checkpoint yet")
            return Resolved("run", path / CHECKPOINTS / str(steps[-1]), path, steps[-1])
        raise WeightsError(f"{path}: has {MODEL_FILE} but neither complete {ITEM}/ nor {CHECKPOINTS}/")
    if path.name.isdecimal() and path.parent.name == CHECKPOINTS:
        root = path.parent.parent
        if not _is_complete(path):
            raise WeightsError(f"{path}: the checkpoint is incomplete (no {ITEM}/{TREE_METADATA})")
        if not (root / MODEL_FILE).is_file():
            raise WeightsError(f"{root / MODEL_FILE} is missing; the step does not tell its geometry")
        return Resolved("run", path, root, int(path.name))
    if (path / CONFIG_FILE).is_file() and ((path / SINGLE_FILE).exists() or (path / INDEX_FILE).exists()):
        return Resolved("hf", path, path)
    if path.name == CHECKPOINTS and (path.parent / MODEL_FILE).is_file():
        raise WeightsError(f"{path} holds the steps of a run; give the run folder {path.parent} or one of its steps")
    found = ", ".join(sorted(p.name for p in path.iterdir())[:8]) or "nothing"
    raise WeightsError(
        f"{path} is not a checkpoint: expected {MODEL_FILE} with {ITEM}/ or {CHECKPOINTS}/, or {CONFIG_FILE} with "
        f"{SINGLE_FILE} or {INDEX_FILE}; found {found}"
    )


def _is_complete(folder: Path) -> bool:
    return (folder / CHECKPOINT_METADATA).is_file() and (folder / ITEM / TREE_METADATA).is_file()


def complete_steps(run: str | Path) -> list[int]:
    """Steps of a run folder that were saved completely, ascending. Orbax renames a step into place when done."""
    folder = Path(run) / CHECKPOINTS
    if not folder.is_dir():
        return []
    return sorted(int(p.name) for p in folder.iterdir() if p.name.isdecimal() and _is_complete(p))


def describe_source(weights: SafetensorsFolder) -> dict[str, Any]:
    """What export needs to reproduce a Hugging Face folder's weight files: the "source" of ``model.json``."""
    files = [
        {
            "file": file,
            "metadata": weights.metadata[file],
            "tensors": [[t.name, t.dtype] for t in weights.tensors.values() if t.file == file],
        }
        for file in weights.files
    ]
    return {
        "sharded": weights.sharded,
        "total_size": weights.total_size,
        "index": weights.index_text,  # as it is, so that export gives the same file
        "tie_word_embeddings": tie_flag(weights.path),
        "files": files,
    }


def write_model_file(folder: str | Path, *, config: ModelConfig, source: dict[str, Any] | None = None) -> None:
    """Writes ``model.json``; ``source`` comes from ``describe_source`` or is None for a model that was born here."""
    values = {"format": FORMAT, "model": to_dict(config), "source": source}
    (Path(folder) / MODEL_FILE).write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")


def read_model_file(folder: str | Path) -> tuple[ModelConfig, dict[str, Any] | None]:
    """Geometry and source of a model or run folder.

    Raises:
      WeightsError: the file is missing, damaged or of another format version.
    """
    path = Path(folder) / MODEL_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WeightsError(f"{path} is missing") from None
    except ValueError as e:
        raise WeightsError(f"{path} is not valid JSON: {e}") from None
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        found = values.get("format") if isinstance(values, dict) else None
        raise WeightsError(f"{path}: format {found!r} is not {FORMAT}, the only one this version reads")
    try:
        return from_dict(ModelConfig, values.get("model"), name="model"), values.get("source")
    except ConfigError as e:
        raise WeightsError(f"{path}: {e}") from e


def start_run_folder(
    run: str | Path, *, config: ModelConfig, source: dict[str, Any] | None = None, assets: str | Path | None = None
) -> None:
    """Makes a training run's folder resolvable: ``model.json``, and ``assets/`` copied from a loaded model.

    Args:
      run: created if absent.
      config: the run's geometry.
      source: ``LoadedModel.source`` of the model that training starts from.
      assets: ``LoadedModel.assets`` of the same.

    Raises:
      WeightsError: the run lies inside ``assets``.
    """
    run = Path(run)
    if assets is not None and Path(assets).is_dir():
        copy_assets(assets, run / ASSETS, source=source)  # first: it refuses before anything is written
    run.mkdir(parents=True, exist_ok=True)
    write_model_file(run, config=config, source=source)


def copy_assets(folder: str | Path, target: str | Path, *, source: dict[str, Any] | None) -> int:
    """Copies a folder's files other than the weight files and index that ``source`` names. Returns bytes copied."""
    weights = {INDEX_FILE, *(file["file"] for file in source["files"])} if source else set()

    def skip(relative: Path) -> bool:
        return (
            relative.name in _TOOL_FOLDERS if len(relative.parts) > 1 else relative.name in {*weights, *_TOOL_FOLDERS}
        )

    return copy_tree(Path(folder), Path(target), skip=skip)
