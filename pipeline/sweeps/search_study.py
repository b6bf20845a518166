"""A search without the jobs themselves: what Optuna may propose, proposes and is told, and which job is best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, cast

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_arguments import refuse_empty_sweeps

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import IntervalSweep, Override
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

    from offstage.pipeline.objective import Objective

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
