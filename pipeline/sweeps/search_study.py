"""What Optuna proposes and is told, and which of the jobs is best: a search without the jobs themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from optuna.trial import Trial

    from offstage.pipeline.objective import Objective
    from offstage.pipeline.sweeps.search_space import Proposal, SearchSpace

Direction = Literal["minimize", "maximize"]
_ENDED = "ended well"
"""The constraint that a failed job doesn't keep."""


@dataclass(frozen=True, slots=True)
class Tried:
    """A job of the search, and what it came to: null where it failed."""

    number: int
    proposal: Proposal
    objective: Objective | None


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
        self._tried: dict[Proposal, Tried] = {}

    @property
    def tried(self) -> Sequence[Tried]:
        """The jobs so far, in the order of their numbers."""
        return list(self._tried.values())

    def propose(self, count: int) -> list[Proposal]:
        """Return the jobs to be run next, of ``count`` proposals those that are new; they have the next numbers."""
        trials = [self._study.ask(dict(self._space.searched)) for _ in range(count)]
        self._asked = [(trial, self._space.proposal(trial)) for trial in trials]
        return [each for each in dict.fromkeys(each for _, each in self._asked) if each not in self._tried]

    def tell(self, came_to: Mapping[Proposal, Objective | None]) -> None:
        """Tell what the jobs that were proposed last came to."""
        for proposal, objective in came_to.items():
            self._tried[proposal] = Tried(len(self._tried), proposal, objective)
        for trial, proposal in self._asked:
            self._tell(trial, self._tried[proposal].objective)

    def _tell(self, trial: Trial, objective: Objective | None) -> None:
        """Tell Optuna what a trial came to. A failed one is as bad as the worst, so that others like it are avoided."""
        from optuna.trial import TrialState

        known = [tried.objective for tried in self._tried.values() if tried.objective is not None]
        if not known:
            self._study.tell(trial, state=TrialState.PRUNED)
            return
        trial.set_constraint(_ENDED, 1.0 if objective is None else -1.0)
        for place, limit in enumerate(known[0].limits):
            worst = max(1.0, *(each.limits[place].excess for each in known))
            excess = worst if objective is None else objective.limits[place].excess
            trial.set_constraint(f"{limit.name} {limit.is_most}", excess)
        values = [each.value for each in known]
        worst_value = max(values) if self._direction == "minimize" else min(values)
        self._study.tell(trial, worst_value if objective is None else objective.value)

    def best(self) -> Tried | None:
        """Return the best of the jobs that kept all limits, the first of several; null where none did."""
        sign = 1 if self._direction == "minimize" else -1
        known = [
            (sign * each.objective.value, each) for each in self.tried if each.objective and each.objective.is_within
        ]
        return min(known, key=lambda pair: pair[0])[1] if known else None
