"""The tokenizer of a checkpoint: which of its files it is made from, and loading it."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import IO, Any

from offstage.pipeline.errors import PANIC, ConfigError, OffstageError, errors_alone, foreign
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.shard_files import TOKENIZER_FILES
from offstage.stages.checkpoints.tokenizer_limits import check_tokenizer

_STANDARD_ERROR = 2
_one_at_a_time = threading.Lock()
"""Held while standard error is set aside: whoever set it aside meanwhile would bring back the wrong one."""


@contextmanager
def tokenizing(kind: type[OffstageError], about: str, *, advice: str = "") -> Iterator[None]:
    """Do as ``foreign`` around work of a tokenizer; what Rust writes to standard error about a panic is dropped."""
    with _without_words_of_panics(), foreign(kind, about, advice=advice):
        yield


@contextmanager
def _without_words_of_panics() -> Iterator[None]:
    """Keep what is written to standard error until it is known that nothing panicked, then write it."""
    with _one_at_a_time, ExitStack() as stack:
        with suppress(OSError):  # no standard error, or no room for what is said: then it is as it is
            said = stack.enter_context(tempfile.TemporaryFile())
            stack.enter_context(_set_aside(said))
        yield


@contextmanager
def _set_aside(said: IO[bytes]) -> Iterator[None]:
    screen = os.dup(_STANDARD_ERROR)
    os.dup2(said.fileno(), _STANDARD_ERROR)
    panicked = False
    try:
        yield
    except OffstageError as error:
        panicked = type(error.__cause__).__name__ == PANIC
        raise
    finally:
        os.dup2(screen, _STANDARD_ERROR)
        os.close(screen)
        said.seek(0)
        os.write(_STANDARD_ERROR, b"" if panicked else said.read())


def load_tokenizer(source: ModelSource) -> Any:
    """Return the tokenizer of ``source``, or None if its folder holds none.

    What ``model.tokenizer`` names must hold one.
    """
    from transformers import AutoTokenizer, logging

    folder = source.text_folder
    if not source.tokenizer and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
        return None
    check_tokenizer(folder)
    advice = "; set model.tokenizer to a folder that has one that loads, or give token ids: generate.prompts=[[5,6,7]]"
    about = f"model.tokenizer: {str(folder)!r} holds no tokenizer that loads"
    with errors_alone(logging), tokenizing(ConfigError, about, advice=advice):
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=source.trust_remote_code, local_files_only=True)
