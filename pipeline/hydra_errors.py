"""Hydra's and OmegaConf's errors, in one line: which key, what is wrong, the closest key that exists."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

from hydra.errors import HydraException
from omegaconf.errors import ConfigTypeError, OmegaConfBaseException, ValidationError
from yaml import YAMLError

from pipeline.command_exit import guarded
from pipeline.errors import ConfigError, closest, words_of
from pipeline.typed_config import NO_DEVICE, VARIABLES

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException)

NULL_IN_A_FILE = (
    "max_memory: a config file says null, and an override can't add to that; write {} in the file, which means the same"
)

_NOT_IN_ROOT = re.compile(r"Key '([^']+)' not in 'Schema'")
_MISTYPED = (ValidationError, ConfigTypeError)
_COMPOSERS = ("hydra.", "omegaconf.", "antlr4.", "yaml.")
_MANY_FRAMES = 100
"""Calls of what reads a config that are under way where it recurses, at the least; around a stage it is a dozen."""
_MANY_BRACKETS = 20


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
            if _comes_from_an_override(error):
                raise ConfigError(NULL_IN_A_FILE) from error
            _refuse_file(error)
            raise
        except RecursionError as error:
            if not _recursed_in_composing(error):
                raise
            raise ConfigError(f"{_most_nested(sys.argv[1:])}: nested too deep to be read; nest it less") from error
        except YAMLError as error:
            place = getattr(error, "problem_mark", None)
            raise ConfigError(f"{place.name if place else 'a config file'}: {one_line(error)}") from error
        except (ValueError, RuntimeError) as error:
            _refuse_file(error)
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


def _recursed_in_composing(error: RecursionError) -> bool:
    """Return whether it was what reads a config that came to the end of Python's stack, and not a stage's code."""
    raised = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    modules = [str(frame.f_globals.get("__name__", "")) for frame in (*raised, *_frames_up(raised[-1]))]
    return sum(module.startswith(_COMPOSERS) for module in modules) > _MANY_FRAMES


def _frames_up(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _most_nested(arguments: Sequence[str]) -> str:
    """Return the key of the argument with the most brackets, where that is many: else it stands in a file."""
    deepest = max(arguments, key=_brackets, default="")
    return deepest.partition("=")[0] if _brackets(deepest) > _MANY_BRACKETS else "a config file"


def _brackets(text: str) -> int:
    return text.count("[") + text.count("{")


def _refuse_file(error: Exception) -> None:
    """Raise a ``ConfigError`` about the config file that Hydra was looking for, or reading, when ``error`` came."""
    file = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "load_config":
            file = str(frame.f_locals.get("full_path", frame.f_locals["config_path"]))
    if file is not None:
        raise ConfigError(f"{file!r} can't be read as a config file in UTF-8: {words_of(error)}") from error


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
    stranger = next((found[1] for line in lines if (found := _NOT_IN_ROOT.search(line))), None)
    if stranger is not None:
        return _said_of_stranger(stranger, lines[0].partition(":")[0] if lines[0].startswith("In ") else "")
    mistyped = next((each for each in _causes(error) if isinstance(each, _MISTYPED) and each.full_key), None)
    if mistyped is not None:
        return f"{mistyped.full_key}: {_said_of_type(mistyped)}"
    noise = ("full_key:", "object_type=", "reference_type=", "Config search path", "provider=")
    kept = [line for line in lines if not line.startswith(noise)]
    return "; ".join(dict.fromkeys(kept))


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _said_of_stranger(key: str, place: str) -> str:
    """Return what is to be done about an unknown ``key`` of the root; ``place`` is ``In 'GROUP/FILE'`` or empty."""
    if place.startswith(f"In '{key}/"):
        return f"{place}: its keys are taken for those of {key}; begin the file with the line # @package _global_"
    return (
        f"{place}{': ' if place else ''}{key}: unknown key{closest_key(key)}; --cfg job shows every key, and variables "
        f"of your own stand below {VARIABLES}: {{{VARIABLES}: {{{key}: …}}}}, used as ${{{VARIABLES}.{key}}}"
    )


def _said_of_type(error: OmegaConfBaseException) -> str:
    """Return what is wrong with the value of a key whose type is known, and how it is written."""
    if error.full_key == "max_memory":
        return f"{'a list' if error.value is None else repr(error.value)} {NO_DEVICE}"
    if str(error.full_key).startswith("max_memory.") and error.value is None:
        return "null is no size; give one, or leave the key out"
    said = str(error).splitlines()[0]
    if error.full_key == VARIABLES:
        found = "null" if "is not Optional" in said else "a list" if error.value is None else repr(error.value)
        return (
            f"{found} is no mapping; give variables of your own with their names, as {{lab: …}}, or leave the key out"
        )
    return said


def closest_key(dotted: str) -> str:
    """Return `` (did you mean 'x'?)`` for the first part of a key that is unknown, among those beside it."""
    from pipeline.config import default_config

    beside: Any = default_config()
    for part in dotted.split("."):
        if not isinstance(beside, dict) or part not in beside:
            break
        beside = beside[part]
    return closest(part, beside if isinstance(beside, dict) else ())
