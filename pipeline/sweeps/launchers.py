"""The launchers of a sweep: those of hydra-submitit-launcher, made to outlive a job.

As they come, the first job that leaves no result ends the sweep, after 15 seconds of waiting for it; the result of a
job that takes no time is waited for a second; a local job sees no accelerator unless ``gpus_per_node`` is set, and is
ended after an hour. Here a lost job is one outcome among others, and the sweep goes on. Hydra finds them by themselves
(``.src/hydra_plugins``), and in this command ``hydra/launcher=submitit_local`` and ``submitit_slurm`` name them.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher, BasicLauncherConf
from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher import submitit_launcher as originals
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, LocalQueueConf, SlurmQueueConf
from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.command_exit import heed_signals
from offstage.pipeline.config import register
from offstage.pipeline.sweeps.search_config import register_sweepers
from offstage.pipeline.sweeps.sweep_launcher import SweepLauncher

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENDING_SECONDS = 15.0
"""How long jobs have to end after they were told to."""


def register_launchers() -> None:
    """Have ``submitit_local``, ``submitit_slurm`` and ``basic`` name these launchers; again it changes nothing.

    The sweepers go with them.
    """
    Plugins.instance()  # looking for plugins is what stores the originals' configs: from here on, these stand
    for name, config in (("Local", LocalQueueConf), ("Slurm", SlurmQueueConf)):
        node = config(_target_=f"hydra_plugins.offstage_launchers.{name}Launcher")
        ConfigStore.instance().store(group="hydra/launcher", name=f"submitit_{name.lower()}", node=node)
    in_turn = BasicLauncherConf(_target_="hydra_plugins.offstage_launchers.InTurnLauncher")
    ConfigStore.instance().store(group="hydra/launcher", name="basic", node=in_turn)
    register_sweepers()


class _Launcher(SweepLauncher, originals.BaseSubmititLauncher):  # type: ignore[misc]
    """What both have in common: submitting, waiting, and telling what came of each job."""

    _poll_seconds = 1.0

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._visible = os.environ.get(_VISIBLE)
        self._begin_sweep(hydra_context, task_function, config)
        if self._sweep is not None and self._sweep.resumed:
            self.params["submitit_folder"] = _unused(Path(self.params["submitit_folder"]))

    def __call__(self, *arguments: Any) -> tuple[JobReturn, int | None]:
        """Run one job and return what it came to and its exit code; called in the job's own process."""
        from offstage.pipeline.hydra_task import Task

        heed_signals()  # submitit passes over one that comes before the job's own process is there
        register()
        self._restore_environment()
        logging.getLogger("submitit").setLevel(logging.WARNING)  # it calls a job that failed completed
        result: JobReturn = super().__call__(*arguments)
        return result, self.task_function.outcomes[-1].code if isinstance(self.task_function, Task) else None

    def _run(self, numbered: Mapping[int, Sequence[str]]) -> dict[int, JobReturn]:
        state = Singleton.get_state()
        specs = [
            (list(overrides), "hydra.sweep.dir", number, f"job_id_for_{number}", state)
            for number, overrides in numbered.items()
        ]
        with _no_interrupts():
            jobs = self._executor().map_array(self, *zip(*specs, strict=True))
        self._began(numbered)
        numbers = dict(zip(jobs, numbered, strict=True))
        returns: dict[int, JobReturn] = {}
        try:
            for job in self._as_they_end(jobs):
                returns[numbers[job]] = self._collect(job, numbers[job], specs)
        except KeyboardInterrupt:
            self._end([job for job in jobs if numbers[job] not in returns])
            raise
        with suppress(OSError):
            Path(self.params["submitit_folder"]).rmdir()  # submitit makes a folder of that name, %j and all
        return returns

    def _executor(self) -> Any:
        """Return submitit's executor, with the parameters that ``hydra.launcher`` gives."""
        import submitit

        logging.getLogger("submitit").setLevel(logging.ERROR)  # without accounts Slurm warns at every look
        kind = self._EXECUTOR
        retries = {f"{kind}_{name}": self.params[name] for name in ("max_num_timeout",) if name in self.params}
        executor = submitit.AutoExecutor(cluster=kind, folder=self.params["submitit_folder"], **retries)
        common = set(OmegaConf.structured(BaseQueueConf).keys())
        rest = {
            name: value for name, value in self.params.items() if name not in ("max_num_timeout", "submitit_folder")
        }
        executor.update_parameters(
            **{name if name in common else f"{kind}_{name}": value for name, value in rest.items()}
        )
        return executor

    def _as_they_end(self, jobs: Sequence[Any]) -> Iterator[Any]:
        waiting = list(jobs)
        while waiting:
            ended = [job for job in waiting if self._has_ended(job)]
            yield from ended
            waiting = [job for job in waiting if job not in ended]
            if waiting:
                time.sleep(self._poll_seconds)
                if self._progress is not None:
                    self._progress.refresh()

    def _collect(self, job: Any, number: int, specs: Sequence[Any]) -> JobReturn:
        """Return the result of a job that has ended, and note its outcome."""
        import submitit

        from offstage.pipeline.hydra_task import Outcome, Task

        code: int | None = None
        overrides = next(spec[0] for spec in specs if spec[2] == number)
        result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=math.nan)
        errors = (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError)
        if not self._is_lost(job):
            with suppress(*errors):
                result, code = job.results()[0]
        if isinstance(self.task_function, Task):
            self.task_function.outcomes.append(Outcome(number, overrides, code))
        self._ended(number)
        return result

    def _end(self, jobs: Sequence[Any]) -> None:
        """Have every job that still runs end, and wait until its record says so."""
        for job in jobs:
            if not self._has_ended(job):
                self._cancel(job)
        deadline = time.monotonic() + _ENDING_SECONDS
        while time.monotonic() < deadline and not all(self._has_ended(job) for job in jobs):
            time.sleep(0.1)

    def _restore_environment(self) -> None:
        """Undo what the launcher changed in the job's environment."""

    def _has_ended(self, job: Any) -> bool:
        return bool(job.done())

    def _is_lost(self, job: Any) -> bool:
        """Whether a job that has ended left no result, and none is on its way."""
        return not job.paths.result_pickle.exists()

    def _cancel(self, job: Any) -> None:
        job.cancel(check=False)


