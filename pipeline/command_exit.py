"""What the commands have in common: signals, errors in one line, exit codes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn

INTERRUPTED = 130
UNFORESEEN = 70
"""The exit code of what nobody foresaw, sysexits' EX_SOFTWARE."""
Tell = Callable[[int | str | None], object]
"""What is called with the exit code of a command that ends."""
FULL_ERROR = "HYDRA_FULL_ERROR"
"""The environment variable that asks for tracebacks; Hydra reads it too."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_IMPORTS = "<frozen importlib"
"""What the names of the files begin with whose code imports others."""
_CALLED_BY_TORCH = ("__torch_dispatch__", "find_torch_dispatch_rule")
"""Functions that torch calls, while shapes are computed without values, from where an exception ends the process."""
_AROUND_THESE = ("/torch/_", "/torch/utils/_", "/torch/compiler/")
"""Where that lies which torch has around them: decorators of several of its private modules."""
_MOMENT, _PATIENCE = 0.01, 5.0
"""Seconds until an interrupt comes again where it was held up or dropped, and how long it may be held up."""
_kept: list[int] = []
"""The signal that came before signals were heeded, in a process that others are to be told of."""


def heeded_signals() -> list[signal.Signals]:
    """Return the signals that end a command: SIGINT and SIGTERM, also where the shell had them ignored, and SIGHUP.

    A hangup that is ignored stays so: that is what ``nohup`` is for.
    """
    spared = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return [number for number in _SIGNALS if number != signal.SIGHUP or not spared]


def exit_at_signals(name: str, *, keeps_first: bool = False) -> None:
    """End the process at the first signal, with one line: until ``heed_signals`` there is nothing to bring in order.

    An exception would be thrown into imports, and some of these lose it. Where others are to be told of the end, which
    takes imports too, ``keeps_first`` keeps the first signal until then; a second ends the process.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        if keeps_first and not _kept:
            _kept.append(number)
            return
        os.write(2, f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    for number in heeded_signals():
        signal.signal(number, leave)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, heeded_signals())  # see held_back


@contextmanager
def held_back() -> Iterator[None]:
    """Have a command that is started in the block get its signals no sooner than ``exit_at_signals`` heeds them there.

    Those that came sooner would end it without a word, or with an interpreter's traceback.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, heeded_signals())
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def heed_signals() -> None:
    """Turn the first signal into a ``KeyboardInterrupt``, so that what is at work can be brought to an end.

    One that was kept comes now.
    """
    for number in heeded_signals():
        signal.signal(number, _interrupt)
    sys.unraisablehook = partial(_raise_again, sys.unraisablehook)
    if _kept:
        _interrupt(_kept.pop(), None)


@contextmanager
def interrupts_that_last() -> Iterator[None]:
    """Have an interrupt that comes in the block do no harm, in a process of somebody else's too: it comes in a moment.

    One that heeds interrupts by a handler of its own, and a thread other than the main one, is left alone.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came, alarm = list[int](), signal.getsignal(signal.SIGALRM)

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)
        _raise_where_it_lasts(number, frame, until=time.monotonic() + _PATIENCE)

    signal.signal(signal.SIGINT, wait)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, alarm)
            from offstage.pipeline.errors import is_interrupt

            if not is_interrupt(sys.exception()):
                raise KeyboardInterrupt


def _interrupt(number: int, frame: FrameType | None) -> None:
    """The same signal again ends the process at once; another doesn't disturb the ending."""
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_DFL if each == number else signal.SIG_IGN)
    _raise_where_it_lasts(number, frame, until=time.monotonic() + _PATIENCE)


def _raise_where_it_lasts(_number: int, frame: FrameType | None, *, until: float) -> None:
    """Raise the interrupt; look again in a moment where it would come into what loses it, or can't be raised through.

    That is an import, and what torch calls; after some seconds it comes all the same.
    """
    if time.monotonic() > until or not _holds_up(frame):
        raise KeyboardInterrupt
    _call_soon(partial(_raise_where_it_lasts, until=until))


