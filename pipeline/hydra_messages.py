"""What Hydra and OmegaConf say, in a line of this command's: which key, what was received, the rule, the next step."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from types import FrameType
from typing import Any

from hydra.conf import HydraConf
from hydra.errors import HydraException, OverrideParseException
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import (
    ConfigCycleDetectedException,
    ConfigTypeError,
    GrammarParseError,
    InterpolationResolutionError,
    OmegaConfBaseException,
    ValidationError,
)
from yaml import MarkedYAMLError, YAMLError

from offstage.pipeline.errors import ConfigError, apart, causes, closest, words_of
from offstage.pipeline.typed_config import DEVICES, NO_DEVICE, VARIABLES

COMPOSING_ERRORS = (HydraException, OmegaConfBaseException)
SHOWS_KEYS = "offstage --cfg job shows every key"

_MISTYPED = (ValidationError, ConfigTypeError)
_NOISE = ("full_key:", "object_type=", "reference_type=", "Config search path", "provider=")
_MADE_OF_OUTPUTS = ("hydra.run.dir", "hydra.sweep.dir")
_YAML_RULES = {
    "'\\t'": "YAML is indented by spaces; write them in the place of the tab",
    "found duplicate key": "a key is given once; leave one of them out",
    "mapping values are not allowed": "one 'KEY: VALUE' a line, those of a group indented below it; quote a value that "
    "has ': ' in it",
    "<block end>": "the keys of one group begin in the same column; indent this line as those above it",
    "could not find expected ':'": "a line is 'KEY: VALUE', with a space behind the colon",
}
"""What to do about what a message of YAML's has in it."""


def one_line(error: Exception) -> str:
    """Return what Hydra's message and its cause's come to in one line, with the closest key where one was misspelt.

    What a resolver of this command refuses is told in its own words.
    """
    refused: BaseException | None = error
    while refused is not None and not isinstance(refused, ConfigError):
        refused = refused.__context__
    if refused is not None:
        return str(refused)
    chain = list(causes(error))
    texts = list(dict.fromkeys(str(each) for each in (error, error.__cause__) if each is not None))
    lines = [line.strip() for text in texts for line in text.splitlines() if line.strip()]
    said = "\n".join(lines)
    matched = ((match, say) for pattern, say in _SAID if (match := re.search(pattern, said)))
    messages = (say.format("", *match.groups()) if isinstance(say, str) else say(match) for match, say in matched)
    message = next(messages, None) or next(filter(None, map(_said_of, chain)), None)
    return message or "; ".join(dict.fromkeys(line.rstrip(":") for line in lines if not line.startswith(_NOISE)))


def said_of_yaml(error: YAMLError) -> str:
    """Return where a config file is no YAML, why, and what YAML wants there, in one line."""
    if not isinstance(error, MarkedYAMLError) or error.problem_mark is None:
        return f"a config file: {one_line(error)}"
    mark, problem = error.problem_mark, str(error.problem)
    rule = next((rule for words, rule in _YAML_RULES.items() if words in problem), error.context)
    return f"{mark.name}, line {mark.line + 1}, column {mark.column + 1}: {problem}; {rule or 'it is no YAML there'}"


def _said_of(error: BaseException) -> str | None:
    """Return what one of the errors behind another says by its kind, null where it says no more than its words."""
    if isinstance(error, OverrideParseException):
        return _said_of_override(str(error.override))
    if isinstance(error, GrammarParseError) and error.full_key:
        return f"{error.full_key}: {error.value!r} is no interpolation; give ${{KEY}} or ${{oc.env:NAME}}, brace closed"
    if isinstance(error, InterpolationResolutionError | ConfigCycleDetectedException) and error.full_key:
        key = f"outputs, or {error.full_key}" if error.full_key in _MADE_OF_OUTPUTS else error.full_key
        return f"{key}: {_said_of_interpolation(error)}"
    if isinstance(error, _MISTYPED) and error.full_key:
        return f"{error.full_key}: {_said_of_type(error)}"
    return None


