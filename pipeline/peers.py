"""The processes that torchrun started for one run, of which this is one: what they tell each other, and who is lost.

Values go between them as tensors and JSON, over torch.distributed; nothing is pickled. Each notes every second in the
rendezvous' store that it lives, and looks at the others' notes: where one failed, or says nothing more, all end.
"""

from __future__ import annotations

import atexit
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from offstage.pipeline.command_exit import INTERRUPTED
from offstage.pipeline.errors import apart, words_of
from offstage.pipeline.host_watch import HostWatch
from offstage.pipeline.plain_data import leaves
from offstage.pipeline.process_setup import STARTED_TOGETHER, is_one_of_several
from offstage.pipeline.rendezvous import (
    HostError,
    connect_seconds,
    excuse,
    first_line,
    meet,
    variable,
)

if TYPE_CHECKING:
    import torch

_LENGTHS = struct.Struct("<QQ")
"""What a message begins with: the bytes of its JSON, and of all of it."""
_ALIGNMENT = 64
"""Tensors begin at multiples of so many bytes of a message."""
_FIRST_BYTES, _MOST_AT_ONCE = 512, 2**20
"""What is received before it is known how long a message is: as much as the last one had, within these. A token's
messages are as long as those of the token before, so each goes at once; a rest would wait until it is asked for."""
_NEVER_TAG = 2**20
"""By which nothing is sent."""
_ENDING_SECONDS = 10.0
"""How long other threads have, at most, to end what they wait for as the process ends."""
_EVER = timedelta(days=30)
"""Those who are slow are waited for: whether they live is told otherwise."""
_LIBRARIES = ("offstage", "torch", "transformers", "tokenizers")
_OWN_KEYS = {"max_memory", "offload_folder", "outputs", "hardware"}
_OWN_PATHS = {"path", "tokenizer", "adapter"}
"""What may differ from host to host: keys of a config, and those below ``model``; of files the content is compared."""
_left = threading.Event()


def started_together() -> int:
    """Return how many processes torchrun started, this one among them; 1 where it is alone."""
    return variable("WORLD_SIZE") if is_one_of_several() else 1


def own_rank() -> int:
    """Return the number of this process among them."""
    return variable("RANK") if started_together() > 1 else 0


def environment_alone() -> dict[str, str]:
    """Return the environment of a process that this one starts for itself, and that is none of them."""
    return {name: value for name, value in os.environ.items() if name not in STARTED_TOGETHER}


def are_together(config: Mapping[str, Any]) -> bool:
    """Return whether the processes that torchrun started carry out one run of ``config``, and not each its own."""
    return started_together() > 1 and (config.get("hardware") or {}).get("hosts") is not None


@lru_cache(maxsize=1)
def peers() -> Peers:
    """Return the processes that torchrun started, who have met; raises ``HostError`` where one doesn't come."""
    return Peers()


def excuse_this(code: int | str | None) -> None:
    """Tell the others, if there are any, that this process ends with exit ``code`` before it met them."""
    with suppress(HostError):  # what the environment says of them is wrong, which was said
        if code and started_together() > 1 and not peers.cache_info().currsize and not _left.is_set():
            ended = f"it ended with exit code {code} before it began, and says why itself"
            excuse(own_rank(), started_together(), "interrupted" if code == INTERRUPTED else ended)


def leave_to_another() -> None:
    """Have another process, which this one waits for, be the one that the others are to meet, or are told of."""
    _left.set()


