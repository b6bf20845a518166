"""What passes between hosts while they compute: the outputs of modules, each as a message of the call that it is of.

Sending never waits, and what is received is waited for by whoever has nothing else to do: a thread for each host sends
what it is given, another receives as long as something is missing that was asked for. Messages of one call come in the
order in which they were sent; those of several are told apart by the call's name, so that it doesn't matter in which
order hosts compute. So no host ever waits for one that waits for it: a call waits for nothing but its own messages, and
whoever sends these has no need of anything that comes after.

A call that fails on one host, and maybe on no other (its memory was full, it was cancelled there), is told to all by
its name: whoever waits for something of it, or of a part of it (``7.2`` of ``7``), has it fail too, and others go on.

Of a call that is over on a host, well or not, nobody waits for anything there: what was kept of it is let go, and what
others still send or tell of it is dropped.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch

from offstage.pipeline.errors import ConfigError, words_of
from offstage.pipeline.peers import Peers, aligned, packed
from offstage.pipeline.rendezvous import HostError
from offstage.stages.checkpoints.dtypes import dtype_name, torch_dtype
from offstage.stages.machine.hosts import KEY
from offstage.stages.units import Position

_TAG = 1
"""Apart from what hosts agree on between calls."""

_MOST_OVER = 4096
"""So many calls that are over are remembered: what others still send of one comes before as many more have begun."""

_Key = tuple[int, str]
"""Which host sends a message, and of which call it is."""
_FAILED, _FAILED_FOR_LOCKSTEP = "failed", "failed for lockstep"
"""What stands in a message in place of a tensor's shape where the call has failed."""


def around(call: str) -> Iterator[str]:
    """Yield ``call``, and those that it is a part of (``7`` of ``7.2``), the outermost the last."""
    while call:
        yield call
        call = call.rpartition(".")[0]


class FailedCallError(HostError):
    """A call of the model that failed on another host; the ``reason`` names that one.

    ``hangs_on_lockstep`` says whether it can be made, but not in lockstep.
    """

    def __init__(self, reason: str, *, hangs_on_lockstep: bool = False) -> None:
        super().__init__(reason)
        self.reason, self.hangs_on_lockstep = reason, hangs_on_lockstep


class _Inbox:
    """What has come and was not yet taken, by key; ``receive`` returns the call and the value that a host sends next.

    All of its state is guarded by ``_changed``. The first error of a thread is everybody's: there is no going on.
    """

    def __init__(self, receive: Callable[[int], tuple[str, Any]]) -> None:
        self._receive = receive
        self._changed = threading.Condition()
        self._messages: dict[_Key, deque[Any]] = {}
        self._missing: set[_Key] = set()
        self._threads: set[int] = set()
        self._error: Exception | None = None
        self._failed: dict[_Key, FailedCallError] = {}
        self._over: dict[str, None] = {}  # the last ones, in their order

    def ask(self, key: _Key) -> None:
        """Have a message of ``key`` be received, unless there is one."""
        with self._changed:
            if self._messages.get(key) or self._failure(key) is not None:
                return
            self._missing.add(key)
            if key[0] not in self._threads:
                self._threads.add(key[0])
                threading.Thread(target=self._work, args=key[:1], name=f"offstage-from-{key[0]}", daemon=True).start()
            self._changed.notify_all()

    def has(self, key: _Key) -> bool:
        """Return whether a message of ``key``, which was asked for, can be taken, or never will be there."""
        return self._error is not None or key not in self._missing

    def wait(self, keys: Iterable[_Key]) -> None:
        """Return when a message of one of ``keys`` is there."""
        wanted = [*keys]
        with self._changed:
            self._changed.wait_for(lambda: any(map(self.has, wanted)))

    def take(self, key: _Key) -> Any:
        """Return the first message of ``key``; raises what kept it from coming."""
        with self._changed:
            if key in self._missing and self._error is not None:
                raise self._error
            if not self._messages.get(key) and (failure := self._failure(key)) is not None:
                raise failure
            queue = self._messages[key]
            value = queue.popleft()
            if not queue:
                del self._messages[key]
            return value

    def fail(self, error: Exception) -> None:
        """Have all who wait hear of ``error``."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def end(self, call: str) -> None:
        """Keep nothing of ``call`` and of its parts from now on: it is over here."""
        with self._changed:
            self._over[call] = None
            if len(self._over) > _MOST_OVER:
                del self._over[next(iter(self._over))]
            self._missing = {key for key in self._missing if call not in around(key[1])}
            for box in (self._messages, self._failed):
                for key in [key for key in box if call in around(key[1])]:
                    del box[key]

    def check(self) -> None:
        """Raise what has gone wrong."""
        if self._error is not None:
            raise self._error

    def _work(self, host: int) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: any(source == host for source, _ in self._missing))
                call, value = self._receive(host)
                with self._changed:
                    self._keep(host, call, value)
                    self._changed.notify_all()
        except Exception as error:  # noqa: BLE001 - whoever waits raises it
            self.fail(error)

    def _keep(self, host: int, call: str, value: Any) -> None:
        if any(outer in self._over for outer in around(call)):
            return
        if isinstance(value, FailedCallError):
            self._failed[host, call] = value
            self._missing = {key for key in self._missing if key[0] != host or call not in around(key[1])}
        else:
            self._messages.setdefault((host, call), deque()).append(value)
            self._missing.discard((host, call))

    def _failure(self, key: _Key) -> FailedCallError | None:
        """Return by what the call of ``key`` has failed on the host of ``key``; null where it hasn't."""
        return next(filter(None, (self._failed.get((key[0], call)) for call in around(key[1]))), None)


