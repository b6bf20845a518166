"""The processes that torchrun started for one run, of which this is one: what they tell each other, and who is lost.

Values go between them as tensors and JSON, over torch.distributed; nothing is pickled. Each notes every second in the
rendezvous' store that it lives, and looks at the others' notes: where one failed, or says nothing more, all end.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from offstage.pipeline.command_exit import INTERRUPTED, heeded_signals
from offstage.pipeline.errors import words_of
from offstage.pipeline.plain_data import leaves
from offstage.pipeline.rendezvous import (
    ANSWER_SECONDS,
    CONNECT_SECONDS,
    HostError,
    excuse,
    first_line,
    is_served_by_first,
    meet,
    open_store,
    variable,
)

if TYPE_CHECKING:
    import torch

_HEADER_BYTES = 512
"""What goes before a message: the JSON of what it is, if that is short, and how long it is."""
_BEAT_SECONDS, _SILENT_SECONDS, _PATIENCE_SECONDS = 1.0, ANSWER_SECONDS, 4.0
"""How often each says that it lives; after how long a silence it counts as lost; how long what is at work has to end by
itself then."""
_EVER = timedelta(days=30)
"""Those who are slow are waited for: whether they live is told otherwise."""
_LIBRARIES = ("offstage", "torch", "transformers", "tokenizers")
_OWN_KEYS = {"max_memory", "offload_folder", "outputs", "hardware"}
_OWN_PATHS = {"path", "tokenizer", "adapter"}
"""What may differ from host to host: keys of a config, and those below ``model``; of files the content is compared."""
_RUNNING, _FAILED, _LEAVING, _DONE = "running", "failed", "leaving", "done"
"""What a process says of itself: at work; why it ends; why it ends with another that was lost; it has all it needs."""


def started_together() -> int:
    """Return how many processes torchrun started, this one among them; 1 where it is alone."""
    return variable("WORLD_SIZE") if {"RANK", "WORLD_SIZE"} <= os.environ.keys() else 1


def own_rank() -> int:
    """Return the number of this process among them."""
    return variable("RANK") if started_together() > 1 else 0


def on_one_machine() -> int:
    """Return how many of them share this machine, and so its memory."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))) if started_together() > 1 else 1


def are_together(config: Mapping[str, Any]) -> bool:
    """Return whether the processes that torchrun started carry out one run of ``config``, and not each its own."""
    return started_together() > 1 and (config.get("hardware") or {}).get("hosts") is not None


@lru_cache(maxsize=1)
def peers() -> Peers:
    """Return the processes that torchrun started, connected the first time; raises ``HostError`` where that fails."""
    return Peers()


def excuse_this(code: int) -> None:
    """Tell the others, if there are any, that this process ends with exit ``code`` before it came to them."""
    if code and started_together() > 1 and not peers.cache_info().misses:
        reason = f"it ended with exit code {code} before it began, and says why itself"
        excuse(own_rank(), started_together(), reason)