def _said_of_override(given: str) -> str:
    """Return what is wrong with an argument that Hydra's grammar doesn't take."""
    key, sign, value = given.partition("=")
    if not sign:
        return f"{given!r} is no KEY=VALUE; a key is set by {given}=VALUE, and options begin with --"
    if key != key.strip() or " " in key.strip():
        return f"{given!r}: no spaces belong around '='; write {key.strip()}={value.strip()}"
    if any(not part.strip() for part in value.split(",")) and not set(value) & set("[{('\""):
        return f"{key}: {value!r} has an empty value between its commas; leave it out, or write null or '' for one"
    return (
        f"{key}: {value!r} can't be read; brackets and quotes are closed, a mapping is {{KEY: VALUE}}, a list [A,B], "
        "and text with other signs stands in quotes, which a shell needs quoted again"
    )


def _said_of_interpolation(error: OmegaConfBaseException) -> str:
    said = str(error).splitlines()[0]
    variable = re.search(r"Environment variable '(.*)' not found", said)
    if variable is not None:
        given = f"${{oc.env:{variable[1]},VALUE}}"
        return f"the environment has no variable {variable[1]!r}; set it, or give a value for where it isn't: {given}"
    key = re.search(r"Interpolation key '(.*)' not found", said)
    if key is not None:
        return f"${{{key[1]}}} refers to a key that there isn't{closest_key(key[1])}; {SHOWS_KEYS}"
    kind = re.search(r"Unsupported interpolation type (\S+)", said)
    if kind is not None:
        near = closest(kind[1], ("oc.env", "oc.select", "oc.decode", "oc.create", "hydra", "now", "offstage.embedded"))
        return f"${{{kind[1]}:…}} is no kind of interpolation{near}; a key is ${{KEY}}, a variable ${{oc.env:VARIABLE}}"
    if "ecursive interpolation" in said:
        return "it refers to itself; give it a value"
    return said


def _said_of_type(error: OmegaConfBaseException) -> str:
    """Return what is wrong with the value of a key whose type is known, and how it is written."""
    key, said = str(error.full_key), str(error).splitlines()[0]
    if key == "max_memory":
        return f"{'a list' if error.value is None else repr(error.value)} {NO_DEVICE}"
    if key.startswith("max_memory."):
        if error.value is None:
            return "null is no size; give one, or leave the key out"
        return f"{error.value!r} is no size; give one, as {key}=2MB, or to sweep over several -m {key}=2MB,4MB"
    if key == VARIABLES:
        given = "null" if "is not Optional" in said else "a list" if error.value is None else repr(error.value)
        return (
            f"{given} is no mapping; give variables of your own with their names, as {{lab: …}}, or leave the key out"
        )
    if said.startswith("Cannot assign"):
        return f"{error.value!r} is no mapping of keys to values; write them below it, each as KEY: VALUE"
    return said


def _said_of_key(match: re.Match[str]) -> str:
    key = match[1]
    if key.startswith("hydra."):
        beside, part = [entry.name for entry in fields(HydraConf)], key.split(".")[1]
        near = closest(part, beside) if part not in beside else ""
        return f"{key}: unknown key of Hydra's{near}; offstage --cfg hydra shows them"
    return f"{key}: unknown key{closest_key(key)}; {SHOWS_KEYS}"


def said_of_variables(key: str) -> str:
    """Return how a variable of the user's own is written, who has written ``key`` where keys of the config stand."""
    return (
        f", and variables of your own stand below {VARIABLES}: {{{VARIABLES}: {{{key}: …}}}}, used as "
        f"${{{VARIABLES}.{key}}}"
    )


