"""A job in a process of its own, watched to its end.

The one who waits says how it ended, so a job that is killed leaves a record with the reason instead of a hole, and
whoever goes on after it (a sweep, a replay) inherits none of its memory.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import FrameType
from typing import IO, Any

from offstage.pipeline.command_exit import INTERRUPTED, heeded_signals
from offstage.pipeline.errors import KilledError
from offstage.pipeline.memory_cgroups import CapError, MemoryGroup, make_group
from offstage.pipeline.process_setup import own_command
from offstage.pipeline.record import RunRecord

_MOMENT = 1.0
"""Seconds between two looks at what is shown while a job works."""

_log = logging.getLogger("offstage")


def supervise(
    record: RunRecord, *, capped: bool = False, options: Sequence[str] = (),
    lock: int | None = None, signals: PassedSignals | None = None, output: Path | None = None,
    meanwhile: Callable[[], object] | None = None,
) -> int:  # fmt: skip
    """Run the job of ``record`` in a fresh process and return its exit code; ``record`` isn't current afterwards.

    ``capped`` puts it under a memory cap where this process may; ``options`` go to the job's command line;
    the descriptor ``lock`` stays open in it, so that what it locks is locked until
    both have ended. From ``signals`` one learns which came to this process meanwhile. What the job prints is added to
    the file ``output``, by default it is seen where this process's is; ``meanwhile`` is called each second.

    Raises:
        KilledError: a signal ended it that it could not heed; the record says so.
    """
    group = _group(record) if capped else None
    debug = ["--debug"] if logging.getLogger().isEnabledFor(logging.DEBUG) else []
    command = own_command("job", str(record.path.parent), *options, *debug, "--parent", str(os.getpid()))
    if group is not None:
        command = group.entering([*command, "--group", str(group.folder), "--version", str(group.version)])
    try:
        with signals or PassedSignals() as signals, _opened(output) as stream:
            # In a group of its own: a terminal's Ctrl-C is passed on from here, once.
            process = subprocess.Popen(
                command, process_group=0,
                pass_fds=() if lock is None else (lock,), stdout=stream, stderr=stream,
            )  # fmt: skip
            signals.pass_to(process)
            code = _wait(process, meanwhile)
        return _settle(record.path, code, signals.came, group)
    finally:
        if group is not None:
            group.remove()


def _opened(output: Path | None) -> AbstractContextManager[IO[bytes] | None]:
    return nullcontext() if output is None else output.open("ab")


def _wait(process: subprocess.Popen[bytes], meanwhile: Callable[[], object] | None) -> int:
    while meanwhile is not None:
        try:
            return process.wait(_MOMENT)
        except subprocess.TimeoutExpired:
            meanwhile()
    return process.wait()


def _group(record: RunRecord) -> MemoryGroup | None:
    try:
        return make_group()
    except CapError as error:
        _log.warning("enforce_memory: %s; this run's memory is not capped", error)
        record.note_enforcement(bytes_allowed=None, how=str(error))
        return None


class PassedSignals:
    """Passes signals on to a process: the first as it is, a later one as SIGKILL; ``came`` are those that came.

    It is entered before there is a process: one that came while that was made would else leave it to go on alone. It
    ends that before its first line.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PassedSignals:
        self._before = {number: signal.signal(number, self._pass_on) for number in heeded_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_to(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on to ``process`` what comes from now on; end it if something came already."""
        self._process = process
        if self.came:
            process.kill()

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        if self._process is not None:
            self._process.send_signal(number if len(self.came) == 1 else signal.SIGKILL)


def _settle(path: Path, code: int, passed: Sequence[int], group: MemoryGroup | None) -> int:
    """Return the job's exit code; where it couldn't write how it ended, write that for it."""
    record = RunRecord.load(path)
    unfinished = record.run.status == "running"
    if passed:
        if unfinished:
            record.finish("interrupted", error=KeyboardInterrupt())
        return INTERRUPTED
    if code >= 0:
        if unfinished:
            record.finish("failed", error=KilledError(f"the job's process exited {code} without a word; see run.log"))
        return code
    error = KilledError(_reason(record, -code, group))
    if record.run.status == "completed":
        _log.warning("the run completed, and its process was %s as it ended", error)
        return 0
    if unfinished:
        record.finish("failed", error=error, stage=_stage_at_work(record))
    raise error


def _reason(record: RunRecord, number: int, group: MemoryGroup | None) -> str:
    name = signal.Signals(number).name
    cap = record.run.enforcement
    if group is not None and group.kills() and cap is not None and cap.bytes:
        return (
            f"killed by its memory cap: it needed more than the {cap.bytes} bytes that its plan allows (enforce_memory)"
        )
    if number == signal.SIGKILL:
        return f"killed by {name}: by hand, or by the system when memory ran out (see dmesg); lower max_memory.cpu"
    return f"killed by {name}; see run.log beside the record"


def _stage_at_work(record: RunRecord) -> str | None:
    """Return the first stage of the run that the record has no entry for."""
    return next((name for name in record.config.get("stages", ()) if record.run.stage(name) is None), None)
