"""A user's own config files, looked at one by one: where a config that was composed of them can't be right.

Hydra merges files until one doesn't fit, and names a key of what it merges into. Which file it was, and that its keys
landed below another one for want of a header, is only to be seen in the files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import OmegaConf

from offstage.pipeline.config import default_config
from offstage.pipeline.errors import ConfigError, Fault, closest
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS, SHOWS_KEYS, one_line, said_of_variables
from offstage.pipeline.typed_config import DEVICE_NAMES, DEVICES, NO_DEVICE

HEADER = "# @package _global_"
_HYDRA = ("hydra", "defaults")


def refuse_files(
    loader: Any, config_name: str | None, overrides: Sequence[str], *, error: Exception | None = None
) -> None:
    """Raise a ``ConfigError`` with what is wrong with the user's own files that ``loader`` makes this config of.

    With the ``error`` that composing it came to, that is told too, unless it is about one of these keys, and so are
    unknown keys of the ``overrides``. Where all are in order nothing is raised.
    """
    in_files = [fault for file in _own_files(loader, config_name, overrides) for fault in _faults(*file)]
    typed = list(_unknown_overrides(loader, overrides)) if error is not None else []
    messages = list(dict.fromkeys(map(str, (*in_files, *typed))))
    if typed and not in_files and error is not None:  # files are merged first, so that it isn't about one of them
        said = one_line(error)
        messages += [] if said.partition(": ")[0] in {fault.key for fault in typed} else [said]
    if messages:
        raise ConfigError("\n".join(messages))


def _unknown_overrides(loader: Any, overrides: Sequence[str]) -> Iterator[Fault]:
    config = default_config()
    try:
        given = OverridesParser.create().parse_overrides(list(overrides))
    except COMPOSING_ERRORS:
        return
    for each in given:
        key = each.get_key_element()
        root = key.partition(".")[0]
        if root not in config and root not in _HYDRA and key[0] not in "+~" and not loader.get_group_options(key):
            yield Fault(key, f"unknown key{closest(root, config)}; {SHOWS_KEYS}")


def _own_files(
    loader: Any, config_name: str | None, overrides: Sequence[str]
) -> Iterator[tuple[Path, str, Mapping[str, str | None], Any]]:
    """Yield the path, package, header and content of each file that isn't installed."""
    try:
        chosen = loader.compute_defaults_list(config_name, list(overrides), RunMode.MULTIRUN).defaults
        loaded = [(each, loader.repository.load_config(each.config_path)) for each in chosen]
    except COMPOSING_ERRORS:
        return
    for each, file in loaded:
        if file is not None and file.path.startswith("file://"):
            path = Path(file.path.removeprefix("file://"), f"{each.config_path.removesuffix('.yaml')}.yaml")
            yield path, each.package or "", file.header, OmegaConf.to_container(file.config, resolve=False)


def _faults(path: Path, package: str, header: Mapping[str, str | None], content: Any) -> Iterator[Fault]:
    if not isinstance(content, Mapping):
        yield Fault(package or path.stem, f"{path} holds a list; a config file holds keys, each as KEY: VALUE")
    elif package:
        yield from _package_faults(path, package, header, content)
    else:
        yield from (fault for key, value in content.items() for fault in _root_faults(path, str(key), value))


def _package_faults(
    path: Path, package: str, header: Mapping[str, str | None], content: Mapping[Any, Any]
) -> Iterator[Fault]:
    if package.split(".")[0] not in (*default_config(), *_HYDRA) and content:
        named = ", ".join(map(str, content))
        yield Fault(
            package,
            f"{path} has no header, so that its keys ({named}) landed below {package!r}, where none is known; write "
            f"{HEADER!r} as its first line",
        )
    elif package in content and header.get("package") is None:
        yield Fault(
            f"{package}.{package}",
            f"keys of a file of the group {package!r} stand below {package!r} already; in {path} write them without "
            f"'{package}:' above, or {HEADER!r} as its first line",
        )


def _root_faults(path: Path, key: str, value: Any) -> Iterator[Fault]:
    config = default_config()
    if key not in config and key not in _HYDRA:
        near = closest(key, config)
        own = "" if near else said_of_variables(key)
        yield Fault(key, f"unknown key{near} in {path}; {SHOWS_KEYS}{own}")
    elif key == "max_memory":
        yield from _budget_faults(path, value)
    elif isinstance(config.get(key), Mapping) and not _may_be_keys(value):
        yield Fault(key, f"{value!r} in {path} is no mapping; write its keys below it, each as KEY: VALUE")


def _budget_faults(path: Path, value: Any) -> Iterator[Fault]:
    if not _may_be_keys(value):
        yield Fault("max_memory", f"{value!r} in {path} {NO_DEVICE}")
    for device, size in value.items() if isinstance(value, Mapping) else ():
        if str(device) not in DEVICE_NAMES:
            yield Fault(f"max_memory.{device}", f"{device!r} in {path} is no device; {DEVICES}")
        elif size is None:
            yield Fault(f"max_memory.{device}", f"null in {path} is no size; give one, or leave the key out")


def _may_be_keys(value: Any) -> bool:
    return value is None or isinstance(value, Mapping) or (isinstance(value, str) and "${" in value)