def _said_of_choice(match: re.Match[str]) -> str:
    """Return what is wrong with the choice of a file that there isn't, among those of its group or in no group."""
    where, (group, _, name), said = match[1], match[2].rpartition("/"), match.string
    own = where.rpartition("/")[0]
    if not own.startswith("hydra") and group.startswith(f"{own}/"):
        return (
            f"{where}: its defaults choose {name!r} of {group!r}, which there isn't; a group of the root begins with a "
            f"slash: - override /{group.removeprefix(f'{own}/')}: {name}"
        )
    listed = re.search(r"Available options in '.*':\n((?:(?!Config search path).+\n?)*)", said)
    names = listed[1].split() if listed is not None else []
    places: list[str] = re.findall(r"path=file://(.*)", said)
    named = ", ".join(places) + _there(places, match[2])
    looked = f"; own files are looked for as {match[2]}.yaml in {named}" if places else ""
    if not names:
        return f"{group or where}: there is no file {name!r} to choose{looked}"
    return f"{group}: {name!r} is no file of that group{closest(name, names)}; there are {', '.join(names)}{looked}"


def _there(places: Sequence[str], choice: str) -> str:
    """Return what lies in ``places`` of a like name, in words, empty where nothing does."""
    name = choice.rpartition("/")[2]
    for place in map(Path, places):
        for other in (f"{choice}.yml", f"{name}.yaml", f"{name}.yml"):
            if place.joinpath(other).is_file():
                return f", where {other} lies: move it"
    return ""


_SAID: Sequence[tuple[str, str | Callable[[re.Match[str]], str]]] = (
    (r"In '(.*)': Could not override '.*/(\w+)@.*'",
     "{1}: 'override {2}' in its defaults means a group below its own; one of the root begins with a slash: - override "
     "/{2}: NAME"),
    (r"Could not override '(.*?)'", _said_of_key),
    (r"Key '(.*)' not in 'Schema'", lambda match: f"{_said_of_key(match)}{said_of_variables(match[1])}"),
    (r"Key '.*' not in '\w+'(?:.|\n)*full_key: (hydra\.\S+)", _said_of_key),
    (r"Key '(.*)' is incompatible with the enum type 'Device'", f"max_memory.{{1}}: {{1!r}} is no device; {DEVICES}"),
    (r"In '(.*)': Could not (?:find|load) '(.*?)'", _said_of_choice),
    (r"Additional config directory '(.*)' not found", lambda match:
     f"--config-dir: {match[1]!r} is {'a file' if Path(match[1]).is_file() else 'not there'}; give the folder that has "
     "your experiment/, model/ or hardware/ in it"),
    (r"Multiple values for (\S+)\. To override a value use 'override \S+: (.+)'",
     "{1}: its file is chosen twice; a choice that replaces another is - override /{1}: {2}"),
    (r"Ambiguous value for argument '(.*?)=(.*)'",
     "{1}: {2!r} is several values; one job each is offstage -m {1}={2}, a list {1}=[{2}], a text with commas "
     "\"{1}='{2}'\""),
    (r"An item is already at '(.*)'", "+{1}: the config has that key; {1}=VALUE, without '+', changes it"),
    (r"Could not delete from config\. '(.*)' does not exist", lambda match:
     f"~{match[1]}: the config has no such key{closest_key(match[1])}; {SHOWS_KEYS}"),
    (r"Invalid plugin 'offstage\.",
     "hydra/sweeper: a sweeper of another package starts jobs by a launcher, and offstage has none; give basic or "
     "optuna"),
    (r"Config group override must be a string or a list\. Got (\w+)",
     "a group of files, as model or stages, is given a value of type {1}; give the name of a file of it: model=tiny"),
)  # fmt: skip
"""What a message is known by, and what is said in its place, of what it matched or by a function of the match."""


def closest_key(dotted: str) -> str:
    """Return `` (did you mean 'x'?)`` for the first part of a key that is unknown, among those beside it."""
    from offstage.pipeline.config import default_config

    beside: Any = default_config()
    for part in dotted.split("."):
        if not isinstance(beside, dict) or part not in beside:
            break
        beside = beside[part]
    return closest(part, beside if isinstance(beside, dict) else ())