class Peers:
    """The ``size`` processes of a run, which know each other by their ``rank``.

    ``sent_bytes`` are those of tensors so far.
    """

    def __init__(self) -> None:
        import torch.distributed as distributed

        self.rank, self.size = own_rank(), started_together()
        self.sent_bytes = 0
        self._distributed = distributed
        self._waits: list[Any] = []
        self._watch: _HostWatch | None = None
        store, machines = meet(self.rank, self.size)
        store.set_timeout(timedelta(seconds=CONNECT_SECONDS))
        with self._guarded():
            if not distributed.is_initialized():
                distributed.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=_EVER)
            self._group = distributed.new_group(backend="gloo", timeout=_EVER)  # a script may have one of its own
        self._watch = _HostWatch(self.rank, machines)
        atexit.register(self._watch.leave)
        atexit.register(self._end_waits)

    def exchange(self, value: object) -> list[Any]:
        """Return what each of them gives as ``value``, in their order: JSON."""
        found = []
        for host in range(self.size):
            if host == self.rank:
                for other in range(self.size):
                    self.send_json(value, other)
                found.append(json.loads(json.dumps(value)))
            else:
                found.append(self.receive_json(host))
        return found

    def agree(self, said: bool) -> bool:
        """Return whether all of them say so."""
        return all(self.exchange(said))

    def require_same(self, values: Mapping[str, object]) -> None:
        """Refuse to go on where another host has another of the ``values``, which are told by what they are."""
        told = self.exchange(values)
        mine = told[self.rank]
        for host, theirs in enumerate(told):
            for what in sorted(mine.keys() | theirs.keys()):
                other, own = theirs.get(what), mine.get(what)
                if other != own:
                    raise HostError(
                        f"{what} is {other!r} on host {host} and {own!r} on host {self.rank}; have the same on both"
                    )

    def send_json(self, value: object, host: int, *, tag: int = 0) -> None:
        """Send ``value`` to ``host``; to this one itself nothing is sent.

        What is sent to a host by one ``tag`` is received by it in that order; threads may have tags of their own.
        """
        import torch

        if host == self.rank:
            return
        text = json.dumps(value, separators=(",", ":")).encode()
        first = len(text).to_bytes(8, "little") + text[: _HEADER_BYTES - 8]
        self._send(torch.frombuffer(bytearray(first.ljust(_HEADER_BYTES, b"\0")), dtype=torch.uint8), host, tag)
        if rest := text[_HEADER_BYTES - 8 :]:
            self._send(torch.frombuffer(bytearray(rest), dtype=torch.uint8), host, tag)

    def receive_json(self, host: int, *, tag: int = 0) -> Any:
        """Return the value that ``host`` sends next."""
        import torch

        first = torch.empty(_HEADER_BYTES, dtype=torch.uint8)
        self._receive(first, host, tag)
        held = bytes(first.numpy())
        length = int.from_bytes(held[:8], "little")
        rest = torch.empty(max(0, length - _HEADER_BYTES + 8), dtype=torch.uint8)
        if rest.numel():
            self._receive(rest, host, tag)
        return json.loads(held[8 : 8 + length] + bytes(rest.numpy()))

    def send(self, tensor: torch.Tensor, host: int, *, tag: int = 0) -> None:
        """Send the values of ``tensor`` to ``host``."""
        import torch

        if tensor.numel():
            self._send(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8), host, tag)

    def receive(self, tensor: torch.Tensor, host: int, *, tag: int = 0) -> torch.Tensor:
        """Fill ``tensor``, which lies on the host, with the values that ``host`` sends next, and return it."""
        import torch

        if tensor.numel():
            self._receive(tensor.reshape(-1).view(torch.uint8), host, tag)
        return tensor

    def _send(self, data: torch.Tensor, host: int, tag: int) -> None:
        with self._guarded(host):
            self._wait(self._distributed.isend(data, host, group=self._group, tag=tag))

    def _receive(self, data: torch.Tensor, host: int, tag: int) -> None:
        with self._guarded(host):
            self._wait(self._distributed.irecv(data, host, group=self._group, tag=tag))

    def _wait(self, work: Any) -> None:
        self._waits.append(work)
        try:
            work.wait()
        finally:
            self._waits.remove(work)

    def _end_waits(self) -> None:
        """End what other threads wait for as the process ends: one that is still inside then aborts it."""
        for work in [*self._waits]:
            with suppress(RuntimeError):
                work.abort()

    @contextmanager
    def _guarded(self, host: int | None = None) -> Iterator[None]:
        """Turn what the connection raises into the error that says which host was lost, and why if that is known."""
        try:
            yield
        except RuntimeError as error:
            if self._watch is None or host is None:
                raise HostError(f"the hosts of the run couldn't be connected: {first_line(error)}") from error
            raise HostError(self._watch.reason(host) or f"{self._watch.name(host)} went away") from error

    def ending(self, end: Callable[[BaseException], object]) -> None:
        """Have ``end`` called with the reason where the run must be ended from outside of what is at work."""
        if self._watch is not None:
            self._watch.end = end

    def fail(self, reason: str) -> None:
        """Tell the others why this one ends, and wait a moment until they know."""
        if self._watch is not None:
            self._watch.fail(reason)

    def close(self) -> None:
        """End together: nobody is missed from now on."""
        if self._watch is not None:
            self.exchange(True)
            self._watch.leave()


