"""What the commands share: errors as one message and an exit code, and a clean end on SIGTERM."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable


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
