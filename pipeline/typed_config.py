"""Typed configs: the keys of a stage as a frozen dataclass, which holds their defaults and is the one place for them.

A field of the class is a key of the root config; a field whose type is a dataclass, or a dataclass or null, is a group
of keys below it. What a user gives is held against the types here and not by OmegaConf, which reports one fault at a
time and lets nobody override what a frozen class declares.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import Field, fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from offstage.pipeline.errors import ConfigError, Fault, closest


class _Named(Enum):
    """Keys that are shown by their names: a shell's completion has ``max_memory.cpu=`` so."""

    def __str__(self) -> str:
        return str(self.name)


_MEMBERS: Mapping[str, int | str] = {**{str(i): i for i in range(16)}, "cpu": "cpu", "disk": "disk"}
DEVICE_NAMES = tuple(_MEMBERS)
Device = _Named("Device", _MEMBERS)  # type: ignore[call-arg]
"""The keys of ``max_memory``. OmegaConf finds a member by name from a string and by value from an int, so that YAML's
``0`` and the command line's ``max_memory.0`` meet in one key. What a stage reads has their names."""

DEVICES = "devices are cpu, disk and the numbers of accelerators, from 0 to 15"
"""What the keys of ``max_memory`` may be, in words."""

NO_DEVICE = (
    "names no device; give each its own size, as {cpu: 1GB} or {0: 12GB, cpu: 20GB}, or {} to have it worked out"
)
"""What is wrong with a value of ``max_memory`` that is no mapping, a size alone above all."""

VARIABLES = "vars"
"""The key below which users keep variables of their own, for interpolations: data that nothing reads."""

KEYS = "keys"
"""What a field's metadata has under this name is the Enum that the keys of its mapping are members of."""

PATHS = "paths"
"""What a field's metadata has under this name says which paths it holds: the key of each in the field's mapping, or
``""`` for the field itself, and the function that makes the path one that means the same from any folder."""

PATHS_INSIDE = "paths inside"
"""What a field's metadata has under this name says which keys have lists with paths somewhere in them: the key of each,
and the function that returns such a list with each path in it as another function has it."""

STANDARD_INPUT = "standard input"
"""What a field's metadata has under this name says which paths may be ``-``, standard input: the key of each in the
field's mapping, and the key that its lines stand under then, in a list. They are read once, as the config is resolved,
so that the record has them, and whoever runs the record again."""

LEAST = "least"
"""What a field's metadata has under this name is the least of the numbers that it may hold."""

OPEN = "open"
"""What a field's metadata has under this name is a dataclass: those of the mapping's keys that it has are of its types,
or null, which is its default. What the other keys are is for the stage to say."""

Keys = TypeVar("Keys")

_SCALARS: Mapping[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}
_ONE: Mapping[type, str] = {int: "a whole number", float: "a number", str: "a text"}
_MANY: Mapping[type, str] = {bool: "flags", int: "whole numbers", float: "numbers", str: "texts"}


def defaults(kind: type[Any]) -> dict[str, Any]:
    """Return the keys of the typed config ``kind`` with their defaults, as plain data; each must have one."""
    instance = kind()
    values = {entry.name: getattr(instance, entry.name) for entry in fields(kind)}
    return {name: defaults(type(value)) if is_dataclass(value) else value for name, value in values.items()}


def absolute(path: str) -> str:
    """Return ``path`` as an absolute one; a ``ConfigError`` where it begins with a home that can't be found."""
    return str(expanded(path).absolute())


def expanded(path: str) -> Path:
    """Return ``path`` with the home folder that it may begin with; a ``ConfigError`` where that can't be found."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ConfigError(
            f"{path!r} begins with the home folder of a user that there isn't; write it from / on, or ./~… for a "
            "folder of that name"
        ) from error


def read(kind: type[Keys], config: Mapping[str, Any]) -> Keys:
    """Return the keys of ``config`` that ``kind`` has, as one; a key that isn't given has its default."""
    hints = get_type_hints(kind)
    given = {name: config[name] for name in key_names([kind]) if name in config}
    return kind(**{name: _read(hints[name], value) for name, value in given.items()})


def read_open(kind: type[Keys], config: Mapping[str, Any], *, others: str) -> Keys:
    """Return the keys of ``config`` that aren't null as one of ``kind``, which holds those it hasn't as ``others``."""
    names, given = key_names([kind]), _without_null(config)
    rest = {str(name): value for name, value in given.items() if name not in names or name == others}
    return read(kind, {**{name: value for name, value in given.items() if name not in rest}, others: rest})


def _read(hint: Any, value: Any) -> Any:
    group = _group_of(hint)
    return value if group is None or value is None else read(group, value)


