"""The errors that a user can mend.

Each one says four things: what it is about (a config key, a file, a tensor), what was received, the rule that it
broke, and what to do next. The command prints them in one line and exits with the class's code.
"""

from __future__ import annotations

import difflib
import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

PANIC = "PanicException"
"""The class of a panic in Rust, which has no other handle: each library that is built so has one of its own."""
_REFUSED = frozenset(
    {errno.EIO, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ESTALE}
)
"""What isn't the fault of the file that is worked on."""
_LONGEST = 500
_LONGEST_LINE = 4000
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
"""What a terminal obeys; a value that a message quotes may hold any of it. A line's end stands between two faults."""


class OffstageError(Exception):
    """What every error that a user can mend derives from.

    Its text is fit for a terminal, whatever the value is that it quotes: control characters are escaped, and of a line
    that is too long the middle is left out.
    """

    exit_code: ClassVar[int] = 1

    def __str__(self) -> str:
        said = _CONTROLS.sub(lambda match: repr(match[0])[1:-1], super().__str__())
        half = _LONGEST_LINE // 2
        lines = said.split("\n")
        return "\n".join(one if len(one) <= _LONGEST_LINE else f"{one[:half]} … {one[-half:]}" for one in lines)


class ConfigError(OffstageError, ValueError):
    """The config says something that can't be carried out."""

    exit_code = 2


class CheckpointError(OffstageError, ValueError):
    """A checkpoint's files are missing, damaged, or not those of the model."""

    exit_code = 3


class BudgetError(OffstageError, ValueError):
    """The memory budget can't hold the plan."""

    exit_code = 4


class BusyError(OffstageError, RuntimeError):
    """More calls of a loaded model wait already than may."""


class StorageError(OffstageError, OSError):
    """Reading or writing failed for a reason outside the config and the checkpoint."""

    exit_code = 5


class ReplayError(OffstageError, ValueError):
    """A record can't be run again, or not so that a comparison would mean anything."""

    exit_code = 2


class DisagreementError(OffstageError, ValueError):
    """What must come out the same each time didn't."""

    exit_code = 1


class KilledError(OffstageError, OSError):
    """A job's process was ended by a signal that it couldn't heed."""

    exit_code = 137


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing wrong with a config.

    ``key`` is the dotted config key, ``message`` the value received, the rule and the next step. ``error`` is the
    class to raise when this fault stands alone.
    """

    key: str
    message: str
    error: type[OffstageError] = ConfigError

    @classmethod
    def of(cls, error: ConfigError) -> Fault:
        """Return ``error``, whose text begins with a key, as a fault of that key."""
        key, _, message = str(error).partition(": ")
        return cls(key, message)

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


def raise_faults(faults: Sequence[Fault]) -> None:
    """Raise all of ``faults`` as one error, or return if there are none.

    Faults of one kind keep their class (a missing checkpoint exits 3); mixed ones are a ``ConfigError``.
    """
    if not faults:
        return
    kinds = {fault.error for fault in faults}
    kind = kinds.pop() if len(kinds) == 1 else ConfigError
    raise kind("\n".join(str(fault) for fault in faults))


@contextmanager
def foreign(kind: type[OffstageError], about: str, *, advice: str = "") -> Iterator[None]:
    """Turn whatever code that isn't ours raises inside into a ``kind`` that begins with ``about``.

    Such code raises what it likes, outside of ``Exception`` too (a panic in Rust, a wish to exit); its own words are
    kept, in one line. Whatever else is no ``Exception`` isn't its doing: it ends the work from outside, and passes.
    What a disk or the system refuses it stays a ``StorageError``, whatever it was asked for.
    """
    try:
        yield
    except OffstageError:
        raise
    except BaseException as error:
        if not isinstance(error, (Exception, SystemExit)) and type(error).__name__ != PANIC:
            raise
        refused = isinstance(error, OSError) and error.errno in _REFUSED
        raise (StorageError if refused else kind)(f"{about}: {words_of(error)}{advice}") from apart(error)


def apart(error: BaseException) -> BaseException:
    """Return ``error``, which a context manager's generator caught, without the generator's frame in its traceback.

    From Python 3.12 on that frame leads to contextlib's, which holds the error: a cycle, and the frames of the work
    that failed would keep their tensors until the collector comes.
    """
    traceback = error.__traceback__
    return error.with_traceback(traceback.tb_next if traceback is not None else None)


@contextmanager
def errors_alone(logging: Any) -> Iterator[None]:
    """Have a library whose ``logging`` is transformers' tell errors alone; afterwards it is as verbose as before."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


@contextmanager
def named(path: Path) -> Iterator[None]:
    """Have every ``OSError`` of the block name a file: ``path`` where it names none, as one of a read or a write."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:  # without a number it isn't the system's
            error.filename = str(path)
        raise


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield ``error``, what it was raised from, or while that was handled, and so on to the first of them."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def is_interrupt(error: BaseException | None) -> bool:
    """Return whether ``error`` is an interrupt or came of one: what it left half done may fail as it is cleared up.

    What is raised from an interrupt on purpose is an error of its own.
    """
    for each in causes(error):
        if isinstance(each, KeyboardInterrupt):
            return True
        if isinstance(each.__cause__, KeyboardInterrupt):
            return False
    return False


def words_of(error: BaseException) -> str:
    """Return the kind of ``error`` and what it says, in one line of bearable length."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines) if len(lines) < 4 else lines[0]
    said = said if len(said) <= _LONGEST else said[:_LONGEST] + "…"
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def closest(name: str, names: Iterable[str]) -> str:
    """Return `` (did you mean 'x'?)`` for the one of ``names`` that is closest to ``name``; nothing where none is."""
    matches = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f" (did you mean {matches[0]!r}?)" if matches else ""
