"""What the commands share: errors as one message and an exit code, and a clean end on SIGTERM."""

from __future__ import annotations

import argparse
import math
import signal
import sys
from collections.abc import Callable


def shard_gb(text: str) -> float:
    """The argument type of ``--max_shard_gb``: a finite number of 10^9 bytes, at least one byte."""
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be a number of 10^9 bytes, got {text!r}") from None
    if not math.isfinite(value) or value * 1e9 < 1:
        raise argparse.ArgumentTypeError(f"must be a positive, finite number of 10^9 bytes, got {text}")
    return value


def run(main: Callable[[], None]) -> None:
    """Runs a command; expected errors go to stderr without a traceback, exit code 1."""
    # SIGTERM then unwinds like Ctrl-C, and unfinished output is removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        main()
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(130)
