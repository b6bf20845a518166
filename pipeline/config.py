"""The root config: the keys of the runner and those that the installed stages bring, and their checks.

Every fault of a config is found before any work and all are reported together, so value checks are made here and by
the stages, not by the first line of code that trips over a value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass
from functools import lru_cache, partial
from importlib import resources
from typing import Any, Dict, Optional  # noqa: UP035 - OmegaConf knows only these

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.errors import ConfigError, Fault, closest
from offstage.pipeline.installed_stages import stage_configs
from offstage.pipeline.measure import MeasureConfig
from offstage.pipeline.objective import ObjectiveConfig, check_objective
from offstage.pipeline.plain_data import LARGEST, unrecordable, walk
from offstage.pipeline.regular_files import SIGN, read_lines
from offstage.pipeline.tracking.options import TrackerConfig, check_tracker, located
from offstage.pipeline.typed_config import (
    KEYS,
    PATHS,
    PATHS_INSIDE,
    STANDARD_INPUT,
    VARIABLES,
    absolute,
    defaults,
    key_names,
    type_faults,
    unknown_keys,
)

_STAGE_LIST = re.compile(r"stages=\[([\w\s,-]*)\]")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """The keys that are no stage's; ``conf/config.yaml`` says what each means."""

    stages: list[str] = field(default_factory=list)
    stop_after: str | None = None
    outputs: str = field(default="outputs", metadata={PATHS: {"": absolute}})
    enforce_memory: bool = False
    measure: MeasureConfig = field(default_factory=MeasureConfig)
    objective: ObjectiveConfig = field(default_factory=ObjectiveConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig, metadata={PATHS: {"folder": located}})
    vars: Mapping[str, Any] = field(default_factory=dict)


def config_classes() -> list[type[Any]]:
    """Return the typed configs that the root is made of: the runner's, and each installed stage's."""
    return [RunConfig, *stage_configs().values()]


def default_config() -> dict[str, Any]:
    """Return every key of the root with its default; the config's files and the command line come on top."""
    return {name: value for kind in config_classes() for name, value in defaults(kind).items()}


def register() -> None:
    """Make the schema and the resolvers known to Hydra; calling it again changes nothing."""
    ConfigStore.instance().store("schema", _schema(tuple(config_classes())))
    OmegaConf.register_new_resolver("offstage.pid", os.getpid, use_cache=True, replace=True)
    embedded = resources.files("offstage.conf").joinpath("checkpoints")
    OmegaConf.register_new_resolver("offstage.embedded", lambda name: str(embedded.joinpath(name)), replace=True)


def _open_mappings(node: DictConfig, plain: Mapping[str, Any]) -> None:
    for entry, value in plain.items():
        if value == {}:
            OmegaConf.set_struct(node[entry], False)
        elif isinstance(value, dict):
            _open_mappings(node[entry], value)


def choose_stages(argument: str) -> str:
    """Return an argument of the command line, with a list of stages made a choice of the group of that name.

    ``stages`` is a group of the config, and where a group is Hydra takes names of its files and no list.
    """
    match = _STAGE_LIST.fullmatch(argument)
    if match is None:
        return argument
    names = [name.strip() for name in match[1].split(",") if name.strip()]
    choice = "-".join(names) or "none"
    ConfigStore.instance().store(choice, {"stages": names}, group="stages", package="_global_")
    return f"stages={choice}"


@lru_cache(maxsize=1)
def _schema(kinds: tuple[type[Any], ...]) -> DictConfig:
    """Return the root of ``kinds`` that OmegaConf merges into. It knows mappings by their keys, and takes all else."""
    schema_fields: list[tuple[str, Any, Any]] = []
    for kind in kinds:
        plain = defaults(kind)
        for entry in fields(kind):
            keys: Any = entry.metadata.get(KEYS)
            mapping: Any = Dict[str, Any] if keys is None else Optional[Dict[keys, str]]  # noqa: UP006, UP045
            hint = mapping if plain[entry.name] == {} else Any
            schema_fields.append((entry.name, hint, field(default_factory=partial(deepcopy, plain[entry.name]))))
    node: DictConfig = OmegaConf.structured(make_dataclass("Schema", schema_fields))
    for kind in kinds:  # a dotted override may add a key to a mapping: max_memory.1=3GB, generate.top_k=2
        _open_mappings(node, defaults(kind))
    return node


