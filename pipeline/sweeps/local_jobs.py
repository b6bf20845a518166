"""Jobs on this machine, each in a process of its own, so many at a time: one, unless it is said otherwise.

What all go by and is measured of the machine is measured once, before the first of them begins: a job that measures
while others start, or compute, finds a slower machine than there is, and every plan after it would be made for that
one.
"""

from __future__ import annotations

import json
import multiprocessing
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from hydra.core.utils import configure_log
from omegaconf import DictConfig

from offstage.pipeline.config import check
from offstage.pipeline.environment import allowed_cores
from offstage.pipeline.errors import OffstageError
from offstage.pipeline.installed_stages import installed_stages
from offstage.pipeline.job_process import PassedSignals, wait_for_any
from offstage.pipeline.runner import load_stages
from offstage.pipeline.stage import Config
from offstage.pipeline.sweeps.job_run import LOOK_SECONDS, SCREEN, PreparedJob, StartedJob, is_debugging
from offstage.pipeline.sweeps.progress import SweepProgress

_PLAN_ALONE, _PLAN_BYTES = ("empty_init", "plan"), 2 * 10**9
"""The stages that compute nothing, and what a process may take for them: a large model's plan takes less."""
_WHERE = ("model", "hardware", "stages", "outputs")
"""The keys that say which checkpoint and machine a job is about."""
Ended = Callable[[PreparedJob, int | None], None]


class LocalJobs:
    """Runs the jobs of the sweep with this ``config``."""

    def __init__(self, config: DictConfig) -> None:
        self._hydra = config.hydra
        self._preparation = MachinePreparation()

    def run(self, jobs: Sequence[PreparedJob], progress: SweepProgress, ended: Ended) -> None:
        """Run ``jobs``, and say of each how it ended; what all go by is measured of the idle machine before.

        Whoever interrupts a sweep doesn't mean the one job alone that was at work: none begins any more.
        """
        self._preparation.prepare([job.config for job in jobs])
        with PassedSignals() as signals:
            self._run(deque(jobs), signals, progress, ended)
        if signals.came:
            raise KeyboardInterrupt

    def _run(self, waiting: deque[PreparedJob], signals: PassedSignals, progress: SweepProgress, ended: Ended) -> None:
        at_once, at_work = min(self._at_once(waiting), len(waiting)), list[StartedJob]()
        try:
            while at_work or (waiting and not signals.came):
                if waiting and len(at_work) < at_once and not signals.came:
                    job = waiting.popleft()
                    progress.begin([job.known.number])
                    at_work.append(self._start(job, signals, beside=at_once - 1))
                else:
                    self._wait(at_work)
                    progress.refresh()
                for each in [each for each in at_work if each.code is not None]:
                    at_work.remove(each)
                    ended(each.job, each.code)
                if signals.came:  # who waits for another's job needn't any more
                    at_work = [each for each in at_work if each.processes]
        finally:
            _end(at_work, signals)

    def _start(self, job: PreparedJob, signals: PassedSignals, *, beside: int) -> StartedJob:
        job.write_files()
        screen = Path(job.folder, SCREEN)
        started = StartedJob(job, signals, debug=is_debugging(), output=screen, beside=beside)
        self._log_here()
        return started

    def _wait(self, at_work: Collection[StartedJob]) -> None:
        """Wait until one of them has something to do, for a moment at most, and have them do it."""
        wait_for_any([process for each in at_work for process in each.processes], LOOK_SECONDS)
        for each in at_work:
            each.go_on()
        self._log_here()

    def _log_here(self) -> None:
        """Log what the sweep says itself: what was said of a job has gone to its folder."""
        configure_log(self._hydra.hydra_logging, self._hydra.verbose)

    def _at_once(self, jobs: Collection[PreparedJob]) -> int:
        """Return how many jobs are at work at a time: plans have no seconds to compare, and take little memory."""
        given: int | None = self._hydra.launcher.n_jobs
        if given is not None:
            return given
        stages = [job.config.get("stages") for job in jobs]
        if not all(isinstance(names, list) and names and names[-1] in _PLAN_ALONE for names in stages):
            return 1
        return max(1, min(len(allowed_cores()), psutil.virtual_memory().available // _PLAN_BYTES))


def _end(jobs: Collection[StartedJob], signals: PassedSignals) -> None:
    """Have ``jobs`` end, where any are left, and their records say so."""
    if jobs and not signals.came:
        signals.end()
    for job in jobs:
        for process in job.processes:
            process.wait()
            job.go_on()


class MachinePreparation:
    """Has what the stages of a sweep's jobs measure of this machine measured, and kept in their cache.

    Jobs that are about one checkpoint and machine need one look. It is taken in a process that is forked for it where
    that can be: what a probe imports, and what an accelerator's driver holds, ends with it. What can't be measured, or
    is wrong with a job, the job says itself.
    """

    def __init__(self) -> None:
        self._done: set[str] = set()

    def prepare(self, configs: Iterable[Config]) -> None:
        """Look at the jobs with these ``configs``; an empty one is faulty."""
        new = self.unlike(configs)
        if new and "fork" in multiprocessing.get_all_start_methods():
            process = multiprocessing.get_context("fork").Process(target=_prepare, args=(new,))
            process.start()
            process.join()
        elif new:
            _prepare(new)

    def unlike(self, configs: Iterable[Config]) -> list[Config]:
        """Return one config of each checkpoint and machine that no job before was about."""
        about = {json.dumps([config.get(key) for key in _WHERE], default=str): config for config in configs if config}
        new = [config for words, config in about.items() if words not in self._done]
        self._done |= set(about)
        return new


def _prepare(configs: Sequence[Config]) -> None:
    for config in configs:
        with suppress(OffstageError, OSError):
            _prepare_for(config)


def _prepare_for(config: Config) -> None:
    """Have the stages of a job measure what they need; of a faulty one nothing is measured."""
    if list(check(config, list(installed_stages()))):
        return
    stages = load_stages(config)
    if any(fault for stage in stages for fault in stage.check(config)):
        return
    for stage in stages:
        if hasattr(stage, "prepare_machine"):
            stage.prepare_machine(config, Path(config["outputs"]) / "cache")
