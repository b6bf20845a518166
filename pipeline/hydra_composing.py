"""A run's config, composed once. Hydra does so twice: to ask the config whether it is a sweep, and again for the run.

Each time takes a tenth of a second, of a cached run's seven. The first is done here as the second would be, and where
the run is next, it gets what was composed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra._internal import utils
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS

_MOST_DEFAULTS = 250
"""Each takes Hydra milliseconds, or those of all that it names."""
_IS_RUN = f"hydra.mode={RunMode.RUN.name}"
"""What Hydra adds to the overrides of a run whose config says nothing of a mode."""


@contextmanager
def composed_once(refuse: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Have Hydra compose the config of a single run once while this is entered, and raise its errors, not print them.

    ``refuse`` raises what it has against the files that were read for it, before Hydra carries out what they say.
    Raises a ``ConfigError`` where the user's own files are why nothing can be composed, or not what they mean.
    """
    ask: Callable[..., Any] = Hydra.get_mode
    asked: list[tuple[Any, str | None, Sequence[str]]] = []

    def get_mode(hydra: Any, config_name: str | None, overrides: list[str]) -> Any:
        loader, given = hydra.config_loader, tuple(overrides)
        asked.append((loader, config_name, given))
        composed: Any
        try:
            composed = loader.load_configuration(config_name, list(given), RunMode.RUN)
            mode = composed.hydra.mode
            if _has_nested_group(composed):
                _refuse_files(asked)
        except COMPOSING_ERRORS as error:  # a sweep's overrides are none of a run's; or the run will say it
            composed, mode = error, ask(hydra, config_name=config_name, overrides=overrides)
        refuse()
        if mode in (None, RunMode.RUN):
            _serve_once(loader, given, composed)
        return mode

    hydra_class: Any = Hydra
    hydra_utils: Any = utils
    reported, hydra_class.get_mode = hydra_utils.run_and_report, get_mode
    hydra_utils.run_and_report = lambda work: work()
    try:
        yield
    except COMPOSING_ERRORS as error:
        _refuse_files(asked, error)
        raise
    finally:
        hydra_class.get_mode, hydra_utils.run_and_report = ask, reported


@contextmanager
def noted_files(files: dict[str, str]) -> Iterator[None]:
    """Note in ``files`` each config file of a folder that Hydra reads while this is entered: its SHA-256, by its name.

    A name is that in its folder of configs: experiment/mine. What is installed isn't among them. Raises a
    ``ConfigError`` for a list of defaults that would take Hydra seconds.
    """
    kind: Any = SourcesRegistry.instance().resolve("file")
    load = kind.load_config

    def read(source: Any, config_path: str) -> Any:
        result = load(source, config_path)
        name = source._normalize_file_name(config_path)
        defaults = result.config.get("defaults") if isinstance(result.config, DictConfig) else None
        if isinstance(defaults, ListConfig) and len(defaults) > _MOST_DEFAULTS:
            path = str(Path(source.path, name))
            raise ConfigError(f"{path!r}: {len(defaults)} defaults; give {_MOST_DEFAULTS} at most")
        files[name.removesuffix(".yaml")] = hashlib.sha256(Path(source.path, name).read_bytes()).hexdigest()
        return result

    kind.load_config = read
    try:
        yield
    finally:
        kind.load_config = load


def _refuse_files(asked: Iterable[tuple[Any, str | None, Sequence[str]]], error: Exception | None = None) -> None:
    from offstage.pipeline.config_files import refuse_files

    for each in asked:
        refuse_files(*each, error=error)


def _has_nested_group(composed: DictConfig) -> bool:
    """Return whether a group's keys have one of the group's own name: those of a file landed one too deep."""
    return any(isinstance(node, DictConfig) and name in node for name, node in composed.items_ex(resolve=False))


def _serve_once(loader: Any, given: Sequence[str], composed: DictConfig | BaseException) -> None:
    """Have ``loader`` answer with what is ``composed`` already, if it is asked next for the run of these overrides."""

    def load_configuration(
        config_name: str | None, overrides: list[str], run_mode: RunMode, **options: bool
    ) -> DictConfig:
        del loader.load_configuration  # its class's own is there again
        added = [each for each in overrides[len(given) :] if each != _IS_RUN]
        if run_mode != RunMode.RUN or tuple(overrides[: len(given)]) != given or added:
            config: DictConfig = loader.load_configuration(config_name, overrides, run_mode, **options)
            return config
        if isinstance(composed, BaseException):
            raise composed
        if len(overrides) > len(given):
            composed.hydra.mode = RunMode.RUN
            composed.hydra.overrides.hydra.append(_IS_RUN)
        return composed

    loader.load_configuration = load_configuration