@contextmanager
def in_step(
    config: Mapping[str, Any], environment: Mapping[str, Any], end: Callable[[BaseException], object]
) -> Iterator[Peers | None]:
    """Carry out a run together with the other hosts, if ``config`` says so: what ends one of them ends all.

    They must have the same ``config``, but for what is each host's own, and the same libraries in the ``environment``.
    Where what is at work here can't be ended, ``end`` is called with the reason, and then the process ends. Yields
    null where the run is this process's alone.
    """
    if not are_together(config):
        yield None
        return
    here = peers()
    here.ending(end)
    try:
        libraries = {name: environment.get(name) for name in _LIBRARIES}
        model = {key: value for key, value in config["model"].items() if key not in _OWN_PATHS}
        shared = {key: value for key, value in config.items() if key not in _OWN_KEYS}
        here.require_same({**libraries, **dict(leaves({**shared, "model": model}))})
        yield here
    except KeyboardInterrupt:
        here.fail("interrupted")
        raise
    except BaseException as error:
        here.fail(str(error) or words_of(error))
        raise
    here.close()


class _HostWatch:
    """Says every second that this process lives, and sees whether the others do; ``machines`` are where they run."""

    def __init__(self, rank: int, machines: Sequence[str]) -> None:
        self.end: Callable[[BaseException], object] | None = None
        self._rank, self._machines = rank, machines
        self._others = [host for host in range(len(machines)) if host != rank]
        self._gone: set[int] = set()
        self._state: dict[str, Any] = {"state": _RUNNING}
        self._store = open_store("watch")
        self._seen: dict[int, tuple[int | None, float]] = {}
        self._lost: str | None = None
        self._stopped = threading.Event()
        self._beats, self._answered = 0, time.monotonic()
        self._signals = _Signals()
        self._beat()
        for work in (self._run, self._oversee):
            threading.Thread(target=work, name="offstage-peers", daemon=True).start()

    def name(self, host: int) -> str:
        """Return what ``host`` is called, with its machine where the run has several."""
        return f"host {host}" + (f" ({self._machines[host]})" if len({*self._machines}) > 1 else "")

    def fail(self, reason: str) -> None:
        """Tell the others why this one ends, unless it ends because of one of them; then wait until all know."""
        self._stopped.set()
        self._part(None if self._lost else _FAILED, reason)

    def leave(self) -> None:
        """Be missed by nobody, as the process ends; who serves the store stays until the others have left."""
        self._stopped.set()
        if self._state["state"] == _RUNNING:
            self._part(_DONE)

    def reason(self, gone: int) -> str | None:
        """Return why the run can't go on without the host ``gone``, as far as one says so now; null where none does."""
        until = time.monotonic() + _PATIENCE_SECONDS
        while self._lost is None and time.monotonic() < until:
            time.sleep(_BEAT_SECONDS / 4)
        self._gone.add(gone)
        return self._lost

    def _note(self, state: str, reason: str = "") -> None:
        self._state = {"state": state, "reason": reason}
        with suppress(RuntimeError):
            self._beat()

    def _beat(self) -> None:
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
            while not self._stopped.wait(_BEAT_SECONDS) and self._lost is None:
                self._beat()
                self._lost = next(filter(None, map(self._look, self._others)), None)
                self._answered = time.monotonic()
        except RuntimeError as error:  # the store's connection broke: its process is gone, or the network
            self._lost = self._lost or f"{self._server} went away, or can't be reached ({first_line(error)})"
        if self._lost is not None:
            self._note(_LEAVING, self._lost)

    @property
    def _server(self) -> str:
        return self.name(0) if is_served_by_first() else "the rendezvous, at host 0,"

    def _oversee(self) -> None:
        """End the process where it doesn't end by itself: of an interrupt, of the loss of a host, or of the store."""
        interrupted = False
        while not self._stopped.wait(_BEAT_SECONDS) and self._lost is None and not interrupted:
            interrupted = self._signals.came()
            if time.monotonic() - self._answered > _SILENT_SECONDS:
                self._gone.update(self._others)
                self._lost = (
                    f"{self._server} has said nothing for {_SILENT_SECONDS:.0f} s: it hangs, or the network does"
                )
        if not self._stopped.wait(_PATIENCE_SECONDS):
            reason = self._lost or "interrupted"
            self._abort(KeyboardInterrupt() if interrupted else HostError(reason), reason)

    def _said(self, host: int) -> Mapping[str, Any]:
        """Return what ``host`` says of itself, nothing where it has yet to come."""
        found: Mapping[str, Any] = {}
        return json.loads(self._store.get(str(host)).decode()) if self._store.check([str(host)]) else found

    def _look(self, host: int) -> str | None:
        """Return why ``host`` is lost, null while it isn't."""
        said, now = self._said(host), time.monotonic()
        state = said.get("state")
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
