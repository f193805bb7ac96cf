#!/usr/bin/env python3
"""Supervised training: all four supervised stages and their toy versions. See ``--help``."""

from __future__ import annotations

import functools
import logging
import os
import pathlib
import sys
from collections.abc import Sequence

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from mage_jax.config import ConfigError, TrainConfig
from mage_jax.config_flags import parse_command_line, run_main

USAGE = """usage: launch/train.py --config=configs/FILE.py[:variant] [--config.a.b=value ...] [--workdir=DIR]

Trains a supervised stage. Run the same command again to continue after a stop: the run folder
holds everything. SIGTERM or Ctrl-C saves, then exits with status 0.

  --config=FILE.py[:variant]  config file; its get_config(variant) returns a TrainConfig
  --config.FIELD=VALUE        overrides a field, e.g. --config.steps=100
                              --config.optimizer.learning_rate=1e-4; a tuple as a literal
                              "--config.data.records=('a.jsonl','b.jsonl')" or by repeating the flag
  --workdir=DIR               run folder (default: runs/<config name>): checkpoints/, metrics.jsonl,
                              consumed.jsonl, tensorboard/, model.json, assets/, config.json
  --distributed               join the other hosts of a pod (jax.distributed.initialize); on each
                              host the same command. Outside managed clusters add:
  --coordinator=HOST:PORT --processes=N --process=I
  --plot                      write loss.png into the run folder at the end
  --help                      this text

It starts from the first of: the run folder's newest checkpoint, config.init_from (a model folder,
run folder or Hugging Face folder), random weights. JAX_PLATFORMS chooses the devices.

exit status: 0 done or stopped on request, 1 failed, 2 the command line or the config is wrong
"""


def define_flags(flag_values) -> None:
    from absl import flags

    flags.DEFINE_string("workdir", "", "run folder", flag_values=flag_values)
    flags.DEFINE_bool("distributed", False, "join a multi-host run", flag_values=flag_values)
    flags.DEFINE_string("coordinator", None, "HOST:PORT of process 0", flag_values=flag_values)
    flags.DEFINE_integer("processes", None, "number of hosts", flag_values=flag_values, lower_bound=1)
    flags.DEFINE_integer("process", None, "number of this host", flag_values=flag_values, lower_bound=0)
    flags.DEFINE_bool("plot", False, "write loss.png at the end", flag_values=flag_values)


def without_foreign_tracebacks(record: logging.LogRecord) -> bool:
    """A failed save is raised to us and said in one line; orbax's threads would each print its traceback before."""
    if record.exc_info and not record.name.startswith("mage_jax"):
        record.exc_info = record.exc_text = None
    return True


def main(argv: Sequence[str]) -> int:
    config, options = parse_command_line(argv, cls=TrainConfig, usage=USAGE, define=define_flags)
    workdir = options.workdir or os.path.join("runs", config.name)

    # After parsing, so that --help and usage errors are instant.
    import jax
    from absl import flags

    logging.basicConfig(format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    for handler in logging.getLogger().handlers:
        handler.addFilter(without_foreign_tracebacks)
    logging.getLogger("mage_jax").setLevel(logging.INFO)  # orbax and grain stay at warnings
    flags.FLAGS.mark_as_parsed()  # read by grain's worker processes

    from mage_jax.train.loop import train
    from mage_jax.train.runtime import choose_platform

    if choose_platform():
        print("no accelerator found: running on the CPU (set JAX_PLATFORMS to choose)")
    if options.distributed:
        try:
            jax.distributed.initialize(options.coordinator, options.processes, options.process)
        except ValueError as error:
            raise ConfigError(f"--distributed: {error}; give --coordinator, --processes and --process") from error
    elif options.coordinator or options.processes or options.process is not None:
        raise ConfigError("--coordinator, --processes and --process need --distributed")

    say = functools.partial(print, flush=True)  # in order with the log lines on stderr
    if jax.process_index() != 0:  # its lines would only repeat those of process 0
        logging.getLogger("mage_jax").setLevel(logging.WARNING)
        say = logging.getLogger("mage_jax").info
    try:
        result = train(config, workdir, say=say)
    except (RuntimeError, ValueError, OSError) as error:
        # Our own errors say what to do in one line, the system's name the file; any other is a bug and keeps its trace.
        ours = type(error).__module__.startswith("mage_jax") or isinstance(error, OSError)
        if isinstance(error, ConfigError) or not ours:
            raise
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    if options.plot and jax.process_index() == 0:
        from mage_jax.train.plots import plot_run

        print(f"plot: {plot_run(workdir)}")
    ending = {
        "done": f"done at step {result.step}",
        "signal": f"stopped on request after step {result.step}; run the same command again to continue",
        "data": f"the records ended after step {result.step} of {config.steps} (see config.data.epochs)",
    }[result.reason]
    say(f"{ending}; checkpoint: {os.path.join(workdir, 'checkpoints', str(result.step))}")
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main))
