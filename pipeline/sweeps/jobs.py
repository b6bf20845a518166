"""The jobs of a sweep, each composed before the first of them begins: what is wrong with any ends the sweep there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf, open_dict

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.config import refuse_sharing
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_arguments import refuse_empty_sweeps
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS, one_line
from offstage.pipeline.sweeps.record import SweepJob, SweepRecord
from offstage.pipeline.sweeps.trust import named_by_job
from offstage.pipeline.trust import Trust, TrustRequest


@dataclass(frozen=True, slots=True)
class SweepComposition:
    """What the jobs of a sweep are composed by: Hydra's ``loader``, and the sweep's ``config``, to which each adds.

    ``files`` has the digests of the config files that are read for them, as far as they were. A sweep that is resumed
    goes by ``trust``; with null the user has just given the command.
    """

    loader: Any
    config: DictConfig
    files: Mapping[str, str]
    trust: Trust | None

    @property
    def judge(self) -> Trust | None:
        """The trust in what has been composed so far."""
        return self.trust.made_of(self.files) if self.trust is not None else None


def describe_sweep(by: SweepComposition, command: Sequence[str]) -> SweepRecord:
    """Return what the sweep is that the arguments ``command`` began.

    Another sweeper than Hydra's own decides on a job by what the jobs before it came to: there are none yet.

    Raises:
        ConfigError: all that is wrong with the jobs, or isn't trusted, before the first begins.
    """
    sweeper = str(by.config.hydra.sweeper._target_)
    foreseen = sweeper == f"{BasicSweeper.__module__}.{BasicSweeper.__name__}"
    jobs = _every_job(by) if foreseen else ()
    found = SweepRecord(
        command=tuple(command),
        cwd=str(Path.cwd()),
        sweeper=sweeper,
        foreseen=foreseen,
        base=_without_hydra(by.config),
        jobs=jobs,
        files=dict(by.files),
    )
    return found if by.trust is not None else found.signed()


def describe_job(by: SweepComposition, number: int, overrides: Sequence[str]) -> SweepJob:
    """Return the job with ``overrides``, which Hydra adds to those of the sweep's config.

    Raises what is wrong with it: one of ``COMPOSING_ERRORS``, or a ``ConfigError``, which has what isn't trusted too.
    """
    job, asked = _describe(by, number, overrides)
    _refuse(asked, by.judge)
    return job


def _refuse(asked: Iterable[TrustRequest], trust: Trust | None) -> None:
    if trust is not None:
        trust.refuse(asked, about=trust.folder)


def _describe(by: SweepComposition, number: int, overrides: Sequence[str]) -> tuple[SweepJob, tuple[TrustRequest, ...]]:
    """Return the job with ``overrides`` and what it asks the user's word for."""
    composed = by.loader.load_sweep_config(by.config, list(overrides))
    refuse_sharing(composed)
    with open_dict(composed):
        composed.hydra.job.num = number
    folder: str | None = None
    with suppress(*COMPOSING_ERRORS, ValueError):  # it names what is only known once the job runs
        folder = str(OmegaConf.select(composed, "hydra.sweep.subdir", throw_on_missing=True))
    own = tuple(str(each) for each in composed.hydra.overrides.task)
    plain = _without_hydra(composed)
    asked = tuple(named_by_job(composed, by.judge))
    code = tuple(dict.fromkeys(each.word for each in asked if each.is_code))
    return SweepJob(number, own, folder, fingerprint(plain), code), asked


def _every_job(by: SweepComposition) -> tuple[SweepJob, ...]:
    found: list[SweepJob] = []
    asked: list[TrustRequest] = []
    faults: dict[str, None] = {}
    for number, overrides in enumerate(_overrides(by.loader, by.config)):
        try:
            job, named = _describe(by, number, overrides)
            found.append(job)
            asked += named
        except COMPOSING_ERRORS as error:
            faults[one_line(error)] = None
        except ConfigError as error:
            faults[str(error)] = None
    if faults:
        raise ConfigError("\n".join(faults))
    _refuse(asked, by.judge)
    return tuple(found)


def _overrides(loader: Any, config: DictConfig) -> Iterator[list[str]]:
    size = config.hydra.sweeper.max_batch_size
    if size is not None and size < 1:
        raise ConfigError(f"hydra.sweeper.max_batch_size: {size} is no number of jobs; give 1 or more, or null for all")
    params = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides([*params, *config.hydra.overrides.task])
    refuse_empty_sweeps(overrides, loader)
    yield from BasicSweeper.split_arguments(overrides, None)[0]


def _without_hydra(config: DictConfig) -> dict[str, Any]:
    """Return ``config`` as JSON can hold it, interpolations as they are written, without what is Hydra's own."""
    plain = OmegaConf.to_container(config, resolve=False)
    assert isinstance(plain, Mapping)
    return {str(key): _as_json(value) for key, value in plain.items() if key != "hydra"}


def _as_json(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key.name if isinstance(key, Enum) else str(key): _as_json(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_as_json(inner) for inner in value]
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
