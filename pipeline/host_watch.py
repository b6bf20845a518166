"""Whether the hosts of a run live: each says so every second in the rendezvous' store, and looks at what others say.

Where one failed, or says nothing more, all end, by themselves or from the watch's thread. Nothing else of a run may
wait for the store: it hangs where host 0 does. How long a host says nothing is counted in what this process was at
work: where all are stopped for a while, as Slurm suspends a job, they go on after it.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from offstage.pipeline.command_exit import INTERRUPTED, heeded_signals
from offstage.pipeline.rendezvous import (
    ANSWER_SECONDS,
    HostError,
    first_line,
    is_served_by_first,
    open_store,
    refusal_in,
)

_BEAT_SECONDS, _SILENT_SECONDS, _PATIENCE_SECONDS = 1.0, ANSWER_SECONDS, 4.0
"""How often each says that it lives; after how long a silence it counts as lost; how long what is at work has to end by
itself then."""
_LAUNCHER = "TORCHELASTIC_RUN_ID"
"""What torchrun tells those that it starts."""
_RUNNING, _FAILED, _LEAVING, _DONE = "running", "failed", "leaving", "done"
"""What a process says of itself: at work; why it ends; why it ends with another that was lost; it has all it needs."""


class HostWatch:
    """Says every second that this process lives, and sees whether the others do; ``machines`` are where they run."""

    def __init__(self, rank: int, machines: Sequence[str]) -> None:
        self.end: Callable[[BaseException], object] | None = None
        self._rank, self._machines = rank, machines
        self._others = [host for host in range(len(machines)) if host != rank]
        self._gone: set[int] = set()
        self._state: dict[str, Any] = {"state": _RUNNING}
        self._store = open_store()  # its own: what waits for something holds a connection up
        self._seen: dict[int, tuple[int | None, float]] = {}
        self._awake = 0.0  # the seconds in which this process was at work, and not stopped
        self._lost: str | None = None
        self._stopped = threading.Event()
        self._beats, self._answered = 0, self._awake
        self._beating = threading.Lock()
        self._signals = _Signals()
        for work in (self._run, self._oversee):
            threading.Thread(target=work, name="offstage-peers", daemon=True).start()

    def name(self, host: int) -> str:
        """Return what ``host`` is called, with its machine where the run has several."""
        return f"host {host}" + (f" ({self._machines[host]})" if len({*self._machines}) > 1 else "")

    def fail(self, reason: str) -> None:
        """Tell the others why this one ends, unless it ends because of one of them; then wait until all know."""
        self._stopped.set()
        self._part(None if self._lost else _FAILED, reason)

    def interrupted(self) -> str | None:
        """Do the same where this one was interrupted. Where torchrun did that, return which host it did that for.

        It interrupts all as it sees one end. Those say so then; the one that ended says nothing, and where torchrun
        served the store beside it, that is gone.
        """
        self._stopped.set()
        launched, beats = _LAUNCHER in os.environ, dict[int, int | None]()
        try:
            beats |= {host: self._beat_of(host) for host in self._others} if launched else {}
        except RuntimeError:
            self._lost = self._lost or f"{self._server} went away"
        began = time.monotonic()
        self.fail("interrupted")
        if launched and self._lost is None and time.monotonic() - began > _PATIENCE_SECONDS / 2:
            with suppress(RuntimeError):
                silent = [host for host, beat in beats.items() if beat is not None and self._beat_of(host) == beat]
                return f"{self.name(silent[0])} went away, and torchrun ended the others" if silent else None
        return self._lost if launched else None

    def _beat_of(self, host: int) -> int | None:
        """Return which time it was that ``host`` last said that it is at work; null where it isn't."""
        said = self._said(host)
        return said.get("beat") if said.get("state") == _RUNNING else None

    def leave(self) -> None:
        """Be missed by nobody, as the process ends; who serves the store stays until the others have left."""
        self._stopped.set()
        if self._state["state"] == _RUNNING:
            self._part(_DONE)

    def reason(self, gone: int | None = None) -> str | None:
        """Return why the run can't go on, where the host ``gone`` did if that is known; null where none says so now."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while self._lost is None and time.monotonic() < until:
            time.sleep(_BEAT_SECONDS / 4)
        self._gone.update(() if gone is None else [gone])
        return self._lost

    def _note(self, state: str, reason: str = "") -> None:
        self._state = {"state": state, "reason": reason}
        with suppress(RuntimeError):
            self._beat()

    def _beat(self) -> None:
        with self._beating:  # what is said last is what it says of itself
            self._beats += 1
            self._store.set(str(self._rank), json.dumps({**self._state, "beat": self._beats}))

    def _part(self, state: str | None, reason: str = "") -> None:
        """Say the last ``state``, if any, and wait a moment until no other is at work: the store may go with this one.

        Where the store hangs, so does what asks it, for good.
        """

        def part() -> None:
            if state is not None:
                self._note(state, reason)
            with suppress(RuntimeError):
                others = {*self._others} - self._gone
                while any(self._said(host).get("state") == _RUNNING for host in others):
                    time.sleep(_BEAT_SECONDS / 20)

        parting = threading.Thread(target=part, daemon=True)
        parting.start()
        parting.join(_PATIENCE_SECONDS)

    def _run(self) -> None:
        try:
            while self._lost is None:
                self._beat()
                self._lost = next(filter(None, map(self._look, self._others)), None)
                self._answered = self._awake
                if self._stopped.wait(_BEAT_SECONDS):
                    break
        except RuntimeError as error:  # the store's connection broke: its process is gone, or the network
            self._lost = self._lost or f"{self._server} went away, or can't be reached ({first_line(error)})"
        if self._lost is not None:
            self._note(_LEAVING, self._lost)

    @property
    def _server(self) -> str:
        return self.name(0) if is_served_by_first() else "the rendezvous, at host 0,"

    def _oversee(self) -> None:
        """End the process where it doesn't end by itself: of an interrupt, of the loss of a host, or of the store."""
        interrupted, now = False, time.monotonic()
        while not self._stopped.wait(_BEAT_SECONDS) and self._lost is None and not interrupted:
            before, now = now, time.monotonic()
            self._awake += min(now - before, 2 * _BEAT_SECONDS)
            interrupted = self._signals.came()
            if self._awake - self._answered > _SILENT_SECONDS:
                self._gone.update(self._others)
                self._lost = (
                    f"{self._server} has said nothing for {_SILENT_SECONDS:.0f} s: it hangs, or the network does"
                )
        if not self._stopped.wait(_PATIENCE_SECONDS):
            reason = self._lost or "interrupted"
            self._abort(KeyboardInterrupt() if interrupted else HostError(reason), reason)

    def _said(self, host: int) -> Mapping[str, Any]:
        """Return what ``host`` says of itself, nothing where it has yet to come."""
        nothing: Mapping[str, Any] = {}
        return json.loads(self._store.get(str(host)).decode()) if self._store.check([str(host)]) else nothing

    def _look(self, host: int) -> str | None:
        """Return why ``host`` is lost, null while it isn't."""
        said, now = self._said(host), self._awake
        if not said and (refusal := refusal_in(self._store)) is not None:  # it ended as soon as all had met
            return refusal
        state = said.get("state", _RUNNING)
        if state in (_FAILED, _LEAVING):
            return str(said["reason"]) if state == _LEAVING else f"{self.name(host)}: {said['reason']}"
        last, since = self._seen.setdefault(host, (said.get("beat"), now))
        if said.get("beat") != last:
            self._seen[host] = (said["beat"], now)
        elif state == _RUNNING and now - since > _SILENT_SECONDS:
            self._gone.add(host)
            return f"{self.name(host)} has said nothing for {_SILENT_SECONDS:.0f} s: it hangs, or the network does"
        return None

    def _abort(self, error: BaseException, reason: str) -> None:
        """End the process from this thread: what is at work waits for a host that doesn't come."""
        if self.end is not None:
            with suppress(Exception):
                self.end(error)
        sys.stderr.write(f"offstage: {reason}\n")
        sys.stderr.flush()
        if self._gone != {*self._others}:
            self._part(None if self._lost else _FAILED, reason)
        os._exit(INTERRUPTED if isinstance(error, KeyboardInterrupt) else HostError.exit_code)


class _Signals:
    """Whether a signal came, known to any thread: the main one may be waiting for a host, and heeds none then."""

    def __init__(self) -> None:
        self._reading, writing = socket.socketpair()
        self._reading.setblocking(False)
        writing.setblocking(False)
        with suppress(ValueError):  # only the main thread may ask for it
            signal.set_wakeup_fd(writing.detach(), warn_on_full_buffer=False)

    def came(self) -> bool:
        """Return whether one of those that end a command came since this was last asked."""
        with suppress(BlockingIOError):
            return not {*heeded_signals()}.isdisjoint(self._reading.recv(4096))
        return False
