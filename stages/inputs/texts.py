"""What is scored: texts and continuations from the config, from a file of lines, or one long file.

They are read here, below the stage that scores them, since a plan leaves room for the windows that they are cut into.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from offstage.pipeline.errors import ConfigError, Fault, closest
from offstage.pipeline.regular_files import read_regular
from offstage.pipeline.typed_config import LEAST
from offstage.stages.inputs.line_file import LineFile, is_text
from offstage.stages.inputs.prompts import is_token_ids

LONGEST_WINDOW = 2048
"""The tokens of a window where nobody says how many, and the model's context is longer or not known."""

_KINDS = "give text, a list of token ids, or a mapping of context and continuation, both text or both token ids"
_FILE = LineFile("score.texts_file", "text", _KINDS)

_EXAMPLE = "The weights of a model are the parameters that it learns from data."

Tokens = str | list[int]
"""What tokens are made of, or the ids themselves."""


@dataclass(frozen=True, slots=True)
class ScoreOptions:
    """The keys below ``score``; ``conf/config.yaml`` says what each means."""

    texts: Sequence[Any] | str = field(default_factory=lambda: [_EXAMPLE])
    texts_file: str | None = None
    text_file: str | None = None
    window: int | None = field(default=None, metadata={LEAST: 2})
    stride: int | None = field(default=None, metadata={LEAST: 1})
    batch_size: int | Literal["auto"] = field(default=1, metadata={LEAST: 1})
    exact: bool = False

    def windows(self, context: int) -> tuple[int, int]:
        """Return the tokens of a window, and from the beginning of one to that of the next.

        ``context`` is how many tokens the model has positions for, 0 where that isn't known.
        """
        window = self.window or min(context or LONGEST_WINDOW, LONGEST_WINDOW)
        return window, self.stride or window


@dataclass(frozen=True, slots=True)
class ScoredText:
    """``content`` is what is scored; ``context`` is what comes before it and isn't, null where nothing does."""

    content: Tokens
    context: Tokens | None = None

    @property
    def whole(self) -> Tokens:
        """The context and what is scored, in one."""
        if isinstance(self.content, str):
            return (self.context if isinstance(self.context, str) else "") + self.content
        return [*(self.context if isinstance(self.context, list) else ()), *self.content]


def check_texts(options: ScoreOptions) -> Iterable[Fault]:
    """Yield what is wrong with the texts and the sizes of windows, as far as the model needn't be known."""
    yield from check_stride(options, options.window)
    if options.texts_file is not None and options.text_file is not None:
        yield Fault("score.text_file", "texts_file is given too; give one of them")
    try:
        read_scored_texts(options)
    except ConfigError as error:
        yield Fault.of(error)


def check_stride(options: ScoreOptions, window: int | None) -> Iterable[Fault]:
    """Yield a fault if the windows, of ``window`` tokens each where that is known, would leave tokens out."""
    if options.stride is not None and window is not None and options.stride > window:
        yield Fault(
            "score.stride",
            f"{options.stride} tokens are more than a window of {window}, so that some would be in none; give at most "
            "the window's",
        )


def read_scored_texts(options: ScoreOptions) -> dict[str, ScoredText]:
    """Return the texts to score, each by where it stands: ``score.texts[0]``, a line, a file.

    A file stands in place of ``texts``. Raises ``ConfigError`` for what is no text.
    """
    if options.text_file is not None:
        return {"score.text_file": ScoredText(read_text("score.text_file", options.text_file))}
    if options.texts_file is not None:
        texts = _FILE.read(options.texts_file, options.texts)
        return {name: _scored(name, given) for name, given in texts.items()}
    listed = [options.texts] if isinstance(options.texts, str) else options.texts
    if not listed:
        raise ConfigError(f"score.texts: {options.texts!r} holds no text; give score.texts=['…'], or score.text_file")
    named = ((f"score.texts[{index}]", given) for index, given in enumerate(listed))
    return {name: _scored(name, given) for name, given in named}


def read_text(key: str, file: str) -> str:
    """Return the text in ``file``, which the config gives under ``key``; a ``ConfigError`` where it holds none."""
    about, path = f"{key}: {file!r}", Path(file)
    if not path.is_file():
        raise ConfigError(f"{about} is no file; give one of text in UTF-8")
    try:
        text = read_regular(path).decode()
    except OSError as error:
        raise ConfigError(f"{about} can't be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{about} isn't UTF-8 from its byte {error.start + 1} on; save it as UTF-8") from error
    if not text.strip():
        raise ConfigError(f"{about} holds no text")
    return text


def _scored(name: str, given: Any) -> ScoredText:
    """Return what was ``given`` under ``name`` as a text to score."""
    if not isinstance(given, Mapping):
        return ScoredText(_tokens(name, given))
    keys = ("context", "continuation")
    for key in (*keys, *given):
        if key not in given or key not in keys:
            near = closest(str(key), keys) if key in given else ""
            said = "isn't known" if key in given else "is missing"
            raise ConfigError(f"{name}: {dict(given)!r}: {key!r} {said}{near}; {_KINDS}")
    context, continuation = (_tokens(f"{name}.{key}", given[key]) for key in keys)
    if type(context) is not type(continuation):
        raise ConfigError(f"{name}: context and continuation are text and token ids; give two of a kind")
    return ScoredText(continuation, context)


def _tokens(name: str, value: Any) -> Tokens:
    if is_text(value) and value.strip():
        return str(value)
    if is_token_ids(value):
        return list(value)
    if (isinstance(value, str) and not value.strip()) or value == []:
        raise ConfigError(f"{name}: {value!r} is empty; {_KINDS}")
    raise ConfigError(f"{name}: {value!r} is neither text in UTF-8 nor a list of token ids; {_KINDS}")
