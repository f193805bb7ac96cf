"""Checkpoints of a run: one atomic folder per step with everything that the next step depends on.

``RUN/checkpoints/<step>/`` holds ``params``, ``optimizer`` and ``trainer`` (orbax pytrees), ``data`` (the iterator's
state, one JSON a process) and ``meta`` (one JSON). Orbax writes into a temporary folder and renames it when all is on
disk, so that a folder with a plain number is complete. Reinforcement learning adds its own parts with ``extras``.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import pathlib
import shutil
import time
from collections.abc import Awaitable, Mapping
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from mage_jax.train.state import TrainState

FORMAT = 1
TEMPORARY = ".orbax-checkpoint-tmp"  # in the names of folders that are being written
CHUNK_BYTES = 64 << 20  # of stored arrays; orbax would store each whole, and export reads layer by layer
LOGGER = logging.getLogger(__name__)


class CheckpointError(RuntimeError):
    """A checkpoint could not be written, read, or used by this run; the message says which and what is still good."""


@dataclasses.dataclass(frozen=True)
class Meta:
    """What identifies a checkpoint.

    Attributes:
      step: steps taken.
      process_count: hosts of the run; the data is split by it.
      data_workers: decoding processes; the order of samples depends on it.
      config: ``to_dict`` of the resolved ``TrainConfig``.
      samples_consumed: samples of host 0's rows in all steps so far.
      format: of this folder.
    """

    step: int
    process_count: int
    data_workers: int
    config: dict[str, Any]
    samples_consumed: int = 0
    format: int = FORMAT


class JsonPart:
    """A JSON value as a part of a checkpoint. ``per_process`` writes one file per host, else only host 0 writes."""

    def __init__(self, value: Any = None, *, per_process: bool = False):
        self.value = value
        self._per_process = per_process

    def _filename(self) -> str:
        if not self._per_process:
            return "value.json"
        return f"process_{jax.process_index()}-of-{jax.process_count()}.json"

    async def save(self, directory: Any) -> Awaitable[None]:
        """Orbax's protocol: the value is frozen here, written by the returned coroutine in the background."""
        text = json.dumps(self.value)

        async def write() -> None:
            path = await directory.await_creation()
            if self._per_process or jax.process_index() == 0:
                (path / self._filename()).write_text(text)

        return write()

    async def load(self, directory: Any) -> Awaitable[None]:
        """Orbax's protocol: fills ``value``."""

        async def read() -> None:
            self.value = json.loads((directory / self._filename()).read_text())

        return read()


@dataclasses.dataclass(frozen=True)
class Restored:
    """Result of ``Checkpoints.restore``: the state in the asked shardings, the iterator's state, and the identity."""

    state: TrainState
    data_state: Any
    meta: Meta
    extras: dict[str, Any]


