"""The text of an error: one bearable line for each fault, whatever the values are that it quotes."""

import errno
import gc
import os
import re
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from functools import partial
from pathlib import Path

import greenlet
import pytest

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.errors import (
    CheckpointError,
    ConfigError,
    Fault,
    OffstageError,
    StorageError,
    foreign,
    is_interrupt,
    named,
    raise_faults,
)
from offstage.stages.units import parse_size


@pytest.mark.parametrize("kind", [OffstageError, CheckpointError, StorageError])
def test_what_a_terminal_obeys_is_escaped(kind: type[OffstageError]) -> None:
    assert str(kind("a\x1b[2Jb\x00\x9b\u202e\rc é")) == r"a\x1b[2Jb\x00\x9b\u202e\rc é"


def test_of_a_line_that_is_too_long_the_middle_is_left_out() -> None:
    said = str(CheckpointError("it: " + "x" * 10**6 + "; do this next"))
    assert len(said) < 4100
    assert said.startswith("it: xx")
    assert said.endswith("xx; do this next")


def test_each_fault_keeps_its_line() -> None:
    with pytest.raises(OffstageError) as raised:
        raise_faults([Fault("a", "b" * 5000), Fault("c", "d")])
    first, second = str(raised.value).split("\n")
    assert (first[:4], second) == ("a: b", "c: d")


def raise_in_foreign(error: BaseException) -> None:
    with foreign(CheckpointError, "model.path: no model", advice="; restore it"):
        raise error


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENOMEM])
def test_what_the_disk_refuses_code_that_is_not_ours_is_no_fault_of_its_file(number: int) -> None:
    with pytest.raises(StorageError, match=r"model\.path: no model: OSError: .*; restore it"):
        raise_in_foreign(OSError(number, os.strerror(number)))


@pytest.mark.parametrize("turned", [partial(foreign, CheckpointError, "it"), mendable], ids=["foreign", "mendable"])
def test_what_the_frames_of_failed_work_held_is_free_at_once(
    turned: Callable[[], AbstractContextManager[None]],
) -> None:
    def work() -> weakref.ref[set[int]]:
        held = {1}
        held_by = weakref.ref(held)
        with suppress(OffstageError), turned():
            raise OSError(errno.ENOSPC, "full")
        return held_by

    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()


@pytest.mark.parametrize("error", [OSError("no such tokenizer"), FileNotFoundError(errno.ENOENT, "gone"), ValueError()])
def test_what_else_it_raises_is_of_the_kind_asked_for(error: BaseException) -> None:
    with pytest.raises(CheckpointError, match=r"model\.path: no model: "):
        raise_in_foreign(error)


@pytest.mark.parametrize("already", [None, "other"])
def test_an_error_without_a_file_names_the_one_that_is_worked_on(already: str | None) -> None:
    error = OSError(errno.EIO, "bad", already)
    with pytest.raises(OSError, match=f"bad: '{already or 'mine'}'"), named(Path("mine")):
        raise error


def test_an_error_of_a_library_that_only_derives_from_it_keeps_its_words() -> None:
    with pytest.raises(OSError, match=r"^in a library's words$"), named(Path("mine")):
        raise OSError("in a library's words")


class PanicException(BaseException):
    """What comes of a panic in Rust."""


class Ended(BaseException):
    """What ends work from outside, as greenlets and loops of events do."""


@pytest.mark.parametrize("error", [KeyboardInterrupt(), GeneratorExit(), greenlet.GreenletExit(), Ended()])
def test_what_ends_the_work_from_outside_is_no_fault_of_the_code_that_is_at_work(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised:
        raise_in_foreign(error)
    assert raised.value is error


@pytest.mark.parametrize("error", [PanicException("at src/lib.rs"), SystemExit(0)])
def test_a_panic_and_a_wish_to_exit_are_the_codes_own(error: BaseException) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.path: no model: {type(error).__name__}: .*; restore it"):
        raise_in_foreign(error)


def test_what_foreign_code_raises_is_worded_as_what_it_is_about() -> None:
    with pytest.raises(ConfigError, match=r"^generate: .*unterminated"), foreign(ConfigError, "generate"):
        re.compile("(")


def test_what_the_block_asks_of_our_own_code_is_still_about_what_foreign_code_gave() -> None:
    with (
        pytest.raises(ConfigError, match=r"^generate: ValueError: 'x' is not a size"),
        foreign(ConfigError, "generate"),
    ):
        parse_size("x")


def test_an_error_that_begins_with_a_key_is_a_fault_of_that_key() -> None:
    fault = Fault.of(ConfigError("generate.prompts[0]: 'a: b' has no tokens; give more"))
    assert fault == Fault("generate.prompts[0]", "'a: b' has no tokens; give more")


def raised(*steps: str) -> BaseException:
    """Return the last of errors that are raised one as the other is handled, the first of an interrupt."""
    try:
        try:
            if len(steps) > 1:
                raise raised(*steps[:-1])
            raise KeyboardInterrupt
        except BaseException as error:
            if steps[-1] == "from it":
                raise ConfigError("it") from error
            raise AttributeError from None  # as OmegaConf's
    except (AttributeError, ConfigError) as error:
        return error


@pytest.mark.parametrize(
    ("steps", "is_one"),
    [(["meanwhile"], True), (["meanwhile", "from it"], True), (["from it"], False), (["from it", "meanwhile"], False)],
)
def test_an_error_that_came_of_an_interrupt_is_one_unless_it_was_meant(steps: list[str], is_one: bool) -> None:
    assert is_interrupt(raised(*steps)) is is_one


def test_an_error_that_came_of_none_is_none() -> None:
    assert is_interrupt(KeyboardInterrupt())
    assert not is_interrupt(ConfigError("it"))
    assert not is_interrupt(None)