def _group_of(hint: Any) -> type[Any] | None:
    """Return the dataclass that ``hint`` says, alone or beside null; null where it says something else."""
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    kinds = [arm for arm in arms if arm is not type(None)]
    return kinds[0] if len(kinds) == 1 and isinstance(kinds[0], type) and is_dataclass(kinds[0]) else None


def type_faults(kind: type[Any], config: Mapping[str, Any], *, above: str = "") -> Iterator[Fault]:
    """Yield the keys of ``config`` whose values aren't of their types in ``kind``, and unknown ones in its groups."""
    hints, plain = get_type_hints(kind), defaults(kind)
    for entry in (entry for entry in fields(kind) if entry.name in config):
        yield from _value_faults(
            f"{above}{entry.name}", hints[entry.name], config[entry.name], entry, plain[entry.name]
        )


def _value_faults(key: str, hint: Any, value: Any, entry: Field[Any], default: object) -> Iterator[Fault]:
    group, least = _group_of(hint), entry.metadata.get(LEAST)
    if group is not None and isinstance(value, Mapping):
        yield from unknown_keys(value, [inner.name for inner in fields(group)], above=f"{key}.")
        yield from type_faults(group, value, above=f"{key}.")
    elif not fits(hint, value) or _is_less(value, least):
        yield Fault(key, f"{value!r} {_rule(hint, value, least)}; the default is {default!r}")
    elif OPEN in entry.metadata:
        yield from type_faults(entry.metadata[OPEN], _without_null(value), above=f"{key}.")


def _without_null(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _is_less(value: object, least: int | None) -> bool:
    return least is not None and isinstance(value, int | float) and value < least


def unknown_keys(config: Mapping[str, Any], names: Sequence[str], *, above: str = "") -> Iterator[Fault]:
    """Yield the keys of ``config`` that aren't among ``names``, each with the closest that is."""
    for key in config:
        if key not in names:
            own = "" if above else f", and variables of your own stand below {VARIABLES}"
            yield Fault(
                f"{above}{key}", f"unknown key{closest(str(key), names)}; offstage --cfg job shows every key{own}"
            )


def fits(hint: Any, value: object) -> bool:
    """Return whether ``value``, as YAML gives it, is of the type that ``hint`` says."""
    kind = get_origin(hint) or hint
    if kind in (Union, UnionType):
        return any(fits(arm, value) for arm in get_args(hint))
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in get_args(hint))
    if kind in _SCALARS:
        return isinstance(value, _SCALARS[kind]) and (kind is bool or not isinstance(value, bool))
    if kind is type(None):
        return value is None
    if is_dataclass(kind) or (isinstance(kind, type) and issubclass(kind, Mapping)):
        return isinstance(value, Mapping)
    if isinstance(kind, type) and issubclass(kind, Sequence):
        items = [arm for arm in get_args(hint) if arm is not Ellipsis]
        return isinstance(value, list | tuple) and all(fits(items[0], item) for item in value if items)
    return True


def _rule(hint: Any, value: object, least: int | None) -> str:
    """Return what ``value`` breaks that ``hint`` says, in words; of numbers it is one from ``least``."""
    arms = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    words = [word for arm in arms for word in _words(arm, least)]
    choices = [str(choice) for arm in arms if get_origin(arm) is Literal for choice in get_args(arm)]
    near, null = closest(str(value), choices), " or null" if words[-1] == "null" else ""
    if words[: len(choices)] == choices and len(words) == len(choices) + bool(null):
        return f"is none of {', '.join(choices)}{null}{near}"
    if words[1:] in ([], ["null"]):
        return f"is no {words[0].removeprefix('a ')}{null}"
    return f"is neither {', '.join(words[:-1])} nor {words[-1]}{near}"


def _words(hint: Any, least: int | None) -> list[str]:
    """Return what is of the type ``hint``, in words."""
    kind = get_origin(hint) or hint
    if kind is Literal:
        return [str(choice) for choice in get_args(hint)]
    if kind is bool:
        return ["true", "false"]
    if kind is type(None):
        return ["null"]
    if kind in _ONE:
        return [_ONE[kind] + (f" from {least}" if least is not None and kind is not str else "")]
    if is_dataclass(kind):
        return [f"a group of the keys {', '.join(entry.name for entry in fields(kind))}"]
    if issubclass(kind, Mapping):
        return ["a mapping of keys to values"]
    many = next((_MANY[arm] for arm in get_args(hint) if arm in _MANY), None)
    return ["a list" + (f" of {many}" if many else "")]


def key_names(kinds: Iterable[type[Any]]) -> list[str]:
    """Return the names of all keys of ``kinds``."""
    return [entry.name for kind in kinds for entry in fields(kind)]
