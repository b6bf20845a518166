"""One job of a sweep, from its folder to its end: started by the sweep itself, or on a node of a queue.

Nothing is composed again. What a queue starts reads its job from a file in the job's folder, which the sweep wrote
there, and leaves its exit code beside it; what came of it the record says.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
from collections.abc import Generator, Iterator, Mapping
from contextlib import chdir, nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import env_override
from omegaconf import OmegaConf

from offstage.pipeline.atomic_files import mendable, replace_file
from offstage.pipeline.command_exit import INTERRUPTED, last_resort, run_command
from offstage.pipeline.decoding import decode
from offstage.pipeline.environment import environment
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_messages import composing
from offstage.pipeline.hydra_task import tracked
from offstage.pipeline.job import configure_log
from offstage.pipeline.job_folder import JobFolder, completed
from offstage.pipeline.job_process import JobProcess, PassedSignals, wait_for_any
from offstage.pipeline.objective import require_numbers
from offstage.pipeline.peers import excuse_this, own_rank
from offstage.pipeline.process_setup import own_command
from offstage.pipeline.record import HOSTS, RunRecord
from offstage.pipeline.stage import Config
from offstage.pipeline.sweeps.record import SweepJob

SCREEN = "screen.log"
"""What a job that the sweep starts itself would have shown on a screen of its own."""
LOOK_SECONDS = 1.0
"""How long nobody looks, at most, what became of a job."""
_QUEUED, _EXIT = ".job.json", ".job.exit"
"""What a queue's process starts from, and the exit code that it leaves at its end."""


@dataclass(frozen=True, slots=True)
class PreparedJob:
    """A job as the sweep's record has it (``known``), and all that it needs: its ``folder``, and that of its ``sweep``,
    and its ``config``, resolved.

    ``fault`` is what is wrong with the config, empty where nothing is; ``logging`` what the job logs, as
    ``logging.config`` takes it; ``variables`` are added to its environment; with ``is_current`` its folder is the
    current one. ``files`` are Hydra's own of the job, by where they lie.
    """

    known: SweepJob
    sweep: str
    folder: str
    config: Config
    fault: str
    logging: Any
    variables: Mapping[str, str]
    is_current: bool
    files: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def write_files(self) -> None:
        """Write what Hydra leaves of a job in its folder: its config, Hydra's own, and the overrides."""
        for path, content in self.files.items():
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            Path(path).write_text(OmegaConf.to_yaml(content), encoding="utf-8")

    def queue(self) -> None:
        """Write the job to its folder, for the process that a queue starts."""
        self.write_files()
        with mendable(Path(self.folder)):
            Path(self.folder).mkdir(parents=True, exist_ok=True)
            replace_file(Path(self.folder, _QUEUED), json.dumps(asdict(replace(self, files={}))))

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
        if own_rank() and completed(Path(self.folder), self.known.overrides):
            return 0
        return self.of_host(own_rank())._run_queued(debug=debug)

    def _run_queued(self, *, debug: bool) -> int:
        code, left = INTERRUPTED, Path(self.folder, _EXIT)
        left.unlink(missing_ok=True)
        try:
            code = run_job(self, debug=debug)
        finally:
            with mendable(Path(self.folder)):
                replace_file(left, f"{code}\n")
        return code


class StartedJob:
    """A ``job`` that was begun, unless it completed before, and its ``process`` once there is one.

    What a user can mend is printed. ``signals`` are those that come to this process; ``output`` is the file for what
    the job's prints, null where it prints where this one does; at most so many others are at work ``beside`` it.
    """

    def __init__(
        self, job: PreparedJob, signals: PassedSignals, *, debug: bool, output: Path | None = None, beside: int = 0
    ) -> None:
        self.job, self._signals, self._output, self._beside = job, signals, output, beside
        self.process: subprocess.Popen[bytes] | None = None
        self.code: int | None = None
        """The exit code, null until the job is over."""
        self._steps = self._work(debug=debug)
        self.go_on()

    @property
    def processes(self) -> list[subprocess.Popen[bytes]]:
        """What it waits for: nothing, where that is somebody else who works in its folder."""
        return [] if self.process is None else [self.process]

    def go_on(self) -> None:
        """Do what can be done without waiting: where that is the last of it, the job has its ``code``."""

        def step() -> int:
            with env_override(dict(self.job.variables)):
                next(self._steps, None)
            return 0

        self.code = last_resort(step) or self.code

    def _work(self, *, debug: bool) -> Iterator[None]:
        """Yield while there is something to wait for."""
        job, lies = self.job, Path(self.job.folder)
        with JobFolder(lies) as folder:
            while not folder.taken():
                yield
            self._configure_log(lies, debug=debug)
            if folder.has_completed(job.known.overrides):
                code = 0
            else:
                code = yield from self._run(folder.lock, debug=debug)
        if code == 0:
            require_numbers(RunRecord.load(lies).run)
        self.code = code

    def _configure_log(self, folder: Path, *, debug: bool) -> None:
        with composing():
            configure_log(folder, chosen=self.job.logging, debug=debug)

    def _run(self, lock: int | None, *, debug: bool) -> Generator[None, None, int]:
        job, here = self.job, chdir(self.job.folder) if self.job.is_current else nullcontext()
        with here:
            record = RunRecord.start(
                Path(job.folder),
                overrides=job.known.overrides,
                config=job.config,
                environment=environment(jobs_beside=self._beside),
            )
        with tracked(record, sweep=Path(job.sweep)):
            if job.fault:
                raise ConfigError(job.fault)
            logged = ["--logging", json.dumps(job.logging)]
            capped = record.config["enforce_memory"] is True
            with here:
                at_work = JobProcess(
                    record, self._signals, capped=capped, options=logged, lock=lock, output=self._output
                )
            self.process = at_work.process
            while self.process.poll() is None:
                yield
            self._configure_log(record.path.parent, debug=debug)
            return at_work.settle()


def run_job(job: PreparedJob, *, debug: bool) -> int:
    """Run ``job`` in a process of its own, unless it completed before, and return its exit code."""
    with PassedSignals() as signals:
        started = StartedJob(job, signals, debug=debug)
        while started.code is None:
            if signals.came and started.process is None:
                raise KeyboardInterrupt
            wait_for_any(started.processes, LOOK_SECONDS)
            started.go_on()
    return started.code


def main() -> None:
    """Run the job that was queued in the folder that the first argument names, then exit with its code."""
    parser = argparse.ArgumentParser(prog="offstage-queued-job", description="Runs a job that was queued.")
    parser.add_argument("folder", type=Path, help="the job's folder")
    parser.add_argument("--debug", action="store_true", help="log everything")
    given = parser.parse_args()
    queued = PreparedJob.of_queue
    run_command("offstage", lambda: queued(given.folder).run_queued(debug=given.debug), tell=excuse_this)


def queued_command(job: PreparedJob) -> list[str]:
    """Write ``job`` to its folder, and return the command of a process that runs it; see ``main``."""
    job.queue()
    return own_command("queued_job", job.folder, *["--debug"] * is_debugging())


def is_debugging() -> bool:
    """Return whether everything is logged (``hydra.verbose``), which a job does too then."""
    return logging.getLogger().isEnabledFor(logging.DEBUG)
