"""The root config: the keys of the runner and those that the installed stages bring, and their checks.

Every fault of a config is found before any work and all are reported together, so value checks are made here and by
the stages, not by the first line of code that trips over a value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, fields, make_dataclass
from enum import Enum
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
    OmegaConf.register_new_resolver("offstage.embedded", _embedded, replace=True)


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
            hint = _mapping_of(entry.metadata.get(KEYS)) if plain[entry.name] == {} else Any
            schema_fields.append((entry.name, hint, field(default_factory=partial(deepcopy, plain[entry.name]))))
    node: DictConfig = OmegaConf.structured(make_dataclass("Schema", schema_fields))
    for kind in kinds:  # a dotted override may add a key to a mapping: max_memory.1=3GB, generate.top_k=2
        _open_mappings(node, defaults(kind))
    return node


def _mapping_of(keys: type[Enum] | None) -> Any:
    return Dict[str, Any] if keys is None else Optional[Dict[keys, str]]  # type: ignore[valid-type]  # noqa: UP006, UP045


def _embedded(name: str) -> str:
    return str(resources.files("offstage.conf").joinpath("checkpoints", name))


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
    for path_key in _paths():
        try:
            path_key.change(plain, path_key.locate)
        except ConfigError as error:
            raise ConfigError(f"{path_key.dotted}: {error}") from error
    for name, key, lines in _read_from_standard_input(plain):
        plain[name][lines] = read_lines(f"{name}.{key}")
    return {str(key): value for key, value in plain.items()}


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


@dataclass(frozen=True, slots=True)
class _PathKey:
    """A key ``name``, or the one ``below`` it, that is a path, or a list with some somewhere in it.

    ``locate`` makes a path mean one place from any folder; ``within`` is null where the key is a path itself, else it
    returns such a list with each path in it as a function has it.
    """

    name: str
    below: str
    locate: Callable[[str], str]
    within: Callable[[Any, Callable[[str], str]], Any] | None = None

    @property
    def dotted(self) -> str:
        return f"{self.name}.{self.below}" if self.below else self.name

    def value(self, config: Mapping[str, Any]) -> Any:
        """Return what ``config`` has of it, null where it has no path."""
        node = config.get(self.name)
        entry = node if not self.below else node.get(self.below) if isinstance(node, Mapping) else None
        return entry if isinstance(entry, str if self.within is None else list) and entry else None

    def paths(self, config: Mapping[str, Any]) -> list[str]:
        """Return the paths that ``config`` has of it."""
        value, paths = self.value(config), list[str]()

        def note(path: str) -> str:
            paths.append(path)
            return path

        if value is not None:
            note(value) if self.within is None else self.within(value, note)
        return paths

    def change(self, config: dict[str, Any], change: Callable[[str], str]) -> None:
        """Have ``config`` have what ``change`` makes of each path."""
        value = self.value(config)
        if value is not None:
            node, last = (config[self.name], self.below) if self.below else (config, self.name)
            node[last] = change(value) if self.within is None else self.within(value, change)


def _paths() -> Iterator[_PathKey]:
    """Yield each key that is a path or holds some."""
    for entry in (entry for kind in config_classes() for entry in fields(kind)):
        streams = entry.metadata.get(STANDARD_INPUT, {})
        for key, locate in entry.metadata.get(PATHS, {}).items():
            yield _PathKey(entry.name, key, partial(_unless_sign, locate) if key in streams else locate)
        for key, within in entry.metadata.get(PATHS_INSIDE, {}).items():
            yield _PathKey(entry.name, key, absolute, within)


def named_paths(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the dotted key of each path that ``config`` names, and what it means: absolute, unless it is no path here.

    A Hub id is none, nor is the name of a policy.
    """
    for place in _paths():
        yield from ((place.dotted, _meant(place.locate, path)) for path in place.paths(config))


def path_keys() -> dict[str, Callable[[str], str]]:
    """Return the dotted key of each path of a config, and what makes a text that is given for it mean one place."""
    return {place.dotted: place.locate for place in _paths() if place.within is None}


def with_paths(config: Mapping[str, Any], change: Callable[[str, str], str]) -> dict[str, Any]:
    """Return a copy of ``config`` in which each path that it names is what ``change`` makes of its key and of it."""
    changed = deepcopy(dict(config))
    for place in _paths():
        if place.within is not None or "/" in (place.value(changed) or ""):  # else the name of something, a policy's
            place.change(changed, partial(change, place.dotted))
    return changed


def _meant(locate: Callable[[str], str], path: str) -> str:
    try:
        return locate(path)
    except ConfigError:  # the home of a user that isn't one
        return path


def _unless_sign(locate: Callable[[str], str], path: str) -> str:
    return path if path == SIGN else locate(path)


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
    yield from _check_variables(config.get(VARIABLES))


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


def _check_variables(given: object) -> Iterable[Fault]:
    """Yield the numbers among the user's variables that no record can be read with again."""
    for place, value in walk(given, VARIABLES):
        if isinstance(value, int | float) and not abs(value) < LARGEST:
            yield Fault(place, f"{value!r} is no number of 64 bits, which a record holds; give it as a text")


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