class Checkpoints:
    """The ``checkpoints`` folder of a run. Saves are asynchronous; a failed one raises at the next call.

    Not thread safe. Every process of a multi-host run makes the same calls.
    """

    def __init__(self, directory: str | os.PathLike[str], *, keep: int):
        """Opens or makes the folder; removes what killed saves left behind.

        Args:
          directory: made absolute.
          keep: newest checkpoints kept.
        """
        self._directory = pathlib.Path(directory).absolute()
        # Here and now: orbax's own clean-up runs in the background and may outlive a run that saves nothing.
        self._remove_unfinished("which a killed save left behind")
        training = ocp.training
        context = ocp.Context()
        context.array.saving.scoped_storage_options_creator = _storage_options
        self._checkpointer = training.Checkpointer(
            self._directory,
            context=context,
            save_decision_policy=training.save_decision_policies.FixedIntervalPolicy(1),  # the loop decides
            preservation_policy=training.preservation_policies.LatestN(keep),
        )
        self._saving: int | None = None
        self._complete = [checkpoint.step for checkpoint in self._checkpointer.checkpoints]

    @property
    def latest(self) -> int | None:
        """Step of the newest complete checkpoint."""
        return max(self._complete, default=None)

    def meta(self, step: int) -> Meta:
        """Identity of a checkpoint, read without its arrays.

        Raises:
          CheckpointError: unreadable, or written in another format.
        """
        part = JsonPart()
        try:
            self._checkpointer.load_checkpointables(step, {"meta": part})
        except Exception as error:
            raise CheckpointError(f"{self._directory / str(step)}: cannot be read ({_reason(error)})") from error
        found = part.value.get("format") if isinstance(part.value, dict) else None
        if found != FORMAT:
            raise CheckpointError(f"{self._directory / str(step)}: is of format {found}, this code reads {FORMAT}")
        return Meta(**part.value)

    def save(
        self, step: int, state: TrainState, *, data_state: Any, meta: Meta, extras: Mapping[str, Any] | None = None
    ) -> None:
        """Starts saving; returns when the arrays have left the devices, so that the state may be donated.

        Args:
          step: steps taken; the folder's name.
          state: its ``params``, ``opt_state``, ``step`` and ``rng``.
          data_state: JSON value, ``get_state()`` of the iterator *after* the last batch used.
          meta: identity.
          extras: more parts by name, each a pytree of arrays or a ``JsonPart``.

        Raises:
          CheckpointError: this save could not start, or an earlier one failed.
        """
        self.wait()
        parts = {
            "params": state.params,
            "optimizer": state.opt_state,
            "trainer": {"step": state.step, "rng": state.rng},
            "data": JsonPart(data_state, per_process=True),
            "meta": JsonPart(dataclasses.asdict(meta)),
            **(extras or {}),
        }
        self._saving = step
        try:
            self._checkpointer.save_checkpointables_async(step, parts)
        except Exception as error:
            raise self._failed(error) from error

    def poll(self) -> None:
        """Raises ``CheckpointError`` if the save in the background has failed; does not wait for it."""
        if self._saving is not None and not self._checkpointer.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the save in the background.

        Raises:
          CheckpointError: it failed. Earlier checkpoints are intact.
        """
        if self._saving is None:
            return
        try:
            self._checkpointer.wait()
        except Exception as error:
            raise self._failed(error) from error
        self._complete.append(self._saving)
        self._saving = None

    def restore(self, abstract: TrainState, *, step: int, extras: Mapping[str, Any] | None = None) -> Restored:
        """Reads a checkpoint into the shapes, dtypes and shardings of ``abstract``, whatever wrote it.

        Raises:
          CheckpointError: unreadable, or its arrays have other shapes (named).
        """
        data = JsonPart(per_process=True)
        targets = {
            "params": abstract.params,
            "optimizer": abstract.opt_state,
            "trainer": {"step": abstract.step, "rng": abstract.rng},
            "data": data,
            **(extras or {}),
        }
        meta = self.meta(step)
        if meta.process_count != jax.process_count():
            raise CheckpointError(
                f"{self._directory / str(step)}: was written by {meta.process_count} processes, this run has"
                f" {jax.process_count()}; the data iterator cannot be resumed"
            )
        try:
            parts = self._checkpointer.load_checkpointables(step, targets)
        except Exception as error:
            raise CheckpointError(f"{self._directory / str(step)}: cannot be restored ({_reason(error)})") from error
        state = TrainState(params=parts["params"], opt_state=parts["optimizer"], **parts["trainer"])
        return Restored(state, data.value, meta, {name: parts[name] for name in extras or {}})

    def close(self) -> None:
        """Waits for the save in the background and frees what orbax holds; raises like ``wait``."""
        try:
            self.wait()
        finally:
            self._checkpointer.close()

    def _remove_unfinished(self, why: str) -> None:
        if jax.process_index() == 0 and self._directory.is_dir():
            for left in self._directory.glob(f"*{TEMPORARY}*"):
                LOGGER.warning("removing %s, %s", left, why)
                _remove(left)

    def _failed(self, error: Exception) -> CheckpointError:
        step, self._saving = self._saving, None
        try:  # a full disk is still full of it
            self._remove_unfinished("whose save failed")
        except CheckpointError as left:
            LOGGER.warning("%s", left)
        kept = "no earlier checkpoint exists" if self.latest is None else f"checkpoint {self.latest} is intact"
        return CheckpointError(f"{self._directory}: saving step {step} failed ({_reason(error)}); {kept}")


def _storage_options(path: Any, leaf: Any) -> Any:
    """How orbax cuts one array into chunks: stacked weights by layer, other large ones where they are longest."""
    if getattr(leaf, "nbytes", 0) <= CHUNK_BYTES:
        return None
    stacked = any(getattr(part, "key", None) == "layers" for part in path)
    return ocp.options.ArrayOptions.Saving.StorageOptions(
        chunk_byte_size=CHUNK_BYTES, shard_axes=(0,) if stacked else None
    )


def _remove(folder: pathlib.Path) -> None:
    """Removes a folder into which threads of a failed save may still be writing."""
    for _ in range(50):
        shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            return
        time.sleep(0.1)
    raise CheckpointError(f"{folder}: cannot be removed; it is left over from an unfinished save, remove it by hand")


def _reason(error: BaseException) -> str:
    """First line of the error and of what caused it; full disks are said in words."""
    seen, texts = set(), []
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        texts.append(str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__)
        error = error.__cause__
    text = "; caused by: ".join(dict.fromkeys(texts))
    full = ("No space left", "RESOURCE_EXHAUSTED", "Disk quota")
    return f"the disk is full: {text}" if any(word in text for word in full) else text


def free_space_note(directory: str | os.PathLike[str], need: int) -> str | None:
    """A warning if the disk of ``directory`` has fewer than ``need`` bytes free, else None."""
    stats = os.statvfs(directory)
    free = stats.f_bavail * stats.f_frsize
    if free >= need:
        return None
    return f"{directory}: a checkpoint needs about {_size(need)}, {_size(free)} are free"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{math.ceil(count / 2**20)} MiB"