def resolve(config: DictConfig) -> dict[str, Any]:
    """Return ``config`` as plain dicts, lists and scalars, interpolations resolved and paths absolute.

    ``max_memory`` gets str keys. Standard input is read where a key asks for it. Raises a ``ConfigError`` that names
    every mandatory value (``???``) not given, or says that ``config`` isn't made over this command's own.
    """
    names = key_names(config_classes())
    absent = [name for name in names if name not in config]
    if 0 < len(absent) < len(names) / 2:
        raise ConfigError(
            "\n".join(f"{name}: a run goes by this key; leave out ~{name}, and it has its default" for name in absent)
        )
    if absent:
        raise ConfigError(
            f"{absent[0]}: the config has no such key, nor most others that a run goes by; one of your own begins with "
            "defaults: [config, _self_]"
        )
    missing = sorted(str(key) for key in OmegaConf.missing_keys(config))
    if missing:
        raise ConfigError("\n".join(f"{key}: no value; give one: {key}=…" for key in missing))
    plain: Any = OmegaConf.to_container(config, resolve=True)
    for place, why in unrecordable(plain):
        raise ConfigError(f"{place}: {why}")
    plain["max_memory"] = {key.name: str(value) for key, value in (plain["max_memory"] or {}).items()}
    located = _changed_paths(plain, _located)
    for name, key, lines in _read_from_standard_input(located):
        located[name] = {**located[name], lines: read_lines(f"{name}.{key}")}
    return located


def refuse_sharing(config: Mapping[str, Any]) -> None:
    """Raise a ``ConfigError`` where ``config``, of one of several jobs, has standard input read: there is only one."""
    for name, key, _ in _read_from_standard_input(config):
        raise ConfigError(
            f"{name}.{key}: {SIGN!r} is standard input, which the jobs of a sweep can't share; write it to a file and"
            " give that"
        )


