"""Small parts around the loop: the clock, the stop request, and the watch for recompilation."""

from __future__ import annotations

import contextlib
import logging
import pathlib
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import multihost_utils

LOGGER = logging.getLogger(__name__)


def choose_platform() -> str | None:
    """Runs on the CPU where no accelerator's device file exists and the user has not chosen; call before using devices.

    Without this, an installed TPU runtime would search the network for a TPU for minutes. Returns what was set.
    """
    if jax.config.jax_platforms:  # JAX_PLATFORMS, or set by the program
        return None
    patterns = ("accel*", "vfio/[0-9]*", "nvidia[0-9]*", "kfd")
    if any(any(pathlib.Path("/dev").glob(pattern)) for pattern in patterns):
        return None
    jax.config.update("jax_platforms", "cpu")
    return "cpu"


class Clock:
    """Training time without compilation, checkpoint and evaluation pauses."""

    def __init__(self) -> None:
        self._steps_seen = 0
        self.restart()

    def restart(self) -> None:
        """Starts a new interval now."""
        self._since = time.perf_counter()
        self._waited = 0.0
        self._tokens = self._steps = 0

    def add(self, *, tokens: int) -> None:
        """Counts a step and its tokens."""
        self._steps += 1
        self._steps_seen += 1
        self._tokens += tokens

    def first(self) -> bool:
        """Whether the last step was the first of this process."""
        return self._steps_seen == 1

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The block's duration does not count."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - start

    @contextlib.contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """The block's duration is counted, and reported as the share of time spent waiting for data."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._waited += time.perf_counter() - start

    def take(self) -> dict[str, float]:
        """Wall-clock fields of the interval since the last ``take`` or ``restart``, which ends it."""
        elapsed = time.perf_counter() - self._since
        fields = {"time": time.time()}
        if self._steps and elapsed > 0:
            fields["tokens_per_second"] = self._tokens / elapsed
            fields["seconds_per_step"] = elapsed / self._steps
            fields["data_wait"] = self._waited / elapsed
        self.restart()
        return fields


class StopRequest:
    """Turns SIGTERM or Ctrl-C into a wish to stop after the current step; a second signal acts at once.

    With several processes the runtime's preemption service is asked instead, so that all of them stop at one step.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT)

    def __init__(self) -> None:
        self._requested = False
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> StopRequest:
        # Python lets only the main thread set handlers; elsewhere the caller is in charge of stopping.
        if jax.process_count() == 1 and threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._handle) for number in self.SIGNALS}
        return self

    def __exit__(self, *exc: object) -> None:
        self._restore()

    def requested(self, step: int) -> bool:
        """Whether to save and stop after ``step``."""
        if jax.process_count() > 1:
            return self._requested or multihost_utils.reached_preemption_sync_point(step)
        return self._requested

    def _handle(self, number: int, frame: Any) -> None:
        self._requested = True
        self._restore()
        LOGGER.warning("%s: will save and stop after this step; again to stop at once", signal.Signals(number).name)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


class CompileWatch:
    """Warns when a jitted function is compiled again after warm-up: some shape is not fixed."""

    WARM_UP = 2  # steps; the second may see differently laid out inputs than the first

    def __init__(self, function: Any) -> None:
        self._size = getattr(function, "_cache_size", lambda: 0)
        self._calls = 0
        self._known = 0

    def check(self, step: int, batch: Any) -> bool:
        """Call after each call of the function; True if this one compiled although warmed up."""
        self._calls += 1
        size = self._size()
        grown, self._known = size > self._known, size
        if not grown or self._calls <= self.WARM_UP:
            return False
        shapes = {jax.tree_util.keystr(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(batch)}
        LOGGER.warning("step %d was compiled again; batch shapes: %s", step, shapes)
        return True
