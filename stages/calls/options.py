"""The keys below ``forward``: what a forward is called with, and what is kept of what it returns."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Literal

from offstage.pipeline.errors import ConfigError, Fault, named
from offstage.pipeline.regular_files import open_regular
from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import LEAST, PATHS, PATHS_INSIDE, absolute, read
from offstage.stages.inputs.images import check_image
from offstage.stages.inputs.line_file import LineFile, is_text
from offstage.stages.inputs.media_files import read_media
from offstage.stages.inputs.tensor_files import read_heads

KEY = "forward"
Text = str | tuple[str, str]
"""A text, or a pair of texts that a model reads together."""

_TEXTS = "give text, or a pair of texts that the model reads together"
_FILE = LineFile(f"{KEY}.texts_file", "text", _TEXTS, streams=False)
_REMEMBERED = 2**16
"""Of how many files the hash is remembered: what is asked is read several times in a run."""
_GIVEN = ("inputs", "texts", "texts_file", "images", "audio")


@dataclass(frozen=True, slots=True)
class ForwardOptions:
    """What is given: ``inputs`` (a file of named tensors), ``texts`` or ``texts_file``, ``images``, ``audio`` (paths).

    ``batch_size`` is how many rows a call has (null: all); ``truncation`` whether texts beyond the model's context are
    cut. ``pooling`` makes one vector of each row, ``normalize`` gives these the length 1. ``outputs`` are the names of
    what is kept.
    """

    inputs: str | None = None
    texts: Sequence[Any] | None = None
    texts_file: str | None = None
    images: Sequence[str] | None = None
    audio: Sequence[str] | None = None
    batch_size: int | None = field(default=None, metadata={LEAST: 1})
    truncation: bool = False
    pooling: Literal["mean", "cls", "last"] | None = None
    normalize: bool = False
    outputs: Sequence[str] | None = None


def _with_paths(paths: Sequence[Any], change: Callable[[str], str]) -> list[Any]:
    return [change(path) if isinstance(path, str) else path for path in paths]


@dataclass(frozen=True, slots=True)
class ForwardConfig:
    """The keys of the stage ``forward``, all below its name."""

    forward: ForwardOptions = field(
        default_factory=ForwardOptions,
        metadata={
            PATHS: {"inputs": absolute, "texts_file": absolute},
            PATHS_INSIDE: {"images": _with_paths, "audio": _with_paths},
        },
    )


def asked_of(config: Config) -> ForwardOptions | None:
    """Return what a run under ``config`` calls the forward with; null where the stage isn't listed."""
    return read(ForwardConfig, config).forward if KEY in (config.get("stages") or ()) else None


def is_given(given: ForwardOptions) -> bool:
    """Return whether there is anything to call a model with."""
    return any(getattr(given, name) for name in _GIVEN)


def check_options(given: ForwardOptions) -> Iterator[Fault]:
    """Yield what is wrong with the keys, and with the files that they name, as far as no model must be known."""
    named = [name for name in _GIVEN if getattr(given, name)]
    kinds = {name.removesuffix("_file") for name in named}
    if given.batch_size is not None and len(kinds) > 1:
        yield Fault(
            f"{KEY}.batch_size", f"{' and '.join(sorted(kinds))} are given together, in one call; leave it null"
        )
    if given.texts and given.texts_file:
        yield Fault(f"{KEY}.texts_file", "texts are given too; give one of the two")
    if given.normalize and given.pooling is None:
        yield Fault(f"{KEY}.normalize", "there is no vector to normalise; set forward.pooling to mean, cls or last")
    yield from _file_faults(given)


def _file_faults(given: ForwardOptions) -> Iterator[Fault]:
    checks: list[Callable[[], object]] = [
        *([lambda: read_heads(f"{KEY}.inputs", Path(str(given.inputs)))] if given.inputs else []),
        lambda: read_texts(given),
        *(partial(check_image, name, path) for name, path in files_of(given, "images").items()),
        *(partial(read_media, name, path) for name, path in files_of(given, "audio").items()),
    ]
    for check in checks:
        try:
            check()
        except ConfigError as error:
            yield Fault.of(error)


