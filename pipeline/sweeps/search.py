"""A sweep that searches: what Optuna proposes next follows from what the jobs before came to.

The number of each job is read of its record, as ``objective`` says, so that a job which was run already, or by another
machine, counts like any other. hydra-optuna-sweeper, whose keys these are, needs an Optuna before 3 and ends the search
at the first job that fails. Hydra finds this one by itself (``.src/hydra_plugins``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from omegaconf import DictConfig

from offstage.pipeline.atomic_files import replace_file
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.sweeps.sweeper import JobSweeper

if TYPE_CHECKING:
    from offstage.pipeline.objective import Objective
    from offstage.pipeline.sweeps.jobs import ComposedJob, SweepComposition
    from offstage.pipeline.sweeps.record import Sweep, SweepJob
    from offstage.pipeline.sweeps.search_study import Direction, SearchStudy, Tried


class OptunaSearch(JobSweeper):
    """Proposes ``n_trials`` jobs, ``n_jobs`` at a time, and says which of them is best.

    ``direction`` is which way that lies; ``sampler`` the config of the one of Optuna that proposes; ``params`` maps
    keys to what is searched, as Hydra's command line has it.
    """

    def __init__(self, *, sampler: Any, direction: Direction, n_trials: int, n_jobs: int, params: DictConfig) -> None:
        self.sampler, self.direction, self.params = sampler, direction, params
        self.n_trials, self.n_jobs = n_trials, n_jobs

    def foresee(self, by: SweepComposition, arguments: Sequence[str]) -> None:
        """Foresee nothing. Raises a ``ConfigError`` where no search can come of the keys."""
        self._check()

    def _check(self) -> None:
        from offstage.pipeline.sweeps.search_study import Direction

        if find_spec("optuna") is None or find_spec("scipy") is None:
            raise ConfigError("hydra/sweeper=optuna: Optuna isn't installed; pip install 'offstage-pipeline[search]'")
        if self.direction not in get_args(Direction):
            raise ConfigError(
                f"hydra.sweeper.direction: {self.direction!r} is none of {', '.join(get_args(Direction))}"
            )
        for key, count in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs)):
            if count < 1:
                raise ConfigError(f"hydra.sweeper.{key}: {count} is no number of jobs; give 1 or more")

    def rounds(self, by: SweepComposition, sweep: Sweep, arguments: Sequence[str]) -> Iterator[Sequence[ComposedJob]]:
        """Yield the jobs that Optuna proposes, ``n_jobs`` at a time; what came of all goes to the sweep's folder."""
        from offstage.pipeline.sweeps.jobs import compose_job
        from offstage.pipeline.sweeps.search_study import SearchStudy, read_space

        params = [f"{key!s}={values}" for key, values in self.params.items()]
        space = read_space([*params, *arguments], by.loader)
        study = SearchStudy(space, self.direction, self.sampler)
        for begun in range(0, self.n_trials, self.n_jobs):
            new, number = study.propose(min(self.n_jobs, self.n_trials - begun)), len(study.tried)
            jobs = [compose_job(by, each, proposal) for each, proposal in enumerate(new, number)]
            if not number:
                _check_job(jobs[0])
            for job in jobs:
                sweep.expect(job.known)
            yield jobs
            ended = zip(new, jobs, strict=True)
            study.tell({proposal: _came_to(sweep.folder, job.known) for proposal, job in ended})
        self._conclude(study, sweep.folder, list(space.searched))

    def _conclude(self, study: SearchStudy, folder: Path, searched: Sequence[str]) -> None:
        """Keep which job is best, and have it said when all is over."""
        from offstage.pipeline.report.searches import RESULTS

        best, jobs = study.best(), len(study.tried)
        found: dict[str, Any] = {"name": "optuna", "direction": self.direction}
        found |= {"trials": self.n_trials, "jobs": jobs}
        if best is not None and best.objective is not None:
            given = dict(override.split("=", 1) for override in best.proposal)
            found |= {
                "best_params": {key: given[key] for key in searched},
                "best_value": best.objective.value,
                "best_job": best.number,
            }
        replace_file(folder / RESULTS, json.dumps(found, indent=2) + "\n")
        self.conclusion = _told(best, jobs=jobs, trials=self.n_trials)


def _check_job(job: ComposedJob) -> None:
    """Raise all that can be seen to be wrong with the first job, before it begins: the others are like it."""
    from offstage.pipeline.runner import check_config

    if job.prepared.fault:
        raise ConfigError(job.prepared.fault)
    if job.prepared.config["objective"].get("metric") is None:
        raise ConfigError(
            "objective.metric: a search needs a metric to go by; name one of a run's record:"
            " objective.metric=decode_seconds_per_token"
        )
    check_config(job.prepared.config)


def _came_to(folder: Path, job: SweepJob) -> Objective | None:
    """Return what a job that has ended came to. Null: it failed, or it measured, and came to no such number.

    Raises ``UnmeasuredError`` where nothing was measured: the others, which are like it, would be run in vain.
    """
    from offstage.pipeline.installed_stages import any_measures
    from offstage.pipeline.objective import UnmeasuredError, objective_of
    from offstage.pipeline.sweeps.results import settled

    run = settled(folder, job).run
    if run is None or run.status != "completed":
        return None
    try:
        return objective_of(run)
    except UnmeasuredError:
        if not any_measures(stage.name for stage in run.stages):
            raise
        return None


def _told(best: Tried | None, *, jobs: int, trials: int) -> str:
    from offstage.pipeline.report.searches import tell_objective

    made = f"{jobs} job{'s' * (jobs != 1)} of {trials} trial{'s' * (trials != 1)}"
    if best is None or best.objective is None:
        return f"search: none of {made} completed within the objective's limits"
    return f"search: the best of {made} is job {best.number}: {tell_objective(best.objective)}"
