"""What the commands have in common: signals, errors in one line, exit codes."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

from pipeline.errors import OffstageError

INTERRUPTED = 130
FULL_ERROR = "HYDRA_FULL_ERROR"
"""The environment variable that asks for tracebacks; Hydra reads it too."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


def heed_signals() -> None:
    """Turn the first SIGINT or SIGTERM into a ``KeyboardInterrupt``, also where the shell had them ignored."""
    for number in _SIGNALS:
        signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """The same signal again ends the process at once; another doesn't disturb the ending."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL if each == number else signal.SIG_IGN)
    raise KeyboardInterrupt


def shows_all() -> bool:
    """Return whether errors are to be seen with their tracebacks."""
    return FULL_ERROR in os.environ


def guarded(work: Callable[[], int], *, name: str = "offstage", show_all: bool | None = None) -> int:
    """Return what ``work`` returns, or print the error that a user can mend and return its exit code.

    With ``show_all`` (by default: as the environment says) the error is raised on.
    """
    try:
        return work()
    except OffstageError as error:
        if shows_all() if show_all is None else show_all:
            raise
        sys.stderr.writelines(f"{name}: {line}\n" for line in str(error).splitlines())
        return error.exit_code


def run_command(name: str, work: Callable[[], int]) -> None:
    """Run ``work`` as the command ``name`` and exit with its code."""
    heed_signals()
    try:
        code = guarded(work, name=name)
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    sys.stdout.flush()
    sys.exit(code)