class Peers:
    """The ``size`` processes of a run, which know each other by their ``rank``; they connect as one first sends.

    ``sent_bytes`` are those of tensors so far.
    """

    def __init__(self) -> None:
        import torch.distributed as distributed

        self.rank, self.size = own_rank(), started_together()
        self.sent_bytes = 0
        self._distributed = distributed
        self._waits: list[Any] = []
        self._connecting, self._connected = threading.Lock(), None
        self._first_sent: dict[tuple[int, int], int] = {}  # how much of the next message, by host and tag
        self._first_received: dict[tuple[int, int], int] = {}
        self._ending, self._is_over = threading.Lock(), False
        self._store, machines = meet(self.rank, self.size)
        self._watch = HostWatch(self.rank, machines)
        atexit.register(self._end_waits)  # the last of both: others may still want what threads have yet to send
        atexit.register(self._watch.leave)

    def exchange(self, value: object) -> list[Any]:
        """Return what each of them gives as ``value``, in their order: JSON."""
        values = []
        for host in range(self.size):
            if host == self.rank:
                message = packed(value)
                for other in range(self.size):
                    self.send(message, other)
                values.append(json.loads(json.dumps(value)))
            else:
                values.append(self.receive(host)[0])
        return values

    def agree(self, said: bool) -> bool:
        """Return whether all of them say so."""
        return all(self.exchange(said))

    def require_same(self, values: Mapping[str, object]) -> None:
        """Refuse to go on where another host has another of the ``values``, which are told by what they are."""
        by_host = self.exchange(values)
        mine = by_host[self.rank]
        for host, theirs in enumerate(by_host):
            for what in sorted(mine.keys() | theirs.keys()):
                other, own = theirs.get(what), mine.get(what)
                if other != own:
                    raise HostError(
                        f"{what} is {other!r} on host {host} and {own!r} on host {self.rank}; have the same on both"
                    )

    def send(self, message: torch.Tensor, host: int, *, tag: int = 0) -> None:
        """Send what ``packed`` returned to ``host``; to this one itself nothing is sent.

        What is sent to a host by one ``tag`` is received by it in that order; threads may have tags of their own.
        """
        import torch

        if host == self.rank:
            return
        first = self._first_sent.get((host, tag), _FIRST_BYTES)
        self._first_sent[host, tag] = _first_of_next(message.numel())
        missing = torch.zeros(max(0, first - message.numel()), dtype=torch.uint8)
        self._send(torch.cat((message, missing)) if missing.numel() else message[:first], host, tag)
        if message.numel() > first:
            self._send(message[first:], host, tag)

    def receive(self, host: int, *, tag: int = 0) -> tuple[Any, torch.Tensor]:
        """Return the value that ``host`` sends next, and the bytes of the tensors that come with it."""
        import torch

        message = first = torch.empty(self._first_received.get((host, tag), _FIRST_BYTES), dtype=torch.uint8)
        self._receive(first, host, tag)
        length, whole = _LENGTHS.unpack(bytes(first[: _LENGTHS.size].numpy()))
        if whole > first.numel():
            message = torch.empty(whole, dtype=torch.uint8)
            message[: first.numel()] = first
            self._receive(message[first.numel() :], host, tag)
        self._first_received[host, tag] = _first_of_next(whole)
        text = message[_LENGTHS.size : _LENGTHS.size + length]
        return json.loads(bytes(text.numpy())), message[aligned(_LENGTHS.size + length) : whole]

    @property
    def _group(self) -> Any:
        """Those who are connected, once: threads that send and receive ask at the same time."""
        with self._connecting:
            if self._connected is None:
                self._connected = self._connect()
            return self._connected

    def _connect(self) -> Any:
        """Return a group of all. All connect at once, and whoever ends meanwhile is missed by the watch alone."""
        self._store.set_timeout(timedelta(seconds=connect_seconds()))
        with self._guarded():
            if not self._distributed.is_initialized():
                self._distributed.init_process_group(
                    "gloo", store=self._store, rank=self.rank, world_size=self.size, timeout=_EVER
                )
            return self._distributed.new_group(backend="gloo", timeout=_EVER)  # a script may have one of its own

    def _send(self, data: torch.Tensor, host: int, tag: int) -> None:
        with self._guarded(host):
            self._wait(self._distributed.isend, data, host, tag)

    def _receive(self, data: torch.Tensor, host: int, tag: int) -> None:
        with self._guarded(host):
            self._wait(self._distributed.irecv, data, host, tag)

    def _wait(self, begin: Callable[..., Any], data: torch.Tensor, host: int, tag: int) -> None:
        """Wait until ``data`` is sent or received, as ``begin`` begins it."""
        group = self._group
        with self._ending:
            if self._is_over:
                raise HostError("the process ends, and waits for nothing more")
            work = begin(data, host, group=group, tag=tag)
            self._waits.append(work)
        try:
            work.wait()
        finally:
            self._waits.remove(work)

    def _end_waits(self) -> None:
        """End what other threads wait for as the process ends: one that is still inside then aborts it.

        No wait can be ended from outside but by one that takes too long, after which gloo closes all connections.
        """
        import torch

        with self._ending:  # no thread begins to wait after that
            self._is_over = True
        if not self._waits:
            return
        other = (self.rank + 1) % self.size
        with suppress(RuntimeError):
            never_sent: Any = self._distributed.irecv(torch.empty(1), other, group=self._group, tag=_NEVER_TAG)
            never_sent.wait(timedelta(milliseconds=1))
        until = time.monotonic() + _ENDING_SECONDS
        while self._waits and time.monotonic() < until:
            time.sleep(0.01)

    @contextmanager
    def _guarded(self, host: int | None = None) -> Iterator[None]:
        """Turn what the connection raises into the error that says which host was lost, and why if that is known."""
        try:
            yield
        except RuntimeError as error:
            if host is None:
                unconnected = f"the hosts of the run couldn't be connected: {first_line(error)}"
                raise HostError(self._watch.reason() or unconnected) from apart(error)
            raise HostError(self._watch.reason(host) or f"{self._watch.name(host)} went away") from apart(error)

    def ending(self, end: Callable[[BaseException], object]) -> None:
        """Have ``end`` called with the reason where the run must be ended from outside of what is at work."""
        self._watch.end = end

    def fail(self, reason: str) -> None:
        """Tell the others why this one ends, and wait a moment until they know."""
        self._watch.fail(reason)

    def interrupted(self) -> str | None:
        """Tell the others that this one was interrupted; return which host torchrun did that for, null if for none."""
        return self._watch.interrupted()

    def close(self) -> None:
        """End together: nobody is missed from now on."""
        self.exchange(True)
        self._watch.leave()


def packed(value: object, tensors: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    """Return the message of ``value``, which is JSON, and of what ``tensors`` hold now: bytes, on the host."""
    import torch

    text = json.dumps(value, separators=(",", ":")).encode()
    begins = [aligned(_LENGTHS.size + len(text))]
    for tensor in tensors:
        begins.append(aligned(begins[-1] + tensor.nbytes))
    message = torch.empty(begins[-1], dtype=torch.uint8)
    head = bytearray(_LENGTHS.pack(len(text), begins[-1]) + text)
    message[: len(head)] = torch.frombuffer(head, dtype=torch.uint8)
    for begin, tensor in zip(begins, tensors, strict=False):  # and where the last one ends
        message[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())
    return message


def aligned(length: int) -> int:
    """Return where a tensor of a message begins that comes after so many bytes."""
    return -(-length // _ALIGNMENT) * _ALIGNMENT


def _first_of_next(length: int) -> int:
    """Return how much of a message is received before its length is known, after one of so many bytes.

    After a long one, which is many tokens', short ones follow.
    """
    return length if _FIRST_BYTES <= length <= _MOST_AT_ONCE else _FIRST_BYTES


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
    except KeyboardInterrupt as interrupt:
        if (lost := here.interrupted()) is not None:
            raise HostError(lost) from apart(interrupt)
        raise
    except BaseException as error:
        here.fail(str(error) or words_of(error))
        raise
    here.close()