@dataclass(frozen=True, slots=True, eq=False)
class Arrival:
    """A message that a call waits for; in the order of a pass that is at ``position``."""

    inbox: _Inbox
    key: _Key
    position: Position

    @property
    def has_come(self) -> bool:
        """Whether it is there."""
        return self.inbox.has(self.key)

    def expect(self, users: int) -> None:
        """Nothing: it has one user."""

    def wait_for_any(self, others: Sequence[Arrival]) -> None:
        """Return when one of ``others``, all of one wire, has come."""
        self.inbox.wait(other.key for other in others)


class Wire:
    """Sends what modules return to other hosts, and receives it: tensors, and tuples and lists of them.

    ``call`` names the call of the model that is under way, and ``wait`` returns when what it is given has come; at
    first there is one call at a time. ``shares`` says whether weights stream on some host, so that calls have something
    to share.
    """

    def __init__(self, peers: Peers, *, shares: bool = False) -> None:
        self.shares = shares
        self.call: Callable[[], str] = str
        self.wait: Callable[[Arrival], None] = lambda arrival: arrival.wait_for_any((arrival,))
        self._peers = peers
        self._inbox = _Inbox(self._received)
        self._outboxes: dict[int, SimpleQueue[torch.Tensor]] = {}

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return self._peers.size

    def send(self, value: Any, hosts: Iterable[int]) -> None:
        """Send ``value`` to each of ``hosts``; what becomes of it here from now on doesn't matter."""
        self._inbox.check()
        tensors: list[torch.Tensor] = []
        shape = _described(value, tensors)
        message = packed([self.call(), shape], tensors)
        for host in hosts:
            self._outbox(host).put(message)
            self._peers.sent_bytes += sum(tensor.nbytes for tensor in tensors)

    def fail(self, call: str, error: Exception, *, why_not_together: str | None = None) -> None:
        """Tell the other hosts that ``call`` has failed here by ``error``, so that it does there, with its parts.

        ``why_not_together`` is the reason where it can be made, but not in lockstep. It is over here then.
        """
        self.end(call)
        if isinstance(error, FailedCallError):
            reason, by_lockstep = error.reason, error.hangs_on_lockstep
        else:
            words = "the call was cancelled" if isinstance(error, CancelledError) else words_of(error)
            own = f"host {self._peers.rank}: {why_not_together or words}"
            reason, by_lockstep = str(error) if isinstance(error, HostError) else own, why_not_together is not None
        failed = _FAILED_FOR_LOCKSTEP if by_lockstep else _FAILED
        for host in range(self.hosts):
            if host != self._peers.rank:
                self._outbox(host).put(packed([call, [failed, reason]]))

    def end(self, call: str) -> None:
        """Hear that ``call`` is over on this host, with its parts: nothing more of it is waited for here.

        Its name is its alone for good.
        """
        self._inbox.end(call)

    def receive(self, host: int, device: torch.device, position: Position) -> Any:
        """Return what ``host`` sends next of this call, on ``device``; a ``FailedCallError`` where it failed there."""
        arrival = Arrival(self._inbox, (host, self.call()), position)
        self._inbox.ask(arrival.key)
        self.wait(arrival)
        return _moved(self._inbox.take(arrival.key), device)

    def _outbox(self, host: int) -> SimpleQueue[torch.Tensor]:
        if host not in self._outboxes:
            self._outboxes[host] = SimpleQueue()
            threading.Thread(target=self._send_all, args=(host,), name=f"offstage-to-{host}", daemon=True).start()
        return self._outboxes[host]

    def _send_all(self, host: int) -> None:
        try:
            while True:
                self._peers.send(self._outboxes[host].get(), host, tag=_TAG)
        except Exception as error:  # noqa: BLE001 - whoever sends or waits next raises it
            self._inbox.fail(error)

    def _received(self, host: int) -> tuple[str, Any]:
        (call, shape), data = self._peers.receive(host, tag=_TAG)
        return call, _built(shape, data)[0]


def _built(shape: Any, data: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Return what ``_described`` described as ``shape``, its tensors out of ``data``, and what is left of that."""
    kind, what = shape
    if kind == "tensor":
        dtype = torch_dtype(what[1])
        length = math.prod(what[0]) * dtype.itemsize
        return data[:length].view(dtype).view(what[0]), data[aligned(length) :]
    if kind == "plain":
        return what, data
    if kind in (_FAILED, _FAILED_FOR_LOCKSTEP):
        return FailedCallError(what, hangs_on_lockstep=kind == _FAILED_FOR_LOCKSTEP), data
    parts = []
    for part in what:
        value, data = _built(part, data)
        parts.append(value)
    return tuple(parts) if kind == "tuple" else parts, data


def _described(value: Any, tensors: list[torch.Tensor]) -> list[Any]:
    """Return what ``value`` is as JSON; its tensors are added to ``tensors``, in the order in which they are met."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", [list(value.shape), dtype_name(value.dtype)]]
    if value is None or isinstance(value, bool | int | float | str):
        return ["plain", value]
    if type(value) in (tuple, list):
        return [type(value).__name__, [_described(part, tensors) for part in value]]
    raise ConfigError(
        f"{KEY}: a block returns a {type(value).__name__}, which isn't sent to another host; leave it null"
    )


def _moved(value: Any, device: torch.device) -> Any:
    """Return ``value`` with its tensors on ``device``."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    return type(value)(_moved(part, device) for part in value) if isinstance(value, tuple | list) else value
