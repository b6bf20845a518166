"""Jobs on this machine, each in a process of its own that the sweep waits for: one after another, or side by side.

What all go by and is measured of the machine is measured once, before the first of them begins: a job that measures
while others start, or compute, finds a slower machine than there is, and every plan after it would be made for that
one.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from hydra.core.utils import configure_log
from omegaconf import DictConfig

from offstage.pipeline.config import check
from offstage.pipeline.environment import allowed_cores
from offstage.pipeline.errors import OffstageError
from offstage.pipeline.installed_stages import installed_stages
from offstage.pipeline.runner import load_stages
from offstage.pipeline.stage import Config
from offstage.pipeline.sweeps.job_run import ENDING_SECONDS, SCREEN, JobEnd, is_debugging, queued_command, run_job
from offstage.pipeline.sweeps.jobs import ComposedJob
from offstage.pipeline.sweeps.progress import SweepProgress

_POLL_SECONDS = 0.1
_PLAN_ALONE, _PLAN_BYTES = ("empty_init", "plan"), 2 * 10**9
"""The stages that compute nothing, and what a process may take for them: a large model's plan takes less."""
_WHERE = ("model", "hardware", "stages", "outputs")
"""The keys that say which checkpoint and machine a job is about."""
Ended = Callable[[ComposedJob, JobEnd], None]
Processes = dict["subprocess.Popen[bytes]", ComposedJob]


class LocalJobs:
    """Runs the jobs of the sweep with this ``config``."""

    def __init__(self, config: DictConfig) -> None:
        self._hydra = config.hydra
        self._preparation = MachinePreparation()

    def run(self, jobs: Sequence[ComposedJob], progress: SweepProgress, ended: Ended) -> None:
        """Run ``jobs``, and say of each how it ended; what all go by is measured of the idle machine before."""
        self._preparation.prepare([job.prepared.config for job in jobs])
        at_once = min(self._at_once(jobs), len(jobs))
        if at_once > 1:
            self._run_side_by_side(jobs, at_once, progress, ended)
        else:
            self._run_in_turn(jobs, progress, ended)

    def _at_once(self, jobs: Sequence[ComposedJob]) -> int:
        """Return how many jobs are at work at a time: plans have no seconds to compare, and take little memory."""
        given: int | None = self._hydra.launcher.n_jobs
        if given is not None:
            return given
        stages = [job.prepared.config.get("stages") for job in jobs]
        if not all(isinstance(names, list) and names and names[-1] in _PLAN_ALONE for names in stages):
            return 1
        return max(1, min(len(allowed_cores()), psutil.virtual_memory().available // _PLAN_BYTES))

    def _run_in_turn(self, jobs: Sequence[ComposedJob], progress: SweepProgress, ended: Ended) -> None:
        meanwhile = progress.refresh if sys.stderr.isatty() else None
        for job in jobs:
            progress.begin([job.known.number])
            job.write_files()
            screen = Path(job.prepared.folder, SCREEN)
            how = run_job(job.prepared, debug=is_debugging(), output=screen, meanwhile=meanwhile)
            configure_log(self._hydra.hydra_logging, self._hydra.verbose)  # the job's has gone to its folder
            ended(job, how)

    def _run_side_by_side(
        self, jobs: Sequence[ComposedJob], at_once: int, progress: SweepProgress, ended: Ended
    ) -> None:
        waiting, at_work = deque(jobs), Processes()
        try:
            while waiting or at_work:
                while waiting and len(at_work) < at_once:
                    job = waiting.popleft()
                    at_work[self._start(job, beside=at_once - 1)] = job
                    progress.begin([job.known.number])
                time.sleep(_POLL_SECONDS)
                progress.refresh()
                for process in [each for each in at_work if each.poll() is not None]:
                    job = at_work.pop(process)
                    ended(job, JobEnd(job.prepared.exit_code()))
        finally:
            _end(at_work)

    def _start(self, job: ComposedJob, *, beside: int) -> subprocess.Popen[bytes]:
        job.write_files()
        prepared = replace(job.prepared, beside=beside)
        command = queued_command(prepared, child=True)
        with Path(prepared.folder, SCREEN).open("ab") as screen:
            # In a group of its own: a terminal's Ctrl-C reaches it by way of the sweep, once.
            return subprocess.Popen(
                command, process_group=0, stdin=subprocess.DEVNULL, stdout=screen, stderr=screen
            )  # fmt: skip


def _end(processes: Collection[subprocess.Popen[bytes]]) -> None:
    """Have ``processes`` end, and their records say so: first they are asked to."""
    for process in processes:
        process.send_signal(signal.SIGINT)
    deadline = time.monotonic() + ENDING_SECONDS
    for process in processes:
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


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
