"""One job of the command: a composed config in; a run folder with a record out."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.command_exit import last_resort
from offstage.pipeline.config import refuse_sharing, resolve
from offstage.pipeline.environment import environment
from offstage.pipeline.hydra_arguments import refuse_launcher
from offstage.pipeline.hydra_errors import guarded_composing
from offstage.pipeline.job import perform
from offstage.pipeline.job_folder import JobFolder
from offstage.pipeline.objective import number_of
from offstage.pipeline.record import RunRecord, never_left_running
from offstage.pipeline.tracking.options import usable_tracker

if TYPE_CHECKING:
    from offstage.pipeline.sweeps.sweep import Sweep
    from offstage.pipeline.trust import Trust


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one job ended: its exit code, null where its process was lost, and the overrides that are its own."""

    number: int
    overrides: Sequence[str]
    code: int | None


@dataclass(slots=True)
class Task:
    """What Hydra calls with each composed config. A sweep sends copies of it to other processes.

    ``command`` are the arguments that it was given; ``trust`` is what these may do, null where their author gave them:
    anything; ``sweep`` is null for a single run, and for a job's copy, which only runs that;
    ``files`` are the config files that it is made of, by their digests;
    ``outcomes`` are those of the jobs so far; ``conclusion`` what a search came to, in words.
    """

    started: float
    show_all: bool = False
    command: Sequence[str] = ()
    trust: Trust | None = None
    sweep: Sweep | None = None
    files: dict[str, str] = field(default_factory=dict)
    outcomes: list[Outcome] = field(default_factory=list)
    conclusion: str = ""
    _number: float | None = None
    _interrupted: bool = False

    @property
    def code(self) -> int:
        """The exit code of the first job that didn't end well, 0 if all did."""
        codes = (1 if outcome.code is None else outcome.code for outcome in self.outcomes)
        return next((code for code in codes if code), 0)

    def __reduce__(self) -> tuple[type[Task], tuple[float, bool]]:
        return Task, (self.started, self.show_all)

    def __call__(self, config: DictConfig) -> float | None:
        """Run one job and return the number that its config names as its objective, null where it names none.

        That is what a sweeper goes by that searches: nan says that the job came to none, or not within its limits.
        What a user can mend is printed, not raised; how the job ended is the last of ``outcomes``.
        """
        hydra = HydraConfig.get()
        apart = hydra.mode == RunMode.MULTIRUN
        if apart:
            refuse_launcher(hydra.launcher._target_)
        self._number = math.nan
        started = time.perf_counter() if apart else self.started
        code = last_resort(
            lambda: guarded_composing(lambda: self._run(config, started, apart=apart), show_all=self.show_all),
            show_all=self.show_all,
        )
        self.outcomes.append(Outcome(int(hydra.job.num) if apart else 0, hydra.overrides.task, code))
        if self._interrupted and self.sweep is not None:
            raise KeyboardInterrupt  # whoever interrupts a sweep doesn't mean the one job that was at work
        return self._number

    def _run(self, config: DictConfig, started: float, *, apart: bool) -> int:
        hydra = HydraConfig.get()
        lies = Path(hydra.runtime.output_dir)
        if not apart:
            code = self._record_run(config, started)
        else:
            with JobFolder(lies) as folder:
                done = folder.has_completed([str(override) for override in hydra.overrides.task])
                code = 0 if done else self._record_run(config, started, folder)
        if code == 0:
            self._number = number_of(RunRecord.load(lies).data)
        return code

    def _record_run(self, config: DictConfig, started: float, folder: JobFolder | None = None) -> int:
        record = start_record(config)
        sweep = sweep_folder() if folder is not None else None
        with never_left_running(record):
            if usable_tracker(record.config) is None:
                return self._carry_out(record, started, folder)
            from offstage.pipeline.tracking.trackers import require_tracker, track

            require_tracker(record.config, sweep=sweep)
            try:
                return self._carry_out(record, started, folder)
            finally:
                track(record.config, record.path.parent, sweep=sweep)

    def _carry_out(self, record: RunRecord, started: float, folder: JobFolder | None) -> int:
        capped = record.config["enforce_memory"] is True
        if folder is None and not capped:
            return perform(record, started=started)
        from offstage.pipeline.job_process import PassedSignals, supervise

        options, signals = ["--logging", job_logging()], PassedSignals()
        if folder is None:
            return supervise(record, capped=capped, options=options, show_all=self.show_all)
        try:
            return supervise(
                record, capped=capped, options=options, show_all=self.show_all, lock=folder.lock, signals=signals
            )
        finally:
            self._interrupted = bool(signals.came)


def sweep_folder() -> Path:
    """Return the folder of the sweep that the job at work belongs to."""
    hydra = HydraConfig.get()
    return Path(hydra.runtime.cwd, hydra.sweep.dir)


def job_logging() -> str:
    """Return what Hydra was told to log of a job, as JSON: the process that it runs in logs the same."""
    return json.dumps(OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True))


def start_record(config: DictConfig) -> RunRecord:
    """Return the record of a run that begins now, in Hydra's folder for it, its config resolved.

    Raises what is wrong with the config, after the record says so.
    """
    hydra = HydraConfig.get()
    record = RunRecord.start(
        Path(hydra.runtime.output_dir),
        overrides=[str(override) for override in hydra.overrides.task],
        config={},
        environment=environment(),
    )
    with never_left_running(record), mendable():
        if hydra.mode == RunMode.MULTIRUN:
            refuse_sharing(config)
        with chdir(hydra.runtime.cwd):  # with hydra.job.chdir the current folder is the run's; paths aren't meant so
            record.config = resolve(config)
    return record
