"""What a search may propose: the sweeps of Hydra's command line as Optuna's distributions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_arguments import refuse_empty_sweeps

if TYPE_CHECKING:
    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import IntervalSweep, Override
    from optuna.distributions import BaseDistribution
    from optuna.trial import Trial

Proposal = tuple[str, ...]
"""The overrides of one job."""


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
