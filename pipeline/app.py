"""The command ``offstage``: Hydra composes a config, one run comes out.

Hydra prints its own errors over several lines and exits 1; here every error that a user can mend is one line per
fault, with the exit code of its class. ``HYDRA_FULL_ERROR=1`` shows tracebacks instead.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from omegaconf import DictConfig

INTERRUPTED = 130
_FULL_ERROR = "HYDRA_FULL_ERROR"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments`` (default: the process's own), then exit with its code."""
    started = time.perf_counter()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _interrupt)
    sys.argv[1:] = prepare_arguments(sys.argv[1:] if arguments is None else arguments)
    shows_all = _FULL_ERROR in os.environ
    os.environ[_FULL_ERROR] = "1"  # makes Hydra raise its errors instead of printing them
    try:
        code = _guarded(lambda: _compose_and_run(started, shows_all=shows_all), shows_all=shows_all)
    except KeyboardInterrupt:
        sys.stderr.write("offstage: interrupted\n")
        code = INTERRUPTED
    finally:
        if not shows_all:
            os.environ.pop(_FULL_ERROR, None)
    sys.stdout.flush()
    sys.exit(code)


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line that Hydra is to see.

    ``model.path=…`` alone selects ``model=pretrained``: who names a checkpoint does not want the embedded model's
    small budgets.
    """
    given = list(arguments)
    names_path = any(argument.startswith("model.path=") for argument in given)
    chooses = any(argument.startswith(("model=", "experiment=", "--config-name", "-cn")) for argument in given)
    return [*given, "model=pretrained"] if names_path and not chooses else given


def _interrupt(number: int, _frame: FrameType | None) -> None:
    """Turn the first signal into a ``KeyboardInterrupt``; a second one ends the process at once."""
    signal.signal(number, signal.SIG_DFL)
    raise KeyboardInterrupt


def _compose_and_run(started: float, *, shows_all: bool) -> int:
    """Let Hydra compose the config and run each job; return the exit code: the first job's that failed, else 0."""
    import hydra

    from pipeline.config import register
    from pipeline.console import run_job

    register()
    codes: list[int] = []

    def job(config: DictConfig) -> int:
        since = time.perf_counter() if codes else started
        codes.append(_guarded(lambda: run_job(config, started=since), shows_all=shows_all))
        return codes[-1]

    hydra.main(config_path="pkg://conf", config_name="config", version_base="1.3")(job)()
    return next((code for code in codes if code), 0)


def _guarded(work: Callable[[], int], *, shows_all: bool) -> int:
    """Return what ``work`` returns, or print the error that a user can mend and return its exit code.

    With ``shows_all`` the error is raised on, to be seen with its traceback.
    """
    from hydra.errors import HydraException
    from omegaconf.errors import OmegaConfBaseException

    from pipeline.errors import ConfigError, OffstageError

    try:
        return work()
    except OffstageError as error:
        if shows_all:
            raise
        sys.stderr.writelines(f"offstage: {line}\n" for line in str(error).splitlines())
        return error.exit_code
    except (HydraException, OmegaConfBaseException) as error:
        if shows_all:
            raise
        sys.stderr.write(f"offstage: {_one_line(error)}\n")
        return ConfigError.exit_code


def _one_line(error: Exception) -> str:
    """Return Hydra's message and its cause's in one line, with the closest key where one was misspelt."""
    from dataclasses import fields

    from pipeline.config import Schema
    from pipeline.errors import closest

    texts = [str(error)] + ([str(error.__cause__)] if error.__cause__ else [])
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    unknown = lines[0].partition("Could not override '")[2].partition("'")[0]
    if unknown:
        return f"{unknown}: unknown key{closest(unknown, [f.name for f in fields(Schema)])}; --cfg job shows every key"
    noise = ("full_key:", "object_type=", "reference_type=", "Config search path", "provider=")
    kept = [line for line in lines if not line.startswith(noise)]
    return "; ".join(dict.fromkeys(kept))
