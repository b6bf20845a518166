"""Hydra's and OmegaConf's errors, and what it is of a user's that they come of: an argument, or a config file."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from yaml import YAMLError

from offstage.pipeline.errors import ConfigError, words_of
from offstage.pipeline.hydra_messages import COMPOSING_ERRORS, one_line, said_of_yaml

NULL_IN_A_FILE = (
    "max_memory: a config file says null, and an override can't add to that; write {} in the file, which means the same"
)

_COMPOSERS = ("hydra.", "omegaconf.", "antlr4.", "yaml.")
_MANY_FRAMES = 100
"""Calls of what reads a config that are under way where it recurses, at the least; around a stage it is a dozen."""
_MANY_BRACKETS = 20


@contextmanager
def composing() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise in the block, for something of a user's, into a ``ConfigError``."""
    try:
        yield
    except ConfigError:
        raise
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
        raise ConfigError(said_of_yaml(error)) from error
    except (ValueError, RuntimeError) as error:
        _refuse_file(error)
        module = _module_that_raised(error)
        if not module.startswith(("hydra.", "logging.")):
            raise
        about = "hydra.job_logging: " if module.startswith("logging.") else ""
        raise ConfigError(f"{about}{one_line(error)}") from error


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