def files_of(given: ForwardOptions, kind: Literal["images", "audio"]) -> dict[str, Path]:
    """Return the files of that ``kind``, each by where it stands: ``forward.images[0]``."""
    paths = (given.images if kind == "images" else given.audio) or ()
    return {f"{KEY}.{kind}[{index}]": Path(path) for index, path in enumerate(paths)}


def read_texts(given: ForwardOptions) -> dict[str, Text]:
    """Return the texts, each by where it stands; a ``ConfigError`` for what is none. All are texts, or all are pairs,
    or there are none.

    A ``.jsonl`` file has a text or a pair a line, any other one text a line; blank lines are passed over.
    """
    if not (given.texts or given.texts_file):
        return {}
    listed = {f"{KEY}.texts[{index}]": text for index, text in enumerate(given.texts or ())}
    texts = {name: _text(name, text) for name, text in (listed or _FILE.read(given.texts_file)).items()}
    first = next(iter(texts.values()))
    for name, text in texts.items():
        if isinstance(text, str) != isinstance(first, str):
            raise ConfigError(f"{name}: {text!r} stands among texts of the other kind; give pairs alone, or none")
    return texts


def count_rows(given: ForwardOptions) -> int:
    """Return how many texts, images or sounds there are; 0 where only the shapes of ``inputs`` tell."""
    return max(len(read_texts(given)), len(given.images or ()), len(given.audio or ()))


def identity(given: ForwardOptions, *, values: bool) -> dict[str, object]:
    """Return what is given, as a key holds it: files by their content, ``inputs`` without ``values`` by shapes alone.

    Needs no torch. Raises a ``ConfigError`` where nothing is.
    """
    if not is_given(given):
        keys = ", ".join(f"{KEY}.{name}" for name in _GIVEN)
        raise ConfigError(f"{KEY}: nothing is given to the model; give one of {keys}")
    options = {name: value for name, value in asdict(given).items() if name not in _GIVEN}
    content: dict[str, object] = {"options": options}
    if given.inputs:
        file = Path(given.inputs)
        heads = {name: [head.dtype, list(head.shape)] for name, head in read_heads(f"{KEY}.inputs", file).items()}
        content["inputs"] = hash_of(file) if values else heads
    if texts := read_texts(given):
        content["texts"] = [text if isinstance(text, str) else list(text) for text in texts.values()]
    for kind in ("images", "audio"):
        content[kind] = [hash_of(file) for file in files_of(given, kind).values()]
    return content


def pins(given: ForwardOptions, asked: Mapping[str, Any]) -> dict[Path, str]:
    """Return the SHA-256 that each file must still have: ``asked`` is the ``identity`` of what is ``given``."""
    files = [*files_of(given, "images").values(), *files_of(given, "audio").values()]
    digests = dict(zip(files, (*asked["images"], *asked["audio"]), strict=True))
    return digests | ({Path(given.inputs): asked["inputs"]} if given.inputs else {})


def hash_of(file: Path) -> str:
    """Return the SHA-256 of what ``file`` holds, in hex; of a file that stays as it is, always the same one."""
    with named(file):
        status = file.stat()
        return _hash(file, (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns))


@lru_cache(_REMEMBERED)
def _hash(file: Path, _state: tuple[int, ...]) -> str:
    with named(file), os.fdopen(open_regular(file), "rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _text(name: str, value: Any) -> Text:
    parts = value if isinstance(value, list | tuple) else [value]
    if not (len(parts) == 2 or isinstance(value, str)) or not all(map(is_text, parts)):
        raise ConfigError(f"{name}: {value!r} is no text in UTF-8; {_TEXTS}")
    return value if isinstance(value, str) else (parts[0], parts[1])
