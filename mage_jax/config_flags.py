"""Command lines of the launchers: ``--config=FILE.py[:variant]`` and typed overrides ``--config.a.b=value``.

A config file is Python with ``get_config(variant: str = "")`` that returns a config dataclass. Overrides go through
``ml_collections``' flags on a locked copy, then back into the dataclass, so that every value passes the same validation
as one written in the file. Imports no jax.
"""

from __future__ import annotations

import difflib
import importlib.util
import inspect
import os
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from absl import flags
from ml_collections import config_dict
from ml_collections import config_flags as ml_config_flags

from mage_jax.config import ConfigError, from_dict, to_dict


class UsageError(ValueError):
    """A command line cannot be understood: one line that names the flag or field. Launchers exit with status 2."""


class HelpRequested(Exception):
    """``--help`` was given; ``str()`` is the text."""


def load_config(spec: str, *, cls: type) -> Any:
    """The config that ``FILE.py[:variant]`` stands for.

    Args:
      spec: path of a Python file, and optionally the variant handed to its ``get_config``.
      cls: dataclass that it must return.

    Raises:
      UsageError: no such file, no ``get_config``, an unknown variant, or another kind of config.
    """
    path, _, variant = spec.partition(":")
    file = pathlib.Path(path)
    if not file.is_file():
        raise UsageError(f"--config={spec}: no file {path}")
    if file.suffix != ".py":
        raise UsageError(f"--config={spec}: {path} is not a Python file")
    module_spec = importlib.util.spec_from_file_location(f"_config_{file.stem}", file)
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except ConfigError as error:
        raise UsageError(f"--config={spec}: {error}") from error
    get_config = getattr(module, "get_config", None)
    if not callable(get_config):
        raise UsageError(f"--config={spec}: {path} has no function get_config")
    if variant and not inspect.signature(get_config).parameters:
        raise UsageError(f"--config={spec}: {path} has no variants")
    try:
        config = get_config(variant) if variant else get_config()
    except (ConfigError, ValueError, KeyError) as error:
        raise UsageError(f"--config={spec}: {error}") from error
    if not isinstance(config, cls):
        raise UsageError(
            f"--config={spec}: get_config returned {type(config).__name__}, this program needs {cls.__name__}"
        )
    return config


def override(config: Any, argv: Sequence[str], *, flag_values: flags.FlagValues | None = None) -> Any:
    """``config`` with the ``--config.*`` flags of ``argv`` applied; other flags must be defined in ``flag_values``.

    Args:
      config: a config dataclass.
      argv: arguments without the program's name and without ``--config=FILE``. A tuple is written as a Python literal
        or by repeating the flag.
      flag_values: where the program's own flags are defined; they are parsed too.

    Raises:
      UsageError: an unknown flag or field, a value of the wrong type or out of range, or a positional argument.
    """
    flag_values = flags.FlagValues() if flag_values is None else flag_values
    values = to_dict(config)
    for argument in argv:
        _check_field(argument, values)
    locked = config_dict.ConfigDict(values)
    locked.lock()
    argv = ["program", *argv]
    ml_config_flags.DEFINE_config_dict("config", locked, flag_values=flag_values, sys_argv=argv)
    try:
        rest = flag_values(argv)[1:]
        if rest:
            raise UsageError(f"unexpected argument: {rest[0]}")
        return from_dict(type(config), flag_values.config.to_dict())
    except ConfigError as error:
        raise UsageError(str(error)) from error
    except (flags.Error, TypeError) as error:
        raise UsageError(" ".join(str(error).split())) from error


def parse_command_line(
    argv: Sequence[str],
    *,
    cls: type,
    usage: str,
    define: Callable[[flags.FlagValues], None] = lambda flag_values: None,
) -> tuple[Any, flags.FlagValues]:
    """Config and other flags of a launcher.

    Args:
      argv: ``sys.argv[1:]``.
      cls: config dataclass that the program takes.
      usage: text of ``--help``.
      define: defines the program's own flags.

    Returns:
      The config with its overrides, and the parsed flags (``flag_values.workdir``, ...).

    Raises:
      HelpRequested: ``--help`` or ``-h`` is among the arguments.
      UsageError: anything that cannot be understood.
    """
    if any(argument in ("--help", "-help", "-h") for argument in argv):
        raise HelpRequested(usage)
    spec, rest = _take_config(argv)
    if spec is None:
        raise UsageError("--config=FILE.py[:variant] is missing; --help explains")
    flag_values = flags.FlagValues()
    define(flag_values)
    config = load_config(spec, cls=cls)
    return override(config, rest, flag_values=flag_values), flag_values


def run_main(main: Callable[[Sequence[str]], int], argv: Sequence[str] | None = None) -> int:
    """Calls a launcher's ``main(argv)``; help goes to stdout (0), usage and config errors to stderr in one line (2)."""
    program = os.path.basename(sys.argv[0])
    try:
        try:
            return main(sys.argv[1:] if argv is None else argv)
        except HelpRequested as text:
            print(text, flush=True)
            return 0
    except BrokenPipeError:  # the reader has seen enough: `... --help | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains while it exits
        return 141
    except (UsageError, ConfigError) as error:
        print(f"{program}: {error}", file=sys.stderr)
        return 2


def _take_config(argv: Sequence[str]) -> tuple[str | None, list[str]]:
    """Splits off ``--config=SPEC`` or ``--config SPEC``."""
    spec, rest, i = None, [], 0
    while i < len(argv):
        name, equals, value = argv[i].lstrip("-").partition("=") if argv[i].startswith("-") else ("", "", "")
        if name == "config":
            if not equals:
                i += 1
                if i == len(argv):
                    raise UsageError("--config: needs FILE.py[:variant]")
                value = argv[i]
            if spec is not None:
                raise UsageError(f"--config: given twice, {spec} and {value}")
            spec = value
        else:
            rest.append(argv[i])
        i += 1
    return spec, rest


def _check_field(argument: str, values: Mapping[str, Any]) -> None:
    """Names an override's unknown field, and the nearest known one (ml_collections names the last part only)."""
    name = argument.lstrip("-").partition("=")[0]
    name = name.removeprefix("no") if name.startswith("noconfig.") else name
    if not argument.startswith("-") or not name.startswith("config."):
        return
    node: Any = values
    parts = name.split(".")[1:]
    for i, part in enumerate(parts):
        if not isinstance(node, Mapping) or part not in node:
            known = list(node) if isinstance(node, Mapping) else []
            near = difflib.get_close_matches(part, known, n=1)
            hint = (
                f"did you mean {near[0]}?" if near else f"fields: {', '.join(known)}" if known else "it has no fields"
            )
            where = ".".join(["config", *parts[:i]])
            raise UsageError(f"--{name}: {where} has no field {part!r} ({hint})")
        node = node[part]
    if isinstance(node, Mapping):
        raise UsageError(f"--{name}: is a group; set one of its fields: {', '.join(node)}")
