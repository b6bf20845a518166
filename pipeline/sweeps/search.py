"""A sweep that searches: what Optuna proposes next follows from what the jobs before came to.

The number of each job is read of its record, as ``objective`` says, so that a job which was run already, or by another
machine, counts like any other. hydra-optuna-sweeper, whose keys these are, needs an Optuna before 3 and ends the search
at the first job that fails. Hydra finds this one by itself (``.src/hydra_plugins``).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.atomic_files import replace_file
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_arguments import refuse_launcher

if TYPE_CHECKING:
    from offstage.pipeline.objective import Objective
    from offstage.pipeline.sweeps.search_space import Proposal
    from offstage.pipeline.sweeps.search_study import Direction, SearchStudy, Tried


class OptunaSearch(Sweeper):
    """Proposes ``n_trials`` jobs, ``n_jobs`` at a time, and says which of them is best.

    ``direction`` is which way that lies; ``sampler`` the config of the one of Optuna that proposes; ``params`` maps
    keys to what is searched, as Hydra's command line has it.
    """

    def __init__(self, *, sampler: Any, direction: Direction, n_trials: int, n_jobs: int, params: DictConfig) -> None:
        self.sampler, self.direction, self.params = sampler, direction, params
        self.n_trials, self.n_jobs = n_trials, n_jobs

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Take what is common to all jobs. Raises a ``ConfigError`` where no search can come of it."""
        refuse_launcher(config.hydra.launcher._target_)
        self._check()
        self.hydra_context, self.config, self.task_function = hydra_context, config, task_function
        self.launcher = Plugins.instance().instantiate_launcher(
            hydra_context=hydra_context, task_function=task_function, config=config
        )

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

    def sweep(self, arguments: list[str]) -> None:
        """Search; ``arguments`` are those of the command line. What came of it goes to the sweep's folder."""
        from offstage.pipeline.sweeps.search_space import read_space
        from offstage.pipeline.sweeps.search_study import SearchStudy

        assert self.hydra_context is not None
        assert self.config is not None
        params = [f"{key!s}={values}" for key, values in self.params.items()]
        space = read_space([*params, *arguments], self.hydra_context.config_loader)
        study = SearchStudy(space, self.direction, self.sampler)
        folder = Path(str(self.config.hydra.sweep.dir))
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(self.config, folder / "multirun.yaml")
        for begun in range(0, self.n_trials, self.n_jobs):
            self._go_on(study, folder, count=min(self.n_jobs, self.n_trials - begun))
        self._conclude(study, folder, list(space.searched))

    def _go_on(self, study: SearchStudy, folder: Path, *, count: int) -> None:
        """Have ``count`` jobs proposed, and those run that are new."""
        assert self.launcher is not None
        new, begun = study.propose(count), len(study.tried)
        self._refuse_untrusted(new, begun)
        if not begun:
            self._check_job(new[0])
        self.validate_batch_is_legal(new)
        if new:
            self.launcher.launch(new, initial_job_idx=begun)
        study.tell({proposal: self._came_to(folder, number) for number, proposal in enumerate(new, begun)})

    def _refuse_untrusted(self, proposals: Sequence[Proposal], begun: int) -> None:
        """Raise what isn't trusted of a search that is resumed, before anything looks at what its jobs name."""
        from offstage.pipeline.hydra_task import Task
        from offstage.pipeline.sweeps.jobs import SweepComposition, describe_job

        assert self.hydra_context is not None
        assert self.config is not None
        task, loader = self.task_function, self.hydra_context.config_loader
        if isinstance(task, Task) and task.trust is not None:
            by = SweepComposition(loader, self.config, task.files, task.trust)
            for number, proposal in enumerate(proposals, begun):
                describe_job(by, number, proposal)

    def _check_job(self, proposal: Proposal) -> None:
        """Raise all that can be seen to be wrong with the first job, before it begins: the others are like it."""
        from offstage.pipeline.runner import check_config
        from offstage.pipeline.sweeps.preparation import compose_job

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
        """Return what a job that has ended came to. Null: it failed, or it measured, and came to no such number.

        Raises ``UnmeasuredError`` where nothing was measured: the others, which are like it, would be run in vain.
        """
        from offstage.pipeline.hydra_task import Task
        from offstage.pipeline.installed_stages import any_measures
        from offstage.pipeline.objective import UnmeasuredError, objective_of
        from offstage.pipeline.sweeps.results import settled

        assert isinstance(self.task_function, Task)
        assert self.task_function.sweep is not None
        job = self.task_function.sweep.job(number)
        record = settled(folder, job) if job is not None else {}
        if record.get("status") != "completed":
            return None
        try:
            return objective_of(record)
        except UnmeasuredError:
            if not any_measures(stage["name"] for stage in record["stages"]):
                raise
            return None

    def _conclude(self, study: SearchStudy, folder: Path, searched: Sequence[str]) -> None:
        """Keep which job is best, and have it said when all is over."""
        from offstage.pipeline.hydra_task import Task
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
        if isinstance(self.task_function, Task):
            self.task_function.conclusion = _told(best, jobs=jobs, trials=self.n_trials)


def _told(best: Tried | None, *, jobs: int, trials: int) -> str:
    from offstage.pipeline.report.searches import tell_objective

    made = f"{jobs} job{'s' * (jobs != 1)} of {trials} trial{'s' * (trials != 1)}"
    if best is None or best.objective is None:
        return f"search: none of {made} completed within the objective's limits"
    return f"search: the best of {made} is job {best.number}: {tell_objective(best.objective)}"
