"""A sweep: a loop over prepared jobs. Hydra hands it the command; all from there to the closing table is here.

Who derives from it says which jobs come next: a grid has all of them before the first, a search decides on each by what
the ones before came to. Where they run is the same to both: on this machine, one after another, or in Slurm's queue.
Hydra finds the sweepers by themselves (``.src/hydra_plugins``).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.sweeps.sweep_keys import SLURM, refuse_launcher

if TYPE_CHECKING:
    from offstage.pipeline.hydra_task import Task
    from offstage.pipeline.sweeps.job_run import PreparedJob
    from offstage.pipeline.sweeps.jobs import SweepComposition
    from offstage.pipeline.sweeps.progress import SweepProgress
    from offstage.pipeline.sweeps.record import Sweep
    from offstage.pipeline.tracking.trackers import SweepTracking

    Ended = Callable[[PreparedJob, int | None], None]
    Where = Callable[[Sequence[PreparedJob], SweepProgress, Ended], None]


class JobSweeper(Sweeper):
    """Runs the jobs that the ones who derive from it name, and closes the sweep whatever ends it."""

    conclusion = ""
    """What the jobs came to all together, in words, once that is known."""
    config: DictConfig
    hydra_context: HydraContext
    task: Task

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what is common to all jobs. Raises a ``ConfigError`` where no sweep can come of it."""
        from offstage.pipeline.hydra_task import Task

        refuse_launcher(config.hydra.launcher)
        if not isinstance(task_function, Task):
            raise ConfigError(
                f"hydra.sweeper: {type(self).__name__} runs the jobs of offstage alone; give another here"
            )
        self.hydra_context, self.config, self.task = hydra_context, config, task_function

    @abstractmethod
    def foresee(self, by: SweepComposition, arguments: Sequence[str]) -> Sequence[PreparedJob] | None:
        """Return all jobs, null where they follow from each other. Raises all that is wrong with them."""

    @abstractmethod
    def rounds(self, by: SweepComposition, sweep: Sweep, arguments: Sequence[str]) -> Iterator[Sequence[PreparedJob]]:
        """Yield the jobs to be run next; when it is asked for more they have ended."""

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs that ``arguments``, those of the command line, come to, as far as they aren't done."""
        from offstage.pipeline.sweeps.jobs import SweepComposition, describe_sweep
        from offstage.pipeline.sweeps.record import Sweep
        from offstage.pipeline.tracking.trackers import SweepTracking

        run = self._where()
        folder = Path(str(self.config.hydra.sweep.dir)).absolute()
        by = SweepComposition(self.hydra_context.config_loader, self.config, folder, self.task.files, self.task.resumed)
        sweep = Sweep(folder, describe_sweep(by, self.task.command, self.foresee(by, arguments)))
        ended: dict[int, int | None] = {}
        tracking = SweepTracking(sweep.folder)
        try:
            OmegaConf.save(self.config, sweep.folder / "multirun.yaml")
            self._run(sweep, self.rounds(by, sweep, arguments), run, ended, tracking)
        finally:
            self.task.code = next((1 if code is None else code for code in ended.values() if code != 0), 0)
            self._show(sweep, list(ended))
            tracking.end(jobs=len(sweep.jobs))
            sweep.close()

    def _where(self) -> Where:
        """Return what runs jobs as ``hydra.launcher`` says. Raises a ``ConfigError`` where it can't be had."""
        keys = self.config.hydra.launcher
        if keys._target_ == SLURM:
            from offstage.pipeline.sweeps.slurm_jobs import SlurmJobs

            return SlurmJobs(keys).run
        from offstage.pipeline.sweeps.local_jobs import LocalJobs

        return LocalJobs(self.config).run

    def _run(
        self, sweep: Sweep, rounds: Iterator[Sequence[PreparedJob]], run: Where, ended: dict[int, int | None],
        tracking: SweepTracking,
    ) -> None:  # fmt: skip
        from offstage.pipeline.sweeps.progress import SweepProgress

        progress = SweepProgress(sweep)

        def end(job: PreparedJob, code: int | None) -> None:
            ended[job.known.number] = code  # null where its process was lost
            progress.end(job.known.number)

        for jobs in rounds:
            waiting = [job for job in jobs if not sweep.has_completed(job.known.number)]
            done = (job.config for job in jobs if job not in waiting)
            tracking.begin((job.config for job in waiting), done=done)
            if waiting:
                run(waiting, progress, end)

    def _show(self, sweep: Sweep, ended: Sequence[int]) -> None:
        """Show what came of every job."""
        from rich.markup import escape

        from offstage.pipeline.sweeps.results import show_sweep
        from offstage.pipeline.terminal import Screen

        if sweep.jobs:
            screen = Screen(soft_wrap=True)
            show_sweep(screen, sweep.folder, sweep.record, ended)
            if self.conclusion:
                screen.print(escape(self.conclusion))


class GridOfJobs(JobSweeper):
    """A job for each combination of the values in ``params`` and on the command line.

    A queue gets ``max_batch_size`` of them at a time, all where it is null.
    """

    def __init__(self, *, max_batch_size: int | None, params: Any) -> None:
        self._size = max_batch_size
        self._jobs: Sequence[PreparedJob] = ()

    def foresee(self, by: SweepComposition, arguments: Sequence[str]) -> Sequence[PreparedJob]:
        """Return all jobs."""
        from offstage.pipeline.sweeps.jobs import compose_grid

        if self._size is not None and self._size < 1:
            raise ConfigError(
                f"hydra.sweeper.max_batch_size: {self._size} is no number of jobs; give 1 or more, or null for all"
            )
        self._jobs = compose_grid(by, arguments)
        return self._jobs

    def rounds(self, by: SweepComposition, sweep: Sweep, arguments: Sequence[str]) -> Iterator[Sequence[PreparedJob]]:
        """Yield the jobs, as many at a time as a queue gets."""
        size = self._size or len(self._jobs)
        for first in range(0, len(self._jobs), size):
            yield self._jobs[first : first + size]
