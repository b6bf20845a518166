"""A job in a process of its own, watched to its end.

The one who waits says how it ended, so a job that is killed leaves a record with the reason instead of a hole, and
whoever goes on after it (a sweep, a replay) inherits none of its memory.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import FrameType
from typing import Any

from offstage.pipeline.command_exit import INTERRUPTED, heeded_signals, held_back
from offstage.pipeline.errors import KilledError
from offstage.pipeline.memory_cgroups import CapError, MemoryGroup, make_group
from offstage.pipeline.peers import leave_to_another
from offstage.pipeline.process_setup import own_command
from offstage.pipeline.record import RunRecord

_LOOK_SECONDS = 0.05
"""How often it is looked whether a process has ended where the system can't tell when."""

_log = logging.getLogger("offstage")


def supervise(record: RunRecord, *, capped: bool = False, options: Sequence[str] = ()) -> int:
    """Run the job of ``record`` in a fresh process and return its exit code; ``record`` isn't current afterwards.

    See ``JobProcess`` for what else is given, and raised.
    """
    with PassedSignals() as signals:
        job = JobProcess(record, signals, capped=capped, options=options)
        job.process.wait()
    return job.settle()


class JobProcess:
    """A fresh ``process`` that carries out the job of ``record``: once it has ended, ``settle`` says how.

    ``capped`` puts it under a memory cap where this process may; ``options`` go to the job's command line; the
    descriptor ``lock`` stays open in it, so that what it locks is locked until both have ended. ``signals`` passes on
    to it what comes to this process. What the job prints is added to the file ``output``, by default it is seen where
    this process's is.
    """

    def __init__(
        self, record: RunRecord, signals: PassedSignals, *, capped: bool = False, options: Sequence[str] = (),
        lock: int | None = None, output: Path | None = None,
    ) -> None:  # fmt: skip
        self._path, self._signals = record.path, signals
        self._group = _group(record) if capped else None
        debug = ["--debug"] if logging.getLogger().isEnabledFor(logging.DEBUG) else []
        command = own_command("job", str(record.path.parent), *options, *debug, "--parent", str(os.getpid()))
        if (group := self._group) is not None:
            command = group.entering([*command, "--group", str(group.folder), "--version", str(group.version)])
        with ExitStack() as failed, ExitStack() as opened:
            failed.callback(self._remove_group)
            stream = None if output is None else opened.enter_context(output.open("ab"))
            # In a group of its own: a terminal's Ctrl-C is passed on from here, once.
            with held_back():
                self.process = subprocess.Popen(
                    command, process_group=0,
                    pass_fds=() if lock is None else (lock,), stdout=stream, stderr=stream,
                )  # fmt: skip
            signals.pass_to(self.process)
            leave_to_another()
            failed.pop_all()

    def settle(self) -> int:
        """Return the exit code of the process, which has ended; where it couldn't write how, write that for it.

        Raises:
            KilledError: a signal ended it that it could not heed; the record says so.
        """
        try:
            return _settle(self._path, self.process.wait(), self._signals.came, self._group)
        finally:
            self._remove_group()

    def _remove_group(self) -> None:
        if self._group is not None:
            self._group.remove()


def wait_for_any(processes: Collection[subprocess.Popen[bytes]], seconds: float) -> None:
    """Return as soon as one of ``processes`` has ended, after so many ``seconds`` at the latest."""
    if sys.platform != "linux":
        time.sleep(min(seconds, _LOOK_SECONDS))
        return
    with ExitStack() as opened, suppress(ProcessLookupError):  # one that nobody waits for any more
        watched = list[int]()
        for process in processes:
            watched.append(os.pidfd_open(process.pid))
            opened.callback(os.close, watched[-1])
        select.select(watched, [], [], seconds)


def _group(record: RunRecord) -> MemoryGroup | None:
    try:
        return make_group()
    except CapError as error:
        _log.warning("enforce_memory: %s; this run's memory is not capped", error)
        record.note_enforcement(bytes_allowed=None, how=str(error))
        return None


class PassedSignals:
    """Passes signals on to processes: the first as it is, a later one as SIGKILL; ``came`` are those that came.

    It is entered before there is a process: one that came while that was made would else leave it to go on alone.
    """

    def __init__(self) -> None:
        self.came: list[int] = []
        self._processes: list[subprocess.Popen[bytes]] = []
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> PassedSignals:
        self._before = {number: signal.signal(number, self._pass_on) for number in heeded_signals()}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def pass_to(self, process: subprocess.Popen[bytes]) -> None:
        """Pass on to ``process`` what comes from now on, and what came already."""
        self._processes.append(process)
        if self.came:
            process.send_signal(self._next())

    def end(self, number: int = signal.SIGINT) -> None:
        """Have the processes end, as if the signal ``number`` came to this one."""
        self._pass_on(number, None)

    def _pass_on(self, number: int, _frame: FrameType | None) -> None:
        self.came.append(number)
        for process in self._processes:  # one that has ended gets none
            process.send_signal(self._next())

    def _next(self) -> int:
        return self.came[0] if len(self.came) == 1 else signal.SIGKILL


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
        begun = (name for name in record.config.get("stages", ()) if record.run.stage(name) is None)
        record.finish("failed", error=error, stage=next(begun, None))
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
