"""What a sweep's folder asks for, before anything of it is carried out: its command as Hydra would compose it.

Who resumes a sweep of their own has given that command already; a folder that came from elsewhere may say anything. Its
command is composed, which runs nothing, once it can't have Hydra import or read what lies elsewhere, and the composed
config is judged: that of the sweep, and that of each of its jobs.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_automatic_config_search_path, get_args_parser
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS, one_line
from offstage.pipeline.plain_data import leaves
from offstage.pipeline.record import RECORD
from offstage.pipeline.regular_files import lies_in
from offstage.pipeline.sweeps.record import SWEEP, SweepRecord
from offstage.pipeline.tracking.trackers import stores_of
from offstage.pipeline.trust import (
    Trust,
    TrustRequest,
    named_by_config,
    named_code,
    outputs_for,
    trust_flags,
    ways_out_of,
)

_HARMLESS = re.compile(
    r"mode|(overrides|runtime)\..*|sweep\.(dir|subdir)|job\.(override_dirname|config_name|num|id)"
    r"|sweeper\.(params(\..*)?|max_batch_size|n_trials|n_jobs|direction)"
)
"""Keys of Hydra whose values run and write nothing by themselves. Where jobs lie is judged as a place."""
_SAMPLER = "sweeper.sampler."
_OWN_TARGET = re.compile(
    r"hydra_plugins\.offstage_sweepers\.\w+|offstage\.(here|slurm)|optuna\.samplers\.(GP|TPE|Random)Sampler"
)
_CONF = "pkg://offstage.conf"


def named_by_folder(folder: Path, record: SweepRecord) -> Iterator[TrustRequest]:
    """Yield what the sweep in ``folder`` asks for beside its config: options, its own folder, links, a tracker."""
    yield from _options(record.command)
    if Path(record.cwd).is_dir() and not lies_in(record.cwd, [folder]) and Path(record.cwd).resolve() != Path.cwd():
        yield TrustRequest(record.cwd, "cwd", is_code=False)
    for job in record.jobs:
        if job.folder is not None and not lies_in(folder / job.folder, [folder]):
            yield TrustRequest(job.folder, "jobs.folder", is_code=False)
    outputs = outputs_for(folder / SWEEP)
    stores = [each for each in stores_of(folder) if not _is_chosen(each, record, outputs)]
    yield from (TrustRequest(each, RECORD) for each in stores)
    yield from ways_out_of(folder)
    if not record.is_own and lies_in(folder, [outputs]):
        yield from ways_out_of(outputs)


def _is_chosen(store: str, record: SweepRecord, outputs: Path) -> bool:
    """Return whether the user's own command says that runs go to ``store``: a job's record is another's to change."""
    words = {word.rstrip("/") for given in record.command for word in re.split(r"[=,'\"\s{}\[\]]", given)}
    node = record.base.get("tracker")
    words |= {str(node.get("uri")).rstrip("/")} if isinstance(node, Mapping) else set()
    is_near = "://" not in store and lies_in(store, [outputs, Path(record.cwd)])
    return record.is_own and (store in words or is_near)


def _options(command: Sequence[str]) -> Iterator[TrustRequest]:
    """Yield the options that have Hydra look elsewhere for configs, or do something else than a sweep."""
    parser = get_args_parser()
    for name, value in vars(parser.parse_args(list(command))).items():
        if name not in ("overrides", "multirun") and value != parser.get_default(name):
            option = f"--{name.replace('_', '-')}"
            yield TrustRequest(option if value is True else f"{option}={value}", "command", is_code=False)


def refuse_command(
    trust: Trust, files: Mapping[str, str], loader: Any, config_name: str | None, overrides: Sequence[str]
) -> None:
    """Raise a ``ConfigError`` for what the sweep that ``overrides`` give asks for without the user's word.

    ``loader`` is Hydra's: it composes what Hydra is about to carry out, of ``files``, which are noted as it reads them.
    """
    asked = list(_search_path(loader, config_name, overrides))
    trust.made_of(files).refuse(asked, about=trust.folder)
    composed = loader.load_configuration(config_name, list(overrides), RunMode.MULTIRUN)
    judged = trust.made_of(files)
    judged.refuse(named_by_sweep(composed, judged), about=trust.folder)


def _search_path(loader: Any, config_name: str | None, overrides: Sequence[str]) -> Iterator[TrustRequest]:
    """Yield where configs are looked for beyond those that are installed: a package is imported for it."""
    given = OverridesParser.create().parse_overrides(list(overrides))
    added = [each.value() for each in given if each.get_key_element().lstrip("+~") == "hydra.searchpath"]
    main = loader.repository.load_config(config_name) if config_name is not None else None
    if main is not None:
        added.append(OmegaConf.select(main.config, "hydra.searchpath"))
    for places in added:
        for place in places if isinstance(places, Sequence) and not isinstance(places, str) else [places]:
            if place is not None:
                yield TrustRequest(str(place), "hydra.searchpath", is_code=False)


def _other_folder(composed: DictConfig, trust: Trust) -> Iterator[TrustRequest]:
    """Yield where a sweep, or a job of it, would lie elsewhere than in the folder that is resumed."""
    given = str(composed.hydra.sweep.dir)
    if not lies_in(given, [trust.folder]):
        yield TrustRequest(given, "hydra.sweep.dir", is_code=False)