def _read_from_standard_input(config: Mapping[Any, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each field and key of ``config`` that asks for standard input, and the key for the lines."""
    for entry in (entry for kind in config_classes() for entry in fields(kind)):
        node = config.get(entry.name)
        for key, lines in entry.metadata.get(STANDARD_INPUT, {}).items():
            if isinstance(node, Mapping | DictConfig) and node.get(key) == SIGN:
                yield entry.name, key, lines


PathChange = Callable[[str, Callable[[str], str], str], str]
"""Makes another path of one: of the dotted key that has it, what makes a text mean one place there, and the path."""


def _changed_paths(config: Mapping[str, Any], change: PathChange) -> dict[str, Any]:
    """Return a copy of ``config`` in which each path that it names, alone or in a list, is what ``change`` makes of it.

    Standard input is no path.
    """
    changed = {str(key): value for key, value in config.items()}
    for entry in (entry for kind in config_classes() for entry in fields(kind)):
        plain, inside = entry.metadata.get(PATHS, {}), entry.metadata.get(PATHS_INSIDE, {})
        for key in (*plain, *inside):
            node = changed.get(entry.name)
            given = node if not key else node.get(key) if isinstance(node, Mapping) else None
            is_sign = given == SIGN and key in entry.metadata.get(STANDARD_INPUT, {})
            if not given or is_sign or not isinstance(given, str if key in plain else list):
                continue
            one = partial(change, f"{entry.name}.{key}" if key else entry.name, plain.get(key, absolute))
            new = one(str(given)) if key in plain else inside[key](given, one)
            changed[entry.name] = {**node, key: new} if key and isinstance(node, Mapping) else new
    return changed


def _located(key: str, locate: Callable[[str], str], path: str) -> str:
    try:
        return locate(path)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error}") from error


def named_paths(config: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the dotted key of each path that ``config`` names, and what it means: absolute, unless it is no path here.

    A Hub id is none, nor is the name of a policy.
    """
    named: list[tuple[str, str]] = []

    def note(key: str, locate: Callable[[str], str], path: str) -> str:
        meant = path
        with suppress(ConfigError):  # the home of a user that isn't one
            meant = locate(path)
        named.append((key, meant))
        return path

    _changed_paths(config, note)
    return named


def path_keys() -> dict[str, Callable[[str], str]]:
    """Return the dotted key of each path of a config, and what makes a text that is given for it mean one place."""
    entries = (entry for kind in config_classes() for entry in fields(kind))
    return {
        f"{entry.name}.{key}" if key else entry.name: locate
        for entry in entries
        for key, locate in entry.metadata.get(PATHS, {}).items()
    }


def with_paths(config: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Return a copy of ``config`` in which each path that it names is what ``change`` makes of its key and of it.

    What is no path but the name of something, a policy's, stays.
    """
    copied = deepcopy(dict(config))
    return _changed_paths(copied, lambda key, _, path: change(key, path) if "/" in path else path)


def check(config: Mapping[str, Any], known_stages: Sequence[str]) -> Iterable[Fault]:
    """Yield what is wrong with the types of keys, whosever they are, and with the keys that belong to no stage."""
    kinds = config_classes()
    yield from unknown_keys(config, key_names(kinds))
    wrong = [fault for kind in kinds for fault in type_faults(kind, config)]
    yield from wrong
    if config.get("outputs") == "":
        yield Fault("outputs", "'' is no path of a folder")
    if not any(fault.key.startswith("objective") for fault in wrong):
        yield from check_objective(config)
    if not any(fault.key in ("stages", "stop_after") for fault in wrong):
        yield from _check_stages(config, known_stages)
    if not any(fault.key.startswith("tracker") for fault in wrong):
        yield from check_tracker(config)
    for place, value in walk(config.get(VARIABLES), VARIABLES):  # numbers that no record can be read with again
        if isinstance(value, int | float) and not abs(value) < LARGEST:
            yield Fault(place, f"{value!r} is no number of 64 bits, which a record holds; give it as a text")


def made_sound(config: Mapping[str, Any], faults: Iterable[Fault]) -> dict[str, Any]:
    """Return ``config`` with the default of every key that is missing or faulty: then its other keys can be checked.

    Of a group of keys those that are sound stay as they are.
    """
    faulty = {tuple(fault.key.split(".")[:depth]) for fault in faults for depth in (1, 2)}
    plain = default_config()
    return plain | {
        key: _sound_group(key, value, plain.get(key), faulty) if (key,) in faulty else value
        for key, value in config.items()
        if (key,) not in faulty or key in plain
    }


def _sound_group(name: str, given: Any, plain: Any, faulty: Collection[tuple[str, ...]]) -> Any:
    if not isinstance(given, Mapping) or not isinstance(plain, Mapping):
        return plain
    return {**plain, **{key: value for key, value in given.items() if (name, key) not in faulty}}


def _check_stages(config: Mapping[str, Any], known_stages: Sequence[str]) -> Iterable[Fault]:
    chosen = config["stages"]
    if not chosen:
        yield Fault("stages", "the list is empty; stages=generate runs them all")
    for name in dict.fromkeys(chosen):
        if name not in known_stages:
            near = closest(name, known_stages)
            yield Fault("stages", f"{name!r} is no stage{near}; installed are {', '.join(known_stages)}")
    last = config["stop_after"]
    if last is not None and last not in chosen:
        yield Fault("stop_after", f"{last!r} is not among the stages {', '.join(chosen)}{closest(str(last), chosen)}")
