"""A sweep that searches: what Optuna proposes next follows from what the jobs before came to.

The number of each job is read of its record, as ``objective`` says, so that a job which was run already, or by another
machine, counts like any other. hydra-optuna-sweeper, whose keys these are, needs an Optuna before 3 and ends the search
at the first job that fails. Hydra finds this one by itself (``pipeline/plugins``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from pipeline.atomic_files import replace_file
from pipeline.errors import ConfigError
from pipeline.hydra_arguments import refuse_launcher

if TYPE_CHECKING:
    from optuna.study import Study
    from optuna.trial import Trial

    from pipeline.objective import Objective
    from pipeline.search_space import Proposal, SearchSpace

Direction = Literal["minimize", "maximize"]
_ENDED = "ended well"
"""The constraint that a failed job doesn't keep."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A job of the search, and what it came to: null where it failed."""

    number: int
    proposal: Proposal
    objective: Objective | None


class OptunaSearch(Sweeper):
    """Proposes ``n_trials`` jobs, ``n_jobs`` at a time, and says which of them is best.

    ``direction`` is which way that lies; ``sampler`` the config of the one of Optuna that proposes; ``params`` maps
    keys to what is searched, as Hydra's command line has it.
    """

    def __init__(self, *, sampler: Any, direction: Direction, n_trials: int, n_jobs: int, params: DictConfig) -> None:
        self.sampler, self.direction, self.params = sampler, direction, params
        self.n_trials, self.n_jobs = n_trials, n_jobs
        self._tried: dict[Proposal, Tried] = {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what is common to all jobs. Raises a ``ConfigError`` where no search can come of it."""
        refuse_launcher(config.hydra.launcher._target_)
        self._check()
        self.hydra_context, self.config, self.task_function = hydra_context, config, task_function
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

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

    def sweep(self, arguments: list[str]) -> None:
        """Search; ``arguments`` are those of the command line. What came of it goes to the sweep's folder."""
        from pipeline.search_space import read_space

        assert self.hydra_context is not None
        assert self.config is not None
        params = [f"{key!s}={values}" for key, values in self.params.items()]
        space = read_space([*params, *arguments], self.hydra_context.config_loader)
        study = self._study()
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        for begun in range(0, self.n_trials, self.n_jobs):
            self._go_on(study, space, folder, count=min(self.n_jobs, self.n_trials - begun))
        self._conclude(folder, list(space.searched))

    def _study(self) -> Study:
        import optuna
        from hydra.utils import instantiate

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        return optuna.create_study(direction=self.direction, sampler=instantiate(self.sampler))

    def _go_on(self, study: Study, space: SearchSpace, folder: Path, *, count: int) -> None:
        """Have ``count`` jobs proposed and run, and tell Optuna. What was proposed before is told again, not run."""
        trials = [study.ask(dict(space.searched)) for _ in range(count)]
        proposals = [space.proposal(trial) for trial in trials]
        new = [proposal for proposal in dict.fromkeys(proposals) if proposal not in self._tried]
        if not self._tried:
            self._check_job(new[0])
        begun = len(self._tried)
        self.validate_batch_is_legal(new)
        if new:
            assert self.launcher is not None
            self.launcher.launch(new, initial_job_idx=begun)
        for number, proposal in enumerate(new, begun):
            self._tried[proposal] = Tried(number, proposal, self._came_to(folder, number))
        for trial, proposal in zip(trials, proposals, strict=True):
            self._tell(study, trial, self._tried[proposal].objective)

    def _check_job(self, proposal: Proposal) -> None:
        """Raise all that can be seen to be wrong with the first job, before it begins: the others are like it."""
        from pipeline.runner import check_config
        from pipeline.sweep_preparation import compose_job

        assert self.hydra_context is not None
        assert self.config is not None
        config = compose_job(self.hydra_context.config_loader, self.config, proposal)
        if config["objective"].get("figure") is None:
            raise ConfigError(
                "objective.figure: a search needs the number to go by; name one of a run's record:"
                " objective.figure=decode_seconds_per_token"
            )
        check_config(config)

    def _came_to(self, folder: Path, number: int) -> Objective | None:
        from pipeline.hydra_task import Task
        from pipeline.objective import objective_of
        from pipeline.sweep_results import settled

        assert isinstance(self.task_function, Task)
        assert self.task_function.sweep is not None
        job = self.task_function.sweep.job(number)
        record = settled(folder, job) if job is not None else {}
        return objective_of(record) if record.get("status") == "completed" else None

    def _tell(self, study: Study, trial: Trial, objective: Objective | None) -> None:
        """Tell Optuna what a trial came to. A failed one is as bad as the worst, so that others like it are avoided."""
        from optuna.trial import TrialState

        known = [tried.objective for tried in self._tried.values() if tried.objective is not None]
        if not known:
            study.tell(trial, state=TrialState.PRUNED)
            return
        trial.set_constraint(_ENDED, 1.0 if objective is None else -1.0)
        for place, limit in enumerate(known[0].limits):
            worst = max(1.0, *(each.limits[place].excess for each in known))
            excess = worst if objective is None else objective.limits[place].excess
            trial.set_constraint(f"{limit.name} {limit.is_most}", excess)
        values = [each.value for each in known]
        worst_value = max(values) if self.direction == "minimize" else min(values)
        study.tell(trial, worst_value if objective is None else objective.value)

    def _conclude(self, folder: Path, searched: Sequence[str]) -> None:
        """Keep which job is best, and have it said when all is over."""
        from pipeline.hydra_task import Task
        from pipeline.report.searches import RESULTS

        best = best_of(list(self._tried.values()), self.direction)
        found: dict[str, Any] = {"name": "optuna", "direction": self.direction}
        found |= {"trials": self.n_trials, "jobs": len(self._tried)}
        if best is not None and best.objective is not None:
            given = dict(override.split("=", 1) for override in best.proposal)
            found |= {
                "best_params": {key: given[key] for key in searched},
                "best_value": best.objective.value,
                "best_job": best.number,
            }
        replace_file(folder / RESULTS, json.dumps(found, indent=2) + "\n")
        if isinstance(self.task_function, Task):
            self.task_function.conclusion = _told(best, jobs=len(self._tried), trials=self.n_trials)


def best_of(tried: Sequence[Tried], direction: Direction) -> Tried | None:
    """Return the best of the jobs that kept all limits, the first of several; null where none did."""
    sign = 1 if direction == "minimize" else -1
    known = [(sign * each.objective.value, each) for each in tried if each.objective and each.objective.is_within]
    return min(known, key=lambda pair: pair[0])[1] if known else None


def _told(best: Tried | None, *, jobs: int, trials: int) -> str:
    from pipeline.report.searches import tell_objective

    made = f"{jobs} job{'s' * (jobs != 1)} of {trials} trial{'s' * (trials != 1)}"
    if best is None or best.objective is None:
        return f"search: none of {made} completed within the objective's limits"
    return f"search: the best of {made} is job {best.number}: {tell_objective(best.objective)}"
