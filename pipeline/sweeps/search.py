"""A sweep that searches: what Optuna proposes next follows from what the jobs before came to.

The number of each job is read of its record, as ``objective`` says, so that a job which was run already, or by another
machine, counts like any other. hydra-optuna-sweeper, whose keys these are, needs an Optuna before 3 and ends the search
at the first job that fails. Hydra finds this one by itself (``.src/hydra_plugins``).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast, get_args

from omegaconf import DictConfig

from offstage.pipeline.atomic_files import replace_file
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_arguments import refuse_empty_sweeps
from offstage.pipeline.sweeps.sweeper import JobSweeper

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import IntervalSweep, Override
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

    from offstage.pipeline.objective import Objective
    from offstage.pipeline.sweeps.job_run import PreparedJob
    from offstage.pipeline.sweeps.jobs import SweepComposition
    from offstage.pipeline.sweeps.record import Sweep, SweepJob

Direction = Literal["minimize", "maximize"]
Proposal = tuple[str, ...]
"""The overrides of one job."""
_ENDED = "ended well"
"""The constraint that a failed job doesn't keep."""


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """The keys that are searched, each with the values it may have, and the overrides that all jobs share."""

    searched: Mapping[str, BaseDistribution]
    fixed: Proposal

    def proposal(self, trial: Trial) -> Proposal:
        """Return the overrides of the job that ``trial`` is."""
        return (*self.fixed, *(f"{key}={trial.params[key]}" for key in self.searched))


def read_space(overrides: Sequence[str], loader: ConfigLoader) -> SearchSpace:
    """Return what ``overrides``, of which later ones count, leave open and what they fix.

    Raises:
        ConfigError: a key has no value to choose, or none has several.
    """
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(overrides))
    last = {override.get_key_element(): override for override in parsed}
    refuse_empty_sweeps(last.values(), loader)
    searched = {key: _distribution(override) for key, override in last.items() if override.is_sweep_override()}
    fixed = tuple(str(override.input_line) for key, override in last.items() if key not in searched)
    if not searched:
        raise ConfigError(
            "hydra.sweeper: a search over nothing; give a key several values to choose from, as"
            " 'max_memory.cpu=range(1000000000,4000000000,100000000)'"
        )
    return SearchSpace(searched, fixed)


def _distribution(override: Override) -> BaseDistribution:
    """Return the values that a key may have: numbers where they are evenly spaced, else one of a list."""
    from optuna.distributions import CategoricalDistribution

    if override.is_interval_sweep():
        try:
            return _interval(cast("IntervalSweep", override.value()))
        except ValueError as error:  # Optuna's: the other way round, or the logarithm of what has none
            raise ConfigError(f"{override.input_line}: {error}") from error
    if override.is_range_sweep():
        return _range(sorted(cast("Any", override.sweep_iterator())))
    return CategoricalDistribution(list(override.sweep_string_iterator()))


def _interval(sweep: IntervalSweep) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    assert sweep.start is not None
    assert sweep.end is not None
    log = "log" in sweep.tags
    if isinstance(sweep.start, int) and isinstance(sweep.end, int):
        return IntDistribution(sweep.start, sweep.end, log=log)
    return FloatDistribution(sweep.start, sweep.end, log=log)


def _range(numbers: Sequence[int | float]) -> BaseDistribution:
    from optuna.distributions import FloatDistribution, IntDistribution

    first, last, step = numbers[0], numbers[-1], numbers[1] - numbers[0] if len(numbers) > 1 else 1
    if all(isinstance(number, int) for number in numbers):
        return IntDistribution(int(first), int(last), step=int(step))
    return FloatDistribution(first, last, step=step if len(numbers) > 1 else None)


