"""What all launchers have in common: a sweep in its folder, of which they run what isn't done and say how far it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

if TYPE_CHECKING:
    from offstage.pipeline.sweeps.preparation import MachinePreparation
    from offstage.pipeline.sweeps.progress import SweepProgress
    from offstage.pipeline.sweeps.sweep import Sweep
    from offstage.pipeline.tracking.trackers import SweepTracking
    from offstage.pipeline.trust import Trust


class SweepLauncher(ABC):
    """Stands before one of Hydra's launchers, which runs jobs and knows nothing of the sweep around them.

    Of a task that isn't this command's, in a program that chose one of these launchers, every job is run.
    """

    config: DictConfig | None
    hydra_context: HydraContext | None
    _sweep: Sweep | None = None
    _progress: SweepProgress | None = None
    _preparation: MachinePreparation | None = None
    _tracking: SweepTracking | None = None
    _trust: Trust | None = None
    _files: Mapping[str, str] = MappingProxyType({})

    def __getstate__(self) -> dict[str, Any]:
        # a job's copy runs that alone
        return {**vars(self), "_sweep": None, "_progress": None, "_preparation": None, "_tracking": None, "_files": {}}

    def _begin_sweep(self, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Open the sweep's folder for the task. Raises what is wrong with the jobs, or why they may not run there."""
        from offstage.pipeline.hydra_task import Task
        from offstage.pipeline.sweeps.jobs import SweepComposition, describe_sweep
        from offstage.pipeline.sweeps.preparation import MachinePreparation
        from offstage.pipeline.sweeps.progress import SweepProgress
        from offstage.pipeline.sweeps.sweep import Sweep
        from offstage.pipeline.tracking.trackers import SweepTracking

        if isinstance(task_function, Task):
            self._trust, self._files = task_function.trust, task_function.files
        command = task_function.command if isinstance(task_function, Task) else ()
        found = describe_sweep(SweepComposition(hydra_context.config_loader, config, self._files, self._trust), command)
        self._preparation = MachinePreparation()
        if not isinstance(task_function, Task):
            return
        folder = Path(config.hydra.sweep.dir).absolute()
        task_function.sweep = self._sweep = Sweep(folder, found)
        self._progress, self._tracking = SweepProgress(self._sweep), SweepTracking(folder)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs that aren't done and return what each came to; one that was lost has failed like any other."""
        numbered = dict(enumerate(job_overrides, initial_job_idx))
        waiting = {number: own for number, own in numbered.items() if not self._is_done(number, own)}
        self._track(waiting)
        ran = self._run(waiting) if waiting else {}
        return [ran[number] if number in ran else self._completed(number, own) for number, own in numbered.items()]

    @abstractmethod
    def _run(self, numbered: Mapping[int, Sequence[str]]) -> dict[int, JobReturn]:
        """Run the jobs with these overrides and return what each came to, by its number."""

    def _track(self, numbered: Mapping[int, Sequence[str]]) -> None:
        """Have the trackers of the jobs know the sweep, before any work: one that can't be reached ends it here."""
        if self._tracking is not None and self.hydra_context is not None and self.config is not None:
            self._tracking.begin(self.hydra_context.config_loader, self.config, [*numbered.values()])

    def _prepare_machine(self, numbered: Mapping[int, Sequence[str]]) -> None:
        """Have this machine measured while it is idle: all jobs go by the same figures."""
        assert self._preparation is not None
        assert self.hydra_context is not None
        assert self.config is not None
        self._preparation.prepare(self.hydra_context.config_loader, self.config, [*numbered.values()])

    def _is_done(self, number: int, overrides: Sequence[str]) -> bool:
        from offstage.pipeline.sweeps.jobs import SweepComposition, describe_job

        if self._sweep is None or self.hydra_context is None or self.config is None:
            return False
        if not self._sweep.record.foreseen:
            by = SweepComposition(self.hydra_context.config_loader, self.config, self._files, self._trust)
            job = describe_job(by, number, overrides)
            self._sweep.expect(job)
        return self._sweep.has_completed(number)

    def _completed(self, number: int, overrides: Sequence[str]) -> JobReturn:
        """Return what stands for a job that was run before, with the number that it came to."""
        from offstage.pipeline.objective import number_of
        from offstage.pipeline.sweeps.record import find_record

        job = self._sweep.job(number) if self._sweep is not None else None
        record = find_record(self._sweep.folder, job) if self._sweep is not None and job is not None else None
        value = number_of(record.data) if record is not None else None
        return JobReturn(overrides=overrides, status=JobStatus.COMPLETED, _return_value=value)

    def _began(self, numbers: Mapping[int, object]) -> None:
        if self._progress is not None:
            self._progress.begin(numbers)

    def _ended(self, number: int) -> None:
        if self._progress is not None:
            self._progress.end(number)
