"""The jobs of a sweep, each composed once, before the first of them begins: what is wrong with any ends the sweep."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import env_override
from omegaconf import DictConfig, OmegaConf, open_dict

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.config import refuse_sharing, resolve
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_arguments import refuse_empty_sweeps
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS, one_line
from offstage.pipeline.stage import Config
from offstage.pipeline.sweeps.job_run import PreparedJob
from offstage.pipeline.sweeps.record import SweepJob, SweepRecord


@dataclass(frozen=True, slots=True)
class SweepComposition:
    """What the jobs of a sweep are composed by: Hydra's ``loader``, and the sweep's ``config``, to which each adds.

    Each lies in the sweep's ``folder``. ``files`` has the digests of the config files that are read for them, as far as
    they were: where a sweep is ``resumed``, they are as they were when it began.
    """

    loader: Any
    config: DictConfig
    folder: Path
    files: Mapping[str, str]
    resumed: SweepRecord | None


def describe_sweep(by: SweepComposition, command: Sequence[str], jobs: Sequence[PreparedJob] | None) -> SweepRecord:
    """Return what the sweep is that the arguments ``command`` began; ``jobs`` is null where they can't be foreseen."""
    return SweepRecord(
        command=tuple(command),
        cwd=str(Path.cwd()),
        sweeper=str(by.config.hydra.sweeper._target_),
        foreseen=jobs is not None,
        base=_without_hydra(by.config),
        jobs=tuple(job.known for job in jobs or ()),
        files=dict(by.files),
    ).signed()


def compose_job(by: SweepComposition, number: int, overrides: Sequence[str]) -> PreparedJob:
    """Return the job with ``overrides``, which Hydra adds to those of the sweep's config.

    Raises what is wrong with it: one of ``COMPOSING_ERRORS``, or a ``ConfigError``.
    """
    composed = by.loader.load_sweep_config(by.config, list(overrides))
    if by.resumed is not None:
        by.resumed.refuse_changed(by.files)
    refuse_sharing(composed)
    with open_dict(composed):
        composed.hydra.job.num, composed.hydra.job.id = number, str(number)
        subdir = str(OmegaConf.select(composed, "hydra.sweep.subdir", throw_on_missing=True))
        composed.hydra.runtime.output_dir = os.path.normpath(by.folder / subdir)
    own = tuple(str(each) for each in composed.hydra.overrides.task)
    job = SweepJob(number, own, subdir, fingerprint(_without_hydra(composed)))
    variables = {str(name): str(value) for name, value in composed.hydra.job.env_set.items()}
    with _set_in_hydra(composed):
        with env_override(variables):  # the job's own interpolations may name them
            config, fault = _resolved(composed)
        return PreparedJob(
            known=job,
            sweep=str(by.folder),
            folder=str(composed.hydra.runtime.output_dir),
            config=config,
            fault=fault,
            logging=OmegaConf.to_container(composed.hydra.job_logging, resolve=True),
            variables=variables,
            is_current=bool(composed.hydra.job.chdir),
            files=dict(_files(composed)),
        )


@contextmanager
def _set_in_hydra(composed: DictConfig) -> Iterator[None]:
    """Have what asks for Hydra's own config, as the interpolation ``${hydra:…}`` does, get that of ``composed``."""
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(composed)
        yield
    finally:
        HydraConfig.instance().cfg = before


def compose_grid(by: SweepComposition, arguments: Sequence[str]) -> list[PreparedJob]:
    """Return a job for each combination of the values that ``arguments`` and ``hydra.sweeper.params`` give.

    Raises:
        ConfigError: all that is wrong with the jobs, before the first begins.
    """
    params = [f"{key}={value}" for key, value in (by.config.hydra.sweeper.params or {}).items()]
    given = OverridesParser.create(config_loader=by.loader).parse_overrides([*params, *arguments])
    refuse_empty_sweeps(given, by.loader)
    jobs: list[PreparedJob] = []
    faults: dict[str, None] = {}
    for number, overrides in enumerate(BasicSweeper.split_arguments(given, None)[0]):
        try:
            jobs.append(compose_job(by, number, overrides))
        except COMPOSING_ERRORS as error:
            faults[one_line(error)] = None
        except ConfigError as error:
            faults[str(error)] = None
    if faults:
        raise ConfigError("\n".join(faults))
    return jobs


def _resolved(composed: DictConfig) -> tuple[Config, str]:
    """Return the job's config, resolved, and what is wrong with it: then it is empty, and the job's record says so."""
    own = deepcopy(composed)
    with open_dict(own):
        del own["hydra"]  # a job's own config has no such node
    try:
        return resolve(own), ""
    except COMPOSING_ERRORS as error:
        return {}, one_line(error)
    except ConfigError as error:
        return {}, str(error)


def _files(composed: DictConfig) -> Iterator[tuple[str, Any]]:
    """Yield what Hydra's own of a job hold, as it is written, and where they lie."""
    hydra = composed.hydra
    if hydra.output_subdir is None:
        return
    folder = os.path.join(hydra.runtime.output_dir, hydra.output_subdir)  # noqa: PTH118 - it may be a path by itself
    yield f"{folder}/config.yaml", _without_hydra(composed)
    yield f"{folder}/hydra.yaml", {"hydra": hydra}
    yield f"{folder}/overrides.yaml", hydra.overrides.task


def _without_hydra(config: DictConfig) -> dict[str, Any]:
    """Return ``config`` as plain data, interpolations as they are written, without what is Hydra's own."""
    plain = OmegaConf.to_container(config, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items() if key != "hydra"}