class SearchStudy:
    """Proposes jobs of ``space``, by what those before came to; ``sampler`` is the config of the one that does.

    What is proposed again is the same job: it is told again and not run.
    """

    def __init__(self, space: SearchSpace, direction: Direction, sampler: Any) -> None:
        import optuna
        from hydra.utils import instantiate

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._study = optuna.create_study(direction=direction, sampler=instantiate(sampler))
        self._space, self._direction = space, direction
        self._asked: list[tuple[Trial, Proposal]] = []
        self.tried: dict[Proposal, Objective | None] = {}
        """The jobs so far, in the order of their numbers, and what each came to: null where it failed."""

    def propose(self, count: int) -> list[Proposal]:
        """Return the jobs to be run next, of ``count`` proposals those that are new; they have the next numbers."""
        trials = [self._study.ask(dict(self._space.searched)) for _ in range(count)]
        self._asked = [(trial, self._space.proposal(trial)) for trial in trials]
        return [each for each in dict.fromkeys(each for _, each in self._asked) if each not in self.tried]

    def tell(self, came_to: Mapping[Proposal, Objective | None]) -> None:
        """Tell what the jobs that were proposed last came to."""
        self.tried |= came_to
        for trial, proposal in self._asked:
            self._tell(trial, self.tried[proposal])

    def _tell(self, trial: Trial, objective: Objective | None) -> None:
        """Tell Optuna what a trial came to. A failed one is as bad as the worst, so that others like it are avoided."""
        from optuna.trial import TrialState

        objectives = [objective for objective in self.tried.values() if objective is not None]
        if not objectives:
            self._study.tell(trial, state=TrialState.PRUNED)
            return
        trial.set_constraint(_ENDED, 1.0 if objective is None else -1.0)
        for place, limit in enumerate(objectives[0].limits):
            worst = max(1.0, *(each.limits[place].excess for each in objectives))
            excess = worst if objective is None else objective.limits[place].excess
            trial.set_constraint(f"{limit.name} {limit.is_most}", excess)
        values = [each.value for each in objectives]
        worst_value = max(values) if self._direction == "minimize" else min(values)
        self._study.tell(trial, worst_value if objective is None else objective.value)

    def best(self) -> Proposal | None:
        """Return the best of the jobs that kept all limits, the first of several; null where none did."""
        sign = 1 if self._direction == "minimize" else -1
        kept = {proposal: one for proposal, one in self.tried.items() if one is not None and one.is_within}
        return min(kept, key=lambda proposal: sign * kept[proposal].value, default=None)


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
        if find_spec("optuna") is None or find_spec("scipy") is None:
            raise ConfigError("hydra/sweeper=optuna: Optuna isn't installed; pip install 'offstage-pipeline[search]'")
        if self.direction not in get_args(Direction):
            raise ConfigError(
                f"hydra.sweeper.direction: {self.direction!r} is none of {', '.join(get_args(Direction))}"
            )
        for key, count in (("n_trials", self.n_trials), ("n_jobs", self.n_jobs)):
            if count < 1:
                raise ConfigError(f"hydra.sweeper.{key}: {count} is no number of jobs; give 1 or more")

    def rounds(self, by: SweepComposition, sweep: Sweep, arguments: Sequence[str]) -> Iterator[Sequence[PreparedJob]]:
        """Yield the jobs that Optuna proposes, ``n_jobs`` at a time; what came of all goes to the sweep's folder."""
        from offstage.pipeline.sweeps.jobs import compose_job

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
        from offstage.pipeline.objective import SEARCH_RESULTS

        best, jobs = study.best(), len(study.tried)
        extent = f"{jobs} job{'s' * (jobs != 1)} of {self.n_trials} trial{'s' * (self.n_trials != 1)}"
        results: dict[str, Any] = {"name": "optuna", "direction": self.direction}
        results |= {"trials": self.n_trials, "jobs": jobs}
        if best is not None and (objective := study.tried[best]) is not None:
            number, given = list(study.tried).index(best), dict(override.split("=", 1) for override in best)
            results |= {"best_params": {key: given[key] for key in searched}}
            results |= {"best_value": objective.value, "best_job": number}
            self.conclusion = f"search: the best of {extent} is job {number}: {objective.describe()}"
        else:
            self.conclusion = f"search: none of {extent} completed within the objective's limits"
        replace_file(folder / SEARCH_RESULTS, json.dumps(results, indent=2) + "\n")


def _check_job(job: PreparedJob) -> None:
    """Raise all that can be seen to be wrong with the first job, before it begins: the others are like it."""
    from offstage.pipeline.runner import check_config

    if job.fault:
        raise ConfigError(job.fault)
    if job.config["objective"].get("metric") is None:
        raise ConfigError(
            "objective.metric: a search needs a metric to go by; name one of a run's record:"
            " objective.metric=decode_seconds_per_token"
        )
    check_config(job.config)


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