def _holds_up(frame: FrameType | None) -> bool:
    """Return whether what is at work in ``frame`` holds an interrupt up."""
    if frame is not None and any(part in frame.f_code.co_filename for part in _AROUND_THESE):
        return True
    while frame is not None:
        if frame.f_code.co_filename.startswith(_IMPORTS) or frame.f_code.co_name in _CALLED_BY_TORCH:
            return True
        frame = frame.f_back
    return False


def _raise_again(otherwise: Callable[[Any], object], unraisable: Any) -> None:
    """Raise an interrupt once more where Python dropped it: in a finaliser, or the callback of a weak reference."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        _call_soon(partial(_raise_where_it_lasts, until=time.monotonic() + _PATIENCE))
    else:
        otherwise(unraisable)


def _call_soon(handler: Callable[[int, FrameType | None], object]) -> None:
    signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, _MOMENT)


def last_resort(work: Callable[[], int], *, name: str = "offstage") -> int:
    """Return what ``work`` returns, or print the error that a user can mend and return its exit code.

    Of what nobody foresaw one line says so and where its traceback lies. This is the only place where that ends:
    whoever else catches everything raises it on. An interrupt and a pipe that nobody reads are foreseen.
    """
    from offstage.pipeline.atomic_files import mendable
    from offstage.pipeline.errors import OffstageError, is_interrupt, words_of

    try:
        with mendable():
            return work()
    except (KeyboardInterrupt, SystemExit, GeneratorExit, BrokenPipeError):
        raise
    except BaseException as error:
        if is_interrupt(error):
            raise KeyboardInterrupt from error
        if FULL_ERROR in os.environ:
            raise
        if isinstance(error, OffstageError):
            sys.stderr.writelines(f"{name}: {line}\n" for line in str(error).splitlines())
            return error.exit_code
        sys.stderr.write(f"{name}: unforeseen: {words_of(error)}; {_keep_traceback(error)}; please report it\n")
        return UNFORESEEN


def _keep_traceback(error: BaseException) -> str:
    """Write the traceback of ``error`` to ``run.log``, or where there is no log or no room, elsewhere; say where."""
    import logging
    import tempfile
    import traceback

    text = "".join(traceback.format_exception(error))
    handlers = logging.getLogger().handlers
    logs = [handler.baseFilename for handler in handlers if isinstance(handler, logging.FileHandler)]
    for log in (*logs, None):
        try:
            place = log or os.path.join(tempfile.mkdtemp(prefix="offstage-"), "run.log")  # noqa: PTH118
            with open(place, "a", encoding="utf-8", errors="backslashreplace") as file:  # noqa: PTH123
                file.write(text)
        except OSError:
            continue
        return f"its traceback is in {place}"
    return "HYDRA_FULL_ERROR=1 shows its traceback"


def run_command(name: str, work: Callable[[], int], *, tell: Tell | None = None) -> NoReturn:
    """Run ``work`` as the command ``name`` and exit with its code, 130 where it was interrupted; see ``last_resort``.

    An unread output is no fault. Others are told of the end last, by ``tell``: that may take a while, which an
    interrupt ends.
    """
    import logging

    logging.raiseExceptions = False  # a log on a full disk would put a traceback on the screen for each line
    code: int | str | None = 0
    try:
        try:
            heed_signals()
            code = last_resort(work, name=name)
        except SystemExit as left:  # Hydra leaves so after its help, with all of that still to be printed
            code = left.code
        sys.stdout.flush()
    except KeyboardInterrupt:
        sys.stderr.write(f"{name}: interrupted\n")
        code = INTERRUPTED
    except BrokenPipeError:  # whoever read the output has seen enough
        discard_output()
    if tell is not None:
        with suppress(KeyboardInterrupt):
            tell(code)
    sys.exit(code)


def discard_output() -> None:
    """Have what is still to be printed go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
