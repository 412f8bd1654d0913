"""What every command line here shares: quiet libraries, progress bars, errors of one line."""

import os
import signal
import sys
from collections.abc import Callable
from typing import Any


def progress_bar(total: int, description: str, unit: str, **settings: Any) -> Any:
    """A tqdm bar with rate and time left: redrawn twice a second on a terminal, a line every 20 s in a log file."""
    from tqdm import tqdm

    interval_s = 0.5 if sys.stderr.isatty() else 20.0
    return tqdm(total=total, desc=description, unit=unit, mininterval=interval_s, maxinterval=interval_s,
                dynamic_ncols=True, **settings)  # fmt: skip


def quiet_libraries() -> None:
    """No bars and notices of other libraries between ours."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a forked worker would warn, and hang, otherwise
    from transformers.utils import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()


def run_command(body: Callable[[], Any]) -> int:
    """Run a step; a fault of its input (ValueError, OSError) is one line on stderr and exit status 1, no traceback.

    SIGTERM ends it like Ctrl-C does: `finally` blocks run, so that work already done is kept.
    """
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        quiet_libraries()
        body()
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
