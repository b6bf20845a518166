"""One job of a sweep, from its folder to its end: started by the sweep itself, or in a process beside others.

Nothing is composed again. A process beside others, on a node of a queue or here, reads its job from a file in the job's
folder, which the sweep wrote there, and leaves its exit code beside it; what came of it the record says.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
from collections.abc import Callable, Mapping
from contextlib import chdir, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import env_override

from offstage.pipeline.atomic_files import mendable, replace_file
from offstage.pipeline.command_exit import INTERRUPTED, last_resort, run_command
from offstage.pipeline.decoding import decode
from offstage.pipeline.environment import environment
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_messages import composing
from offstage.pipeline.hydra_task import run_tracked
from offstage.pipeline.job import configure_log
from offstage.pipeline.job_folder import JobFolder, completed
from offstage.pipeline.job_process import PassedSignals, supervise
from offstage.pipeline.objective import require_numbers
from offstage.pipeline.peers import own_rank
from offstage.pipeline.process_setup import die_with_parent, own_command
from offstage.pipeline.record import HOSTS, RunRecord
from offstage.pipeline.stage import Config

SCREEN = "screen.log"
"""What a job that the sweep starts itself would have shown on a screen of its own."""
ENDING_SECONDS = 15.0
"""How long jobs beside each other have to end after they were told to."""
_QUEUED, _EXIT = ".job.json", ".job.exit"
"""What a queue's process starts from, and the exit code that it leaves at its end."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """All that a job needs: its ``folder``, that of its ``sweep``, and its ``config``, resolved.

    ``fault`` is what is wrong with the config, empty where nothing is; ``logging`` what the job logs, as
    ``logging.config`` takes it; ``variables`` are added to its environment; with ``is_current`` its folder is the
    current one. At most so many others are at work ``beside`` it.
    """

    number: int
    overrides: tuple[str, ...]
    sweep: str
    folder: str
    config: Config
    fault: str
    logging: Any
    variables: Mapping[str, str]
    is_current: bool
    beside: int = 0

    def queue(self) -> None:
        """Write the job to its folder, for the process that a queue starts."""
        with mendable(Path(self.folder)):
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            replace_file(Path(self.folder, _QUEUED), json.dumps(asdict(self)))

    @classmethod
    def of_queue(cls, folder: Path) -> PreparedJob:
        """Return the job that was queued in ``folder``."""
        return decode(cls, json.loads(folder.joinpath(_QUEUED).read_text()))

    def exit_code(self) -> int | None:
        """Return the exit code that the job left when it ran last in a queue, null where there is none."""
        try:
            return int(Path(self.folder, _EXIT).read_text())
        except (OSError, ValueError):
            return None

    def of_host(self, rank: int) -> PreparedJob:
        """Return the job as host ``rank`` of those that run it together has it: all but the first have a folder each.

        It is another one each time that the queue begins the job.
        """
        attempt = "-".join(os.environ.get(name, "0") for name in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT"))
        folder = Path(self.folder, HOSTS, f"{attempt}-{rank}")
        return replace(self, folder=str(folder), logging=None) if rank else self

    def run_queued(self, *, debug: bool) -> int:
        """Run the job and return its exit code, which is left in the folder too; that of an earlier run goes before."""
        if own_rank() and completed(Path(self.folder), self.overrides):
            return 0
        return self.of_host(own_rank())._run_queued(debug=debug)

    def _run_queued(self, *, debug: bool) -> int:
        code, left = INTERRUPTED, Path(self.folder, _EXIT)
        left.unlink(missing_ok=True)
        try:
            code = run_job(self, debug=debug).exit_code
        finally:
            with mendable(Path(self.folder)):
                replace_file(left, f"{code}\n")
        return code


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How a job ended: its exit ``code``, null where its process was lost; whether a signal to its sweep ended it."""

    code: int | None
    interrupted: bool = False

    @property
    def exit_code(self) -> int:
        """The code that the sweep exits with where this job is the first that didn't end well."""
        return 1 if self.code is None else self.code


def run_job(
    job: PreparedJob, *, debug: bool, output: Path | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> JobEnd:  # fmt: skip
    """Run ``job`` in a process of its own, unless it completed before, and return how it ended.

    What a user can mend is printed. ``output`` is the file for what
    its process prints, null where it prints where this one does; ``meanwhile`` is called now and then as it works.
    """
    signals = PassedSignals()

    def run() -> int:
        with composing():
            return _run(job, signals, debug=debug, output=output, meanwhile=meanwhile)

    code = last_resort(run)
    return JobEnd(code, interrupted=bool(signals.came))


def _run(job: PreparedJob, signals: PassedSignals, *, debug: bool, **options: Any) -> int:
    lies = Path(job.folder)
    with JobFolder(lies) as folder, env_override(dict(job.variables)):
        configure_log(lies, chosen=job.logging, debug=debug)
        done = folder.has_completed(job.overrides)
        code = 0 if done else _record_run(job, lock=folder.lock, signals=signals, **options)
    if code == 0:
        require_numbers(RunRecord.load(lies).run)
    return code


def _record_run(job: PreparedJob, **options: Any) -> int:
    with chdir(job.folder) if job.is_current else nullcontext():
        record = RunRecord.start(
            Path(job.folder),
            overrides=job.overrides,
            config=job.config,
            environment=environment(jobs_beside=job.beside),
        )

        def carry_out() -> int:
            if job.fault:
                raise ConfigError(job.fault)
            logged = ["--logging", json.dumps(job.logging)]
            capped = record.config["enforce_memory"] is True
            return supervise(record, capped=capped, options=logged, **options)

        return run_tracked(record, carry_out, sweep=Path(job.sweep))


def main() -> None:
    """Run the job that was queued in the folder that the first argument names, then exit with its code."""
    parser = argparse.ArgumentParser(prog="offstage-queued-job", description="Runs a job that was queued.")
    parser.add_argument("folder", type=Path, help="the job's folder")
    parser.add_argument("--debug", action="store_true", help="log everything")
    parser.add_argument("--parent", type=int, help="end with this process, which started this one")
    given = parser.parse_args()
    if given.parent is not None:
        die_with_parent(given.parent)
    run_command("offstage", lambda: PreparedJob.of_queue(given.folder).run_queued(debug=given.debug))


def queued_command(job: PreparedJob, *, child: bool = False) -> list[str]:
    """Write ``job`` to its folder, and return the command of a process that runs it; see ``main``."""
    job.queue()
    flags = ["--debug"] * is_debugging() + ["--parent", str(os.getpid())] * child
    return own_command("queued_job", job.folder, *flags)


def is_debugging() -> bool:
    """Return whether everything is logged (``hydra.verbose``), which a job does too then."""
    return logging.getLogger().isEnabledFor(logging.DEBUG)
