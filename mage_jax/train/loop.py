"""The supervised run, one page. The order inside the loop is a contract; see ``_loop``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import math
import os
import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax.sharding import Mesh

from mage_jax.config import ConfigError, TrainConfig, to_dict
from mage_jax.ops.vocab import LossSums
from mage_jax.sharding import make_mesh, rows_sharding
from mage_jax.train.checkpoint import Checkpoints, Meta, free_space_note
from mage_jax.train.metrics import RunLog
from mage_jax.train.optimizer import make_optimizer, parameter_table
from mage_jax.train.runtime import Clock, CompileWatch, StopRequest
from mage_jax.train.startup import CHECKPOINTS_FOLDER, begin, check_run_folder, make_dataset, plan_start
from mage_jax.train.state import TrainState, bytes_per_device
from mage_jax.train.step import StepMetrics, make_eval_step, make_train_step, summarize, summarize_sums
from mage_jax.types import TrainBatch

LOGGER = logging.getLogger(__name__)
IN_FLIGHT = 2  # steps queued on the devices; more would only pile up batches in their memory


class TrainError(RuntimeError):
    """Training cannot go on; the message names the step."""


@dataclasses.dataclass(frozen=True)
class Result:
    """How a run ended.

    Attributes:
      step: steps taken in total; a checkpoint of it exists.
      reason: "done", "signal" (asked to stop) or "data" (the records ended first).
      values: numbers of the last logged step.
    """

    step: int
    reason: str
    values: dict[str, float | int]


def train(
    config: TrainConfig,
    workdir: str | os.PathLike[str],
    *,
    datasets: Callable[..., Any] = make_dataset,
    say: Callable[[str], None] = LOGGER.info,
) -> Result:
    """Trains until ``config.steps``, continuing whatever ``workdir`` holds.

    Args:
      config: the run.
      workdir: run folder; made if absent.
      datasets: ``(config, *, evaluation) -> grain.IterDataset[HostBatch]``.
      say: receives the lines about devices, parameters and where the run starts.

    Raises:
      ConfigError, WeightsError, RecordError, LoaderError: the config cannot be run.
      CheckpointError: the folder cannot be continued with this config, or a save failed.
      TrainError: the loss or gradient is not finite.
    """
    workdir = pathlib.Path(workdir).absolute()
    if config.eval_every and not config.data.eval_records:
        raise ConfigError("eval_every: needs data.eval_records")
    check_run_folder(workdir)
    workdir.mkdir(parents=True, exist_ok=True)
    mesh = make_mesh(config.mesh)
    with contextlib.ExitStack() as cleanup:
        checkpoints = Checkpoints(workdir / CHECKPOINTS_FOLDER, keep=config.checkpoint.keep)
        cleanup.callback(checkpoints.close)
        plan = plan_start(config, workdir, checkpoints)
        config = plan.config
        optimizer = make_optimizer(config.optimizer, model=config.model, total_steps=config.steps)
        devices = f"{len(jax.devices())} {jax.devices()[0].platform} devices in {jax.process_count()} processes"
        say(f"devices: {devices}; mesh: {dict(mesh.shape)}")
        say(f"parameters:\n{parameter_table(config.model, config.optimizer.frozen)}")
        for line in (plan.origin, *plan.notes):
            say(line)
        with jax.set_mesh(mesh), StopRequest() as stop:
            step_function = make_train_step(config, optimizer=optimizer, mesh=mesh)
            eval_function = make_eval_step(config, optimizer=optimizer, mesh=mesh)
            loaded = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=plan.tokenizer))
            dataset = datasets(loaded, evaluation=False)
            eval_dataset = datasets(loaded, evaluation=True) if config.eval_every else None
            start = begin(plan, workdir, optimizer=optimizer, mesh=mesh, checkpoints=checkpoints)
            iterator = iter(dataset)  # created, then its state loaded, then iterated: any other order restarts the data
            cleanup.callback(iterator.close)
            if start.data_state is not None:
                iterator.set_state(start.data_state)
            if note := free_space_note(workdir, 2 * bytes_per_device(start.state) * jax.local_device_count()):
                LOGGER.warning("%s", note)
            run = _Run(config, mesh, checkpoints, stop, step_function, eval_function, eval_dataset)
            first = plan.resume_step or 0
            with RunLog(
                workdir,
                step=first,
                total_steps=config.steps,
                process_index=jax.process_index(),
                process_count=jax.process_count(),
            ) as log:
                return _loop(run, start.state, iterator, log, step=first, consumed=start.samples_consumed)


@dataclasses.dataclass(frozen=True)
class _Run:
    config: TrainConfig
    mesh: Mesh
    checkpoints: Checkpoints
    stop: StopRequest
    step_function: Callable[[TrainState, TrainBatch], tuple[TrainState, StepMetrics]]
    eval_function: Callable[..., LossSums]
    eval_dataset: Any


def _loop(run: _Run, state: TrainState, iterator: Iterator[Any], log: RunLog, *, step: int, consumed: int) -> Result:
    """THE ORDER MATTERS: draw, step, note the samples, log, evaluate, save. A save holds the iterator exactly after the
    batch that the saved step used, because the next batch is drawn only after it; everything that the log files say up
    to a step is on disk before the checkpoint of that step."""
    config = run.config
    clock, compiles = Clock(), CompileWatch(run.step_function)
    in_flight: collections.deque[StepMetrics] = collections.deque()
    values: dict[str, float | int] = {}
    saved, reason = step, "done"
    while step < config.steps:
        with clock.waiting_for_data():
            host = next(iterator, None)
        if host is None:
            reason = "data"
            break
        batch = device_batch(host.batch, run.mesh)
        with jax.profiler.StepTraceAnnotation("train", step_num=step), jax.transfer_guard("disallow"):
            state, metrics = run.step_function(state, batch)
        step += 1
        consumed += sum(map(len, host.sample_ids))
        log.consumed(step, host.sample_ids)
        clock.add(tokens=host.tokens_used * jax.process_count())
        compiles.check(step, batch)
        in_flight.append(metrics)
        if len(in_flight) > IN_FLIGHT:
            jax.block_until_ready(in_flight.popleft())
        if clock.first():  # compilation is not training time
            jax.block_until_ready(metrics)
            clock.restart()

        last = step == config.steps
        stopping = run.stop.requested(step)
        logging_now = last or step % config.log_every == 0
        evaluating_now = run.eval_dataset is not None and not stopping and (last or step % config.eval_every == 0)
        saving_now = last or stopping or step % config.checkpoint.every == 0
        if logging_now or evaluating_now or saving_now:
            now = summarize(jax.device_get(metrics))
            check_finite(step, now)
            run.checkpoints.poll()
        if logging_now:
            packing = host.tokens_used / host.batch.rows.tokens_bt.size
            values = {**now, "packing_efficiency": packing, **clock.take()}
            log.metrics(step, values)
            if not log.has_bar:
                LOGGER.info("%s", _line(step, config.steps, values))
        log.progress(step, values)
        if evaluating_now:
            with clock.paused():
                result = evaluate(run, state, step=step)
            if result is not None:
                log.metrics(step, result)
            stopping = run.stop.requested(step)  # evaluation may have been long
        if saving_now or stopping:
            with clock.paused():
                _save(run, state, iterator, log, step=step, consumed=consumed)
            saved = step
        if stopping:
            reason = "signal"
            break
    if saved != step:
        check_finite(step, summarize(jax.device_get(metrics)))
        _save(run, state, iterator, log, step=step, consumed=consumed)
    run.checkpoints.wait()
    return Result(step, reason, values)


def _save(run: _Run, state: TrainState, iterator: Any, log: RunLog, *, step: int, consumed: int) -> None:
    log.sync()
    meta = Meta(
        step=step,
        process_count=jax.process_count(),
        data_workers=run.config.data.workers,
        config=to_dict(run.config),
        samples_consumed=consumed,
    )
    run.checkpoints.save(step, state, data_state=iterator.get_state(), meta=meta)


def evaluate(run: _Run, state: TrainState, *, step: int) -> dict[str, float] | None:
    """Mean loss and accuracy over all evaluation records; None if a stop request cut it short or no target exists."""
    total = None
    for host in run.eval_dataset:
        sums = run.eval_function(state.params, device_batch(host.batch, run.mesh))
        total = sums if total is None else jax.tree.map(lambda a, b: a + b, total, sums)
        jax.block_until_ready(total)
        if run.stop.requested(step):
            LOGGER.warning("evaluation at step %d was cut short by a stop request", step)
            return None
    total = jax.device_get(total)
    if total is None or not total.weight:
        LOGGER.warning("evaluation at step %d: no supervised target in data.eval_records", step)
        return None
    return {f"eval_{name}": value for name, value in summarize_sums(total).items()}


def device_batch(batch: TrainBatch, mesh: Mesh) -> TrainBatch:
    """Host rows of this process as global arrays, split by rows."""
    sharding = rows_sharding(mesh)
    return jax.tree.map(lambda leaf: jax.make_array_from_process_local_data(sharding, leaf), batch)


def check_finite(step: int, values: dict[str, float | int]) -> None:
    """Raises ``TrainError`` if the loss or the gradient is not finite: such a state is neither logged nor saved."""
    for name in ("loss", "grad_norm", "param_norm"):
        if not math.isfinite(values.get(name, 0.0)):
            raise TrainError(
                f"step {step}: {name} is {values[name]}; stopped without saving this step. Resume from the last"
                " checkpoint with a lower learning rate, or look at the step's samples in consumed.jsonl"
            )


def _line(step: int, steps: int, values: dict[str, float | int]) -> str:
    loss = f"loss {values['loss']:.4f}  accuracy {values['accuracy']:.3f}" if "loss" in values else "no targets"
    speed = f"  {values['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in values else ""
    return f"step {step}/{steps}  {loss}  packed {values['packing_efficiency']:.0%}{speed}"
