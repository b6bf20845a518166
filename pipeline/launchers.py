"""The launchers of a sweep: those of hydra-submitit-launcher, made to outlive a job.

As they come, the first job that leaves no result ends the sweep, after 15 seconds of waiting for it; the result of a
job that takes no time is waited for a second; a local job sees no accelerator unless ``gpus_per_node`` is set, and is
ended after an hour. Here a lost job is one outcome among others, and the sweep goes on. Hydra finds them by themselves
(``pipeline/plugins``), and in this command ``hydra/launcher=submitit_local`` and ``submitit_slurm`` name them.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher, BasicLauncherConf
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper, BasicSweeperConf
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from hydra_plugins.hydra_submitit_launcher import submitit_launcher as originals
from hydra_plugins.hydra_submitit_launcher.config import BaseQueueConf, LocalQueueConf, SlurmQueueConf
from omegaconf import DictConfig, OmegaConf

from pipeline.config import refuse_sharing, register
from pipeline.errors import ConfigError
from pipeline.hydra_arguments import refuse_empty_sweeps
from pipeline.hydra_errors import COMPOSING_ERRORS, one_line

if TYPE_CHECKING:
    from pipeline.sweep_preparation import MachinePreparation

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_ENDING_SECONDS = 15.0
"""How long jobs have to end after they were told to."""


def register_launchers() -> None:
    """Have ``submitit_local``, ``submitit_slurm`` and ``basic`` name these launchers; again it changes nothing.

    Hydra's own sweeper goes by the launcher that is chosen: jobs run one at a time on this machine.
    """
    Plugins.instance()  # looking for plugins is what stores the originals' configs: from here on, these stand
    for name, config in (("Local", LocalQueueConf), ("Slurm", SlurmQueueConf)):
        node = config(_target_=f"hydra_plugins.offstage_launchers.{name}Launcher")
        ConfigStore.instance().store(group="hydra/launcher", name=f"submitit_{name.lower()}", node=node)
    in_turn = BasicLauncherConf(_target_="hydra_plugins.offstage_launchers.InTurnLauncher")
    ConfigStore.instance().store(group="hydra/launcher", name="basic", node=in_turn)
    at_a_time: Any = "${offstage.batch:${hydra.launcher._target_}}"
    every_job = BasicSweeperConf(max_batch_size=at_a_time)
    ConfigStore.instance().store(group="hydra/sweeper", name="basic", node=every_job, provider="offstage")


class _Launcher(originals.BaseSubmititLauncher):  # type: ignore[misc]
    """What both have in common: submitting, waiting, and telling what came of each job."""

    _poll_seconds = 1.0

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._visible = os.environ.get(_VISIBLE)
        self._preparation = _set_up_sweep(hydra_context, task_function, config)

    def __call__(self, *arguments: Any) -> tuple[JobReturn, int | None]:
        """Run one job and return what it came to and its exit code; called in the job's own process."""
        from pipeline.hydra_task import Task

        register()
        self._restore_environment()
        logging.getLogger("submitit").setLevel(logging.WARNING)  # it calls a job that failed completed
        result: JobReturn = super().__call__(*arguments)
        return result, self.task_function.outcomes[-1].code if isinstance(self.task_function, Task) else None

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs and return what each came to; one that was lost has failed like any other."""
        assert self.config is not None
        Path(str(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
        numbers = range(initial_job_idx, initial_job_idx + len(job_overrides))
        state = Singleton.get_state()
        specs = [
            (list(overrides), "hydra.sweep.dir", number, f"job_id_for_{number}", state)
            for number, overrides in zip(numbers, job_overrides, strict=True)
        ]
        with _no_interrupts():
            jobs = self._executor().map_array(self, *zip(*specs, strict=True))
        numbered = dict(zip(jobs, numbers, strict=True))
        returns: dict[int, JobReturn] = {}
        try:
            for job in self._as_they_end(jobs):
                returns[numbered[job]] = self._collect(job, numbered[job], specs)
        except KeyboardInterrupt:
            self._end([job for job in jobs if numbered[job] not in returns])
            raise
        with suppress(OSError):
            Path(self.params["submitit_folder"]).rmdir()  # submitit makes a folder of that name, %j and all
        return [returns[number] for number in numbers]

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

    def _collect(self, job: Any, number: int, specs: Sequence[Any]) -> JobReturn:
        """Return the result of a job that has ended, and note its outcome."""
        import submitit

        from pipeline.hydra_task import Outcome, Task
        from pipeline.sweep_results import show_progress

        code: int | None = None
        overrides = next(spec[0] for spec in specs if spec[2] == number)
        result = JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=math.nan)
        errors = (submitit.core.utils.UncompletedJobError, submitit.core.utils.FailedJobError)
        if not self._is_lost(job):
            with suppress(*errors):
                result, code = job.results()[0]
        if isinstance(self.task_function, Task):
            outcome = Outcome(number, overrides, code)
            self.task_function.outcomes.append(outcome)
            show_progress(self.task_function.sweep, outcome)
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

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Have this machine measured while it is idle, then run the jobs, which all go by the same figures."""
        self._preparation.prepare(self.hydra_context.config_loader, self.config, job_overrides)
        return super().launch(job_overrides, initial_job_idx)

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


class InTurnLauncher(BasicLauncher):
    """Hydra's own launcher, whose jobs run in turn: each has a process that this one waits for (``job_process``)."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what is common to all jobs. Raises all that is wrong with them."""
        super().setup(hydra_context=hydra_context, task_function=task_function, config=config)
        self._preparation = _set_up_sweep(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Have this machine measured while it is idle, then run the jobs, which all go by the same figures."""
        assert self.hydra_context is not None
        assert self.config is not None
        self._preparation.prepare(self.hydra_context.config_loader, self.config, job_overrides)
        return super().launch(job_overrides, initial_job_idx)


def _set_up_sweep(hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> MachinePreparation:
    """Have ``task_function`` know the sweep's folder, and every job checked; return what measures the machine."""
    from pipeline.hydra_task import Task
    from pipeline.sweep_preparation import MachinePreparation

    if isinstance(task_function, Task):
        task_function.sweep = Path(config.hydra.sweep.dir).absolute()
    _check_every_job(hydra_context, config)
    return MachinePreparation()


def _check_every_job(hydra_context: HydraContext, config: DictConfig) -> None:
    """Compose every job's config, and raise all that is wrong with them, before the first job begins."""
    if config.hydra.sweeper._target_ != f"{BasicSweeper.__module__}.{BasicSweeper.__name__}":
        return  # another sweeper decides on a job by what the jobs before it came to
    loader = hydra_context.config_loader
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides([*params, *config.hydra.overrides.task])
    refuse_empty_sweeps(overrides, loader)
    faults: dict[str, None] = {}
    for job in BasicSweeper.split_arguments(overrides, None)[0]:
        try:
            refuse_sharing(loader.load_sweep_config(config, job))
        except COMPOSING_ERRORS as error:
            faults[one_line(error)] = None
        except ConfigError as error:
            faults[str(error)] = None
    if faults:
        raise ConfigError("\n".join(faults))


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
    os.environ.setdefault("PYTHONSAFEPATH", "1")
    before: Callable[..., Any] | int | None = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
