"""Hydra's and OmegaConf's errors, in one line: which key, what is wrong, the closest key that exists."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from pipeline.command_exit import guarded
from pipeline.errors import ConfigError, closest

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException)

NULL_IN_A_FILE = (
    "max_memory: a config file says null, and an override can't add to that; write {} in the file, which means the same"
)


def guarded_composing(work: Callable[[], int], *, show_all: bool) -> int:
    """Return what ``work`` returns, or print the error that a user can mend and return its exit code.

    With ``show_all`` the error is raised on, to be seen with its traceback.
    """

    def compose() -> int:
        try:
            return work()
        except COMPOSING_ERRORS as error:
            raise ConfigError(one_line(error)) from error
        except UnboundLocalError as error:
            if not isinstance(error.__context__, OSError):
                raise
            raise error.__context__ from None  # Hydra closes what it couldn't open
        except (AttributeError, AssertionError) as error:
            if not _comes_from_an_override(error):
                raise
            raise ConfigError(NULL_IN_A_FILE) from error
        except YAMLError as error:
            place = getattr(error, "problem_mark", None)
            raise ConfigError(f"{place.name if place else 'a config file'}: {one_line(error)}") from error
        except (ValueError, RuntimeError) as error:
            module = _module_that_raised(error)
            if not module.startswith(("hydra.", "logging.")):
                raise
            about = "hydra.job_logging: " if module.startswith("logging.") else ""
            raise ConfigError(f"{about}{one_line(error)}") from error

    return guarded(compose, show_all=show_all)


def _comes_from_an_override(error: Exception) -> bool:
    """Return whether Hydra tripped as it applied an override: over a null that something was to be added to."""
    frames = traceback.extract_tb(error.__traceback__)
    return any(frame.name == "_apply_overrides_to_config" for frame in frames)


def _module_that_raised(error: Exception) -> str:
    """Return the name of the module whose code raised ``error``: what Hydra or logging says no to, it was given."""
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals.get("__name__", ""))


def one_line(error: Exception) -> str:
    """Return Hydra's message and its cause's in one line, with the closest key where one was misspelt.

    What a resolver of this command refuses is told in its own words.
    """
    refused: BaseException | None = error
    while refused is not None and not isinstance(refused, ConfigError):
        refused = refused.__context__
    if refused is not None:
        return str(refused)
    texts = [str(error)] + ([str(error.__cause__)] if error.__cause__ else [])
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    unknown = lines[0].partition("Could not override '")[2].partition("'")[0]
    if unknown:
        return f"{unknown}: unknown key{closest_key(unknown)}; --cfg job shows every key"
    noise = ("full_key:", "object_type=", "reference_type=", "Config search path", "provider=")
    kept = [line for line in lines if not line.startswith(noise)]
    return "; ".join(dict.fromkeys(kept))


def closest_key(dotted: str) -> str:
    """Return `` (did you mean 'x'?)`` for the first part of a key that is unknown, among those beside it."""
    from pipeline.config import default_config

    beside: Any = default_config()
    for part in dotted.split("."):
        if not isinstance(beside, dict) or part not in beside:
            break
        beside = beside[part]
    return closest(part, beside if isinstance(beside, dict) else ())
