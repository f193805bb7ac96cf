"""What a run writes while it trains: ``metrics.jsonl``, ``consumed.jsonl``, TensorBoard, and a progress bar.

A resumed run first cuts both files back to the restored step, so that the files of a killed and resumed run equal those
of an uninterrupted one, apart from ``WALL_CLOCK_FIELDS``. Floats are written so that reading gives the same bits.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import tensorboardX
from tqdm import tqdm

METRICS_FILE = "metrics.jsonl"
CONSUMED_FILE = "consumed.jsonl"
TENSORBOARD_FOLDER = "tensorboard"
WALL_CLOCK_FIELDS = ("time", "tokens_per_second", "seconds_per_step", "data_wait")


class MetricsError(RuntimeError):
    """A run's log files cannot be continued."""


class JsonLines:
    """An append-only JSONL file whose lines have an increasing ``step``."""

    def __init__(self, path: str | os.PathLike[str], *, after_step: int):
        """Opens the file, dropping lines past ``after_step`` and a last line that a kill cut short.

        Raises:
          MetricsError: a line before the last is not JSON, or has no step.
        """
        self._path = pathlib.Path(path)
        truncate_lines(self._path, after_step=after_step)
        self._file: TextIO = self._path.open("a", encoding="utf-8")

    def write(self, values: Mapping[str, Any]) -> None:
        """Appends a line and hands it to the system, so that it survives the death of this process."""
        self._file.write(json.dumps(values, allow_nan=False) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Waits until the lines are on disk: before a checkpoint that claims they are."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def read_lines(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """All complete lines of a JSONL file, none if it is absent.

    Raises:
      MetricsError: a line before the last is not JSON with a ``step``.
    """
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").split("\n")
    values = []
    for number, line in enumerate(lines, start=1):
        if number == len(lines):  # what follows the last newline: nothing, or the piece that a kill left
            break
        try:
            values.append(json.loads(line))
            int(values[-1]["step"])
        except (ValueError, KeyError, TypeError) as error:
            raise MetricsError(f"{path}:{number}: is not a line of this run ({error})") from error
    return values


def truncate_lines(path: str | os.PathLike[str], *, after_step: int) -> int:
    """Rewrites a JSONL file atomically without the lines whose ``step`` is past ``after_step``; returns lines kept."""
    path = pathlib.Path(path)
    if not path.exists():
        return 0
    kept = [line for line in read_lines(path) if line["step"] <= after_step]
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in kept)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    return len(kept)


class RunLog:
    """The files of one process of a run. Metrics and TensorBoard on process 0 only, consumed ids on each.

    Usable as a context manager, which closes it.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        step: int,
        total_steps: int,
        process_index: int = 0,
        process_count: int = 1,
    ):
        """Opens the files, cut back to ``step``.

        Args:
          folder: the run folder; made if absent.
          step: steps already taken.
          total_steps: end of the progress bar.
          process_index, process_count: this host.
        """
        folder = pathlib.Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        name = CONSUMED_FILE if process_count == 1 else f"consumed-{process_index}-of-{process_count}.jsonl"
        self._consumed = JsonLines(folder / name, after_step=step)
        self._metrics = self._board = self._bar = None
        if process_index == 0:
            self._metrics = JsonLines(folder / METRICS_FILE, after_step=step)
            # purge_step: TensorBoard's files cannot be cut; it is told to ignore what is past the restored step.
            self._board = tensorboardX.SummaryWriter(str(folder / TENSORBOARD_FOLDER), purge_step=step + 1)
            # disable=None: no bar where stderr is not a terminal.
            self._bar = tqdm(total=total_steps, initial=step, unit="step", disable=None, dynamic_ncols=True)

    def consumed(self, step: int, sample_ids: Iterable[Iterable[str]]) -> None:
        """Notes the samples of each row of the step; ``step`` counts from 1, like every logged step."""
        self._consumed.write({"step": step, "samples": [list(row) for row in sample_ids]})

    def metrics(self, step: int, values: Mapping[str, float | int]) -> None:
        """Writes a line and TensorBoard scalars, each under the name it has in the line."""
        if self._metrics is None:
            return
        self._metrics.write({"step": step, **values})
        for name, value in values.items():
            if name != "time":
                self._board.add_scalar(name, value, step)

    def progress(self, step: int, values: Mapping[str, float | int] | None = None) -> None:
        """Moves the bar; ``values`` (those of the last log step) are shown beside it."""
        if self._bar is None:
            return
        if values:
            shown = {
                "loss": f"{values['loss']:.4f}" if "loss" in values else "-",
                "tok/s": f"{values.get('tokens_per_second', 0):,.0f}",
                "packed": f"{values.get('packing_efficiency', 0):.0%}",
            }
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(step - self._bar.n)

    @property
    def has_bar(self) -> bool:
        """Whether a progress bar is being drawn (a terminal), so that plain lines would be noise."""
        return self._bar is not None and not self._bar.disable

    def sync(self) -> None:
        """Everything written so far is on disk when it returns."""
        self._consumed.sync()
        if self._metrics is not None:
            self._metrics.sync()
            self._board.flush()

    def close(self) -> None:
        self._consumed.close()
        if self._metrics is not None:
            self._metrics.close()
            self._board.close()
            self._bar.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