class LocalJobLauncher(_Launcher, originals.LocalLauncher):  # type: ignore[misc]
    """Jobs on this machine. submitit's process of a job ends when the job has."""

    _poll_seconds = 0.05

    def __call__(self, *arguments: Any) -> tuple[JobReturn, int | None]:
        """Run one job; a terminal's Ctrl-C doesn't reach it, now that it heeds signals: the sweep tells it."""
        os.setpgid(0, 0)
        return super().__call__(*arguments)

    def _run(self, numbered: Mapping[int, Sequence[str]]) -> dict[int, JobReturn]:
        self._prepare_machine(numbered)
        return super()._run(numbered)

    def _restore_environment(self) -> None:
        """Let the job see the accelerators that the sweep sees: submitit hides all that ``gpus_per_node`` omits."""
        if self.params.get("gpus_per_node") is not None:
            return
        os.environ.pop(_VISIBLE, None)
        if self._visible is not None:
            os.environ[_VISIBLE] = self._visible

    def _cancel(self, job: Any) -> None:
        """Tell submitit's process, which passes SIGTERM on; its own way, SIGINT, leaves the job one second."""
        with suppress(ProcessLookupError):
            os.kill(int(job.job_id), signal.SIGTERM)


class SlurmJobLauncher(_Launcher, originals.SlurmLauncher):  # type: ignore[misc]
    """Jobs of a cluster. Where Slurm keeps no accounts, ``squeue`` says whether a job is still there."""

    _absent_after_seconds = 30.0

    def _has_ended(self, job: Any) -> bool:
        return super()._has_ended(job) or self._is_lost(job)

    def _is_lost(self, job: Any) -> bool:
        """A job is lost when the queue hasn't known it for a while and its result isn't there."""
        if job.paths.result_pickle.exists() or _is_queued(job.job_id):
            self._absent_since().pop(job.job_id, None)
            return False
        since = self._absent_since().setdefault(job.job_id, time.monotonic())
        return time.monotonic() - since > self._absent_after_seconds

    def _absent_since(self) -> dict[str, float]:
        absent: dict[str, float] = self.__dict__.setdefault("_absent", {})
        return absent


class InTurnJobLauncher(SweepLauncher, BasicLauncher):
    """Hydra's own launcher, whose jobs run in turn: each has a process that this one waits for (``job_process``)."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what is common to all jobs. Raises all that is wrong with them."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._begin_sweep(hydra_context, task_function, config)

    def _run(self, numbered: Mapping[int, Sequence[str]]) -> dict[int, JobReturn]:
        self._prepare_machine(numbered)
        returns: dict[int, JobReturn] = {}
        for number, overrides in numbered.items():
            self._began({number: overrides})
            (returns[number],) = BasicLauncher.launch(self, [overrides], number)
            self._ended(number)
        return returns


def _unused(submitit_folder: Path) -> str:
    """Return a folder like ``submitit_folder``, whose last part submitit fills in, in which nothing lies.

    A job is known by the number of its process there, which another job may have had before; and what lies there as a
    result is a pickle.
    """
    above = submitit_folder.parent
    free = next(name for number in count(1) if not (name := above / f"resumed-{number}").exists())
    return str(free / submitit_folder.name)


def _is_queued(job_id: str) -> bool:
    squeue = shutil.which("squeue")
    if squeue is None:
        return True
    done = subprocess.run([squeue, "-h", "-j", job_id], capture_output=True, text=True, check=False)
    return bool(done.stdout.strip())


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Start processes that a terminal's Ctrl-C doesn't reach: this one tells them, once, and in order.

    The current folder stays out of their import path: it may hold a folder named conf or stages.
    """
    was_said = "PYTHONSAFEPATH" in os.environ
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if not was_said:
            del os.environ["PYTHONSAFEPATH"]
