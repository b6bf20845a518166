"""What Hydra's command line takes and this one doesn't: refused in a line that says what to do instead."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from offstage.pipeline.errors import ConfigError

if TYPE_CHECKING:
    from argparse import ArgumentParser

    from hydra.core.config_loader import ConfigLoader
    from hydra.core.override_parser.types import Override


def refuse_arguments(arguments: Sequence[str]) -> None:
    """Raise a ``ConfigError`` that names those of ``arguments`` that are no options of Hydra's command line."""
    given, rest = _parser().parse_known_args(list(arguments))
    abridged = given.experimental_rerun is not None and not any("--experimental-r" in each for each in arguments)
    unknown = [each for each in rest if each.startswith("-")] + ["--experiment"] * abridged
    options = ((each, *each.lstrip("-").partition("=")[::2]) for each in unknown)
    said = [
        f"{each}: no such option; a key of the config has no dashes: {name}={value or 'VALUE'}; offstage --hydra-help "
        "shows the options"
        for each, name, value in options
    ]
    if said:
        raise ConfigError("\n".join(said))


def gather_overrides(arguments: Sequence[str]) -> list[str]:
    """Return ``arguments`` with all overrides before the options: Hydra's parser takes no more after the first of them.

    What it can't take is left for ``refuse_arguments`` to say.
    """
    options = list(arguments)
    try:
        given, rest = _parser().parse_known_args(options)
    except ConfigError:
        return options
    later = [each for each in rest if not each.startswith("-")]
    if not later:
        return options
    overrides = [*given.overrides, *later]
    for each in reversed(overrides):
        options.reverse()
        options.remove(each)
        options.reverse()
    return [*overrides, *options]


def _parser() -> ArgumentParser:
    """Return Hydra's parser of arguments, which says what it can't take as a ``ConfigError``."""
    from hydra._internal.utils import get_args_parser

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; offstage --hydra-help shows the options")

    parser: Any = get_args_parser()
    parser.error = refuse
    argument_parser: ArgumentParser = parser
    return argument_parser


def refuse_empty_sweeps(overrides: Iterable[Override], loader: ConfigLoader) -> None:
    """Raise a ``ConfigError`` that names each of ``overrides`` that is a sweep over nothing: there would be no job."""
    empty = [each for each in overrides if each.is_discrete_sweep() and not any(True for _ in each.sweep_iterator())]
    if empty:
        raise ConfigError("\n".join(f"{each.get_key_element()}: {_nothing_in(each, loader)}" for each in empty))


def _nothing_in(override: Override, loader: ConfigLoader) -> str:
    from hydra.core.object_type import ObjectType
    from hydra.core.override_parser.types import Glob

    given = str(override.input_line).partition("=")[2]
    if not isinstance(override.value(), Glob):
        return f"{given!r} has no value, so the sweep would have no job; give at least one"
    names = loader.get_group_options(override.key_or_group, results_filter=ObjectType.CONFIG)
    if names:
        return f"{given!r} matches no file of that group; there are {', '.join(sorted(names))}"
    example = f"{override.get_key_element()}=A,B"
    return f"{given!r} matches the files of a group, and this is none; list the values: {example}"