def named_by_job(composed: DictConfig, trust: Trust | None) -> Iterator[TrustRequest]:
    """Yield what a job's config, as Hydra ``composed`` it, asks for; with ``trust`` its places too."""
    if trust is not None:
        yield from named_by_sweep(composed, trust)
        yield from _job_folder(composed, trust.folder)
    else:
        yield from _named_to_hydra(composed)
        yield from named_code(_resolved(composed, strictly=False))


def named_by_sweep(composed: DictConfig, trust: Trust) -> Iterator[TrustRequest]:
    """Yield what the config that Hydra ``composed`` asks for, of a job or below all jobs of a sweep."""
    yield from _named_to_hydra(composed)
    yield from _other_folder(composed, trust)
    yield from named_by_config(_resolved(composed, strictly=not trust.own), trust, outputs_for(trust.folder / SWEEP))


def _job_folder(composed: DictConfig, folder: Path) -> Iterator[TrustRequest]:
    written = OmegaConf.to_container(composed.hydra.sweep, resolve=False)
    try:
        subdir = str(composed.hydra.sweep.subdir)
    except COMPOSING_ERRORS:
        subdir = ".."  # only the job itself will know
    if not lies_in(folder / subdir, [folder]):
        assert isinstance(written, dict)
        yield TrustRequest(str(written["subdir"]), "hydra.sweep.subdir", is_code=False)


def _resolved(composed: DictConfig, *, strictly: bool) -> Mapping[str, Any]:
    """Return the job's own config with interpolations resolved as in the job.

    What can't be resolved before the job runs is a ``ConfigError``, unless it needn't be ``strictly``.
    """
    own = deepcopy(composed)
    with open_dict(own):
        del own["hydra"]
    try:
        with set_in_hydra(composed):
            plain = OmegaConf.to_container(own, resolve=True)
    except (*COMPOSING_ERRORS, ValueError) as error:
        if strictly:
            said = one_line(error)
            raise ConfigError(f"{said}; what it names can't be seen before it runs: give it a value") from error
        plain = OmegaConf.to_container(own, resolve=False)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@contextmanager
def set_in_hydra(composed: DictConfig) -> Iterator[None]:
    """Have what asks for Hydra's own config, as the interpolation ``${hydra:…}`` does, get that of ``composed``."""
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(composed)
        yield
    finally:
        HydraConfig.instance().cfg = before


def _named_to_hydra(composed: DictConfig) -> Iterator[TrustRequest]:
    """Yield what differs in Hydra's own keys from what is installed: callbacks, loggers, launchers, variables, places.

    Of what is made of a target its arguments go with the target.
    """
    choices = {str(group): name for group, name in composed.hydra.runtime.choices.items()}
    for group, name in choices.items():
        names = name if isinstance(name, Sequence) and not isinstance(name, str) else [name]
        if any(".." in Path(str(each)).parts or str(each).startswith("/") for each in names):
            yield TrustRequest(f"{group}={name}", "defaults", is_code=False)
    chosen = tuple((group, str(name)) for group, name in choices.items() if re.fullmatch(r"hydra(/\w+)+", group))
    known, given = _installed(chosen), _plain(composed)
    changed = {key: value for key, value in given.items() if key not in known or known[key] != value}
    targets = {key: str(value) for key, value in given.items() if key.endswith("._target_")}
    foreign = {key: name for key, name in targets.items() if key in changed or not _OWN_TARGET.fullmatch(name)}
    yield from (TrustRequest(name, f"hydra.{key}") for key, name in foreign.items())
    with_target = tuple(key.removesuffix("_target_") for key in foreign)
    for key, value in changed.items():
        if not _is_harmless(key, value) and not key.startswith(with_target):
            said = value if isinstance(value, str) else json.dumps(value, default=str)
            yield TrustRequest(f"hydra.{key}={said}", f"hydra.{key}", is_code=False)
    for key in known.keys() - given.keys():
        if not _HARMLESS.fullmatch(key) and not any(other.startswith(f"{key}.") for other in given):
            yield TrustRequest(f"~hydra.{key}", f"hydra.{key}", is_code=False)


def _is_harmless(key: str, value: Any) -> bool:
    is_number = key.startswith(_SAMPLER) and (value is None or isinstance(value, bool | int | float))
    return is_number or _HARMLESS.fullmatch(key) is not None


def _plain(composed: DictConfig) -> dict[str, Any]:
    """Return Hydra's own keys as they are written, dotted."""
    plain = OmegaConf.to_container(composed.hydra, resolve=False, enum_to_str=True)
    assert isinstance(plain, dict)
    return dict(leaves({str(key): value for key, value in plain.items()}))


@lru_cache
def _installed(chosen: tuple[tuple[str, str], ...]) -> Mapping[str, Any]:
    """Return Hydra's own keys where nothing is given but ``chosen`` groups, as far as these are installed here."""
    loader = ConfigLoaderImpl(create_automatic_config_search_path(None, None, _CONF))
    names = [f"{group}={name}" for group, name in chosen if re.fullmatch(r"[\w-]+", name) and name != "None"]
    for overrides in (names, []):
        try:
            return _plain(loader.load_configuration("config", overrides, RunMode.MULTIRUN))
        except COMPOSING_ERRORS:
            continue
    return {}


def resume_command(folder: Path, record: SweepRecord) -> str:
    """Return the command that does what isn't done of the sweep in ``folder``."""
    code = [word for job in record.jobs for word in job.code]
    return " ".join(["offstage-sweep resume", shlex.quote(str(folder)), trust_flags(code)]).rstrip()