NULL_IN_A_FILE = (
    "max_memory: a config file says null, and an override can't add to that; write {} in the file, which means the same"
)

_MANY_BRACKETS = 20


@contextmanager
def composing() -> Iterator[None]:
    """Turn what Hydra and OmegaConf raise in the block, for something of a user's, into a ``ConfigError``."""
    try:
        yield
    except ConfigError:
        raise
    except COMPOSING_ERRORS as error:
        raise ConfigError(_said_of_element(error) or one_line(error)) from apart(error)
    except UnboundLocalError as error:
        if not isinstance(error.__context__, OSError):
            raise
        raise error.__context__ from None  # Hydra closes what it couldn't open
    except (AttributeError, AssertionError) as error:
        if _frame_of_override(error) is not None:  # over a null, to add something to it
            raise ConfigError(NULL_IN_A_FILE) from apart(error)
        _refuse_file(error)
        raise
    except RecursionError as error:
        raise ConfigError(f"{_most_nested(sys.argv[1:])}: nested too deep to be read; nest it less") from apart(error)
    except YAMLError as error:
        raise ConfigError(said_of_yaml(error)) from apart(error)
    except (ValueError, TypeError, RuntimeError) as error:
        if (said := _said_of_element(error)) is not None:
            raise ConfigError(said) from apart(error)
        _refuse_file(error)
        *_, (frame, _) = traceback.walk_tb(error.__traceback__)
        module = str(frame.f_globals.get("__name__", ""))  # what Hydra or logging says no to, it was given
        if not module.startswith(("hydra.", "logging.")):
            raise
        about = "hydra.job_logging: " if module.startswith("logging.") else ""
        raise ConfigError(f"{about}{one_line(error)}") from apart(error)


def _frame_of_override(error: BaseException) -> FrameType | None:
    """Return where Hydra was with the override that ``error`` came of; null where it came of something else."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame for frame in frames if frame.f_code.co_name == "_apply_overrides_to_config"), None)


def _said_of_element(error: BaseException) -> str | None:
    """Return what is wrong with an override that goes into a list; null where ``error`` came of something else."""
    frame = _frame_of_override(error)
    if frame is None or "override" not in frame.f_locals:
        return None
    override, config = frame.f_locals["override"], frame.f_locals["cfg"]
    parts = str(override.key_or_group).split(".")
    places = [".".join(parts[:depth]) for depth in range(1, len(parts))]
    place = next((each for each in places if isinstance(OmegaConf.select(config, each), ListConfig)), None)
    if place is None:
        return None
    if override.is_delete():
        return f"~{override.key_or_group}: no element is taken out of a list; give the list without it, {place}=[A,B]"
    count = len(OmegaConf.select(config, place))
    return (
        f"{override.input_line}: {place} is a list of {count}, whose elements go by numbers from 0 on; give one that "
        f"is there, as {place}.0=VALUE, or the whole list, {place}=[A,B]"
    )


def _most_nested(arguments: Sequence[str]) -> str:
    """Return the key of the argument with the most brackets, where that is many: else it stands in a file."""
    nesting = {text.partition("=")[0]: text.count("[") + text.count("{") for text in arguments}
    deepest = max(nesting, key=nesting.__getitem__, default="")
    return deepest if nesting.get(deepest, 0) > _MANY_BRACKETS else "a config file"


def _refuse_file(error: Exception) -> None:
    """Raise a ``ConfigError`` about the config file that Hydra was looking for, or reading, when ``error`` came."""
    file = None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        if frame.f_code.co_name == "load_config":
            file = str(frame.f_locals.get("full_path", frame.f_locals["config_path"]))
    if file is not None:
        raise ConfigError(f"{file!r} can't be read as a config file in UTF-8: {words_of(error)}") from error
