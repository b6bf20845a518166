"""The command ``offstage``: Hydra composes a config, one run comes out, or with ``-m`` a sweep.

Hydra prints its own errors over several lines and exits 1; here every error that a user can mend is one line per
fault, with the exit code of its class. ``HYDRA_FULL_ERROR=1`` shows tracebacks instead.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from offstage.pipeline.command_exit import discard_output, run_command
from offstage.pipeline.peers import excuse_this, own_rank, started_together

if TYPE_CHECKING:
    from offstage.pipeline.sweeps.record import SweepRecord


def main(arguments: Sequence[str] | None = None, *, resumed: SweepRecord | None = None) -> NoReturn:
    """Run the command with ``arguments`` (default: the process's own), then exit with its code.

    Where they are those of a sweep that is ``resumed``, its config files must be as they were when it began.
    """
    started = time.perf_counter()
    sys.argv[1:] = sys.argv[1:] if arguments is None else arguments
    run_command("offstage", partial(_compose_and_run, started, resumed), tell=excuse_this)


def prepare_arguments(arguments: Sequence[str]) -> list[str]:
    """Return the command line that Hydra is to see.

    ``model.path=…`` alone selects ``model=pretrained``: who names a checkpoint does not want the embedded model's
    small budgets. Processes that torchrun started are the hosts of one run.
    """
    given = list(arguments)
    names_path = any(argument.startswith("model.path=") for argument in given)
    chooses = any(argument.startswith(("model=", "experiment=", "--config-name", "-cn")) for argument in given)
    given += ["model=pretrained"] if names_path and not chooses else []
    says_hosts = any(argument.lstrip("+").startswith("hardware.hosts=") for argument in given)
    return [*given, "hardware.hosts=auto"] if started_together() > 1 and not says_hosts else given


def _compose_and_run(started: float, resumed: SweepRecord | None) -> int:
    """Let Hydra compose the config and run each job; return the exit code: the first job's that failed, else 0."""
    import hydra

    from offstage.pipeline.config import choose_stages, register
    from offstage.pipeline.errors import ConfigError, named
    from offstage.pipeline.hydra_arguments import gather_overrides, refuse_arguments
    from offstage.pipeline.hydra_composing import composed_once, noted_files
    from offstage.pipeline.hydra_messages import composing
    from offstage.pipeline.hydra_task import Task
    from offstage.pipeline.sweeps.sweep_keys import register_sweeps

    if own_rank():
        discard_output()  # the first host shows what all come to
    sys.argv[1:] = gather_overrides(prepare_arguments(sys.argv[1:]))
    task = Task(started, tuple(sys.argv[1:]), resumed)
    register_sweeps()

    with composing():
        refuse_arguments(sys.argv[1:])
        if started_together() > 1 and not {"-m", "--multirun"}.isdisjoint(sys.argv[1:]):
            raise ConfigError("hardware.hosts: a sweep isn't started by torchrun; start each of its runs so")
        register()
        sys.argv[1:] = [choose_stages(argument) for argument in sys.argv[1:]]
        with (
            noted_files(task.files),
            composed_once(task.refuse_changed),
            named(Path("the run's folder")),
        ):  # what Hydra keeps there it writes without naming it in an error
            hydra.main(config_path="pkg://offstage.conf", config_name="config", version_base="1.3")(task)()
    return task.code
