"""Where the processes of one run find each other: a store of keys at ``MASTER_ADDR``, port ``MASTER_PORT``.

torchrun serves it, else the first process does, at that address alone. A process goes on once all others have come, and
says which haven't; what else may be wrong with how they were started is told here too.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from functools import lru_cache, partial
from typing import Any, NoReturn

import psutil

from offstage.pipeline.errors import OffstageError

CONNECT_VARIABLE, _CONNECT_SECONDS = "OFFSTAGE_CONNECT_SECONDS", "120"
"""How long the others have to come, where the environment doesn't say otherwise by that name."""
ANSWER_SECONDS, EXCUSE_SECONDS = 20.0, 20.0
"""How long the store has to answer once it is there, and how long one that ends stays at most, to tell the others."""
_LOOK_SECONDS = 0.2
_REFUSED = "refused"
"""The key by which one of those who come together tells the others why they can't go on."""
_unreachable = threading.Event()
"""Whether the store was waited for and isn't there: nobody can be told anything."""
_INTERFACE = "GLOO_SOCKET_IFNAME"


class HostError(OffstageError, OSError):
    """Another host of the run failed, went away, or runs something else."""

    exit_code = 5


def variable(name: str, default: str = "") -> int:
    """Return the number in the environment's variable ``name``, which says how processes were started."""
    given = os.environ.get(name, default)
    if not given.isdecimal():
        how = f"give seconds, or leave it out for {default}" if default else "torchrun sets it, or give it by hand"
        raise HostError(f"{name}={given!r} in the environment is no number; {how}")
    return int(given)


def connect_seconds() -> int:
    """Return how long the others have to come."""
    return variable(CONNECT_VARIABLE, _CONNECT_SECONDS)


def is_served_by_first() -> bool:
    """Return whether the first process serves the store, and not who started it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"


def open_store() -> Any:
    """Return a connection to the store, for one who asks at a time: each waits until the one before has its answer."""
    import torch.distributed as distributed

    address, port = _place()
    kinds: Any = distributed  # what it exports for type checkers lacks its stores
    connect = partial(kinds.TCPStore, address, port, is_master=False, timeout=timedelta(seconds=ANSWER_SECONDS))
    failed = (
        f"MASTER_ADDR={address}, MASTER_PORT={port}: no rendezvous of a run answers there ({{}}): the port is another "
        "program's, or host 0 went away; give all hosts a free port of host 0"
    )
    return kinds.PrefixStore(
        f"offstage/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", _answer(connect, failed=failed)
    )


def meet(rank: int, size: int) -> tuple[Any, Sequence[str]]:
    """Wait until all ``size`` processes have come, of which this is ``rank``; return the store, and their machines.

    Raises ``HostError`` where one doesn't come, or they were started as two different runs.
    """
    if rank >= size:
        raise HostError(f"RANK={rank}: the {size} hosts of WORLD_SIZE={size} have numbers from 0 to {size - 1}")
    _began()
    if rank == 0 and is_served_by_first():
        _serve()
    _choose_interface(_reached_from(connect_seconds()))
    store = open_store()
    try:
        for key, value, what in (
            (f"host {rank}", _own_name(), f"the process that is host {rank}"),
            ("size", str(size), "WORLD_SIZE"),
        ):
            first = _set_first(store, key, value)
            if first != value:
                _refuse(store, f"{what} is {first} for who came first, and {value} here; start each host once, alike")
        machines = [_wait(store, host).partition(", process ")[0] for host in range(size)]
        if (reason := _answer(partial(refusal_in, store))) is not None:
            raise HostError(reason)
    except KeyboardInterrupt:  # where this is no command, nobody is told later
        _set_first(store, _REFUSED, f"host {rank}: interrupted")
        raise
    return store, machines


def excuse(rank: int, size: int, reason: str) -> None:
    """Tell the others that this process, which is ``rank``, ends before it met them, and why; they end too.

    Host 0 is waited for until it can be told, and where it serves the store it waits for the others itself.
    """
    if rank >= size or _unreachable.is_set():
        return
    until = min(time.monotonic() + EXCUSE_SECONDS, _began() + connect_seconds())
    with suppress(HostError):
        serves = rank == 0 and is_served_by_first()
        if serves:
            _serve()
        _reached_from(until - time.monotonic() if is_served_by_first() else 0)  # torchrun's is there, or was
        store = open_store()
        _set_first(store, _REFUSED, f"host {rank}: {reason}")
        _set_first(store, f"host {rank}", _own_name())  # for this one nobody waits any more
        others = [f"host {host}" for host in range(size) if host != rank]
        while serves and time.monotonic() < until and not _answer(partial(store.check, others)):
            time.sleep(_LOOK_SECONDS)
        time.sleep(2 * _LOOK_SECONDS * serves)  # they look as often


def refusal_in(store: Any) -> str | None:
    """Return why those who come together can't go on, as one of them says in ``store``; null where none does."""
    return str(store.get(_REFUSED).decode()) if store.check([_REFUSED]) else None


def first_line(error: Exception) -> str:
    """Return what ``error`` says, without the trace that torch adds to it."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _refuse(store: Any, reason: str) -> NoReturn:
    _set_first(store, _REFUSED, reason)
    raise HostError(reason)


def _set_first(store: Any, key: str, value: str) -> str:
    """Return what ``key`` has in ``store``: the ``value``, unless there is one."""
    return str(_answer(partial(store.compare_set, key, "", value)).decode())


def _wait(store: Any, host: int) -> str:
    """Return who ``host`` is, once it has come."""
    seconds, key = connect_seconds(), f"host {host}"
    until = time.monotonic() + seconds
    while not _answer(partial(store.check, [key])):
        if (reason := _answer(partial(refusal_in, store))) is not None:
            raise HostError(reason)
        if time.monotonic() > until:
            _refuse(store, f"host {host} didn't come within {seconds} s; start it, or fewer hosts")
        time.sleep(_LOOK_SECONDS)
    return str(_answer(partial(store.get, key)).decode())


def _answer(ask: Callable[[], Any], *, failed: str = "host 0 went away while hosts came together ({})") -> Any:
    """Return what the store answers to ``ask``. Raises ``HostError``, which says how that ``failed``.

    Who asks a store that hangs, hangs for good and heeds no signal: that is a thread of its own.
    """
    answers: list[Any] = []
    errors: list[RuntimeError | None] = []

    def wait() -> None:
        try:
            answers.append(ask())
        except RuntimeError as error:
            errors.append(error)

    asking = threading.Thread(target=wait, daemon=True)
    asking.start()
    asking.join(ANSWER_SECONDS)
    if answers:
        return answers[0]
    _unreachable.set()
    (error,) = errors or [None]
    reason = first_line(error) if error else f"it has said nothing for {ANSWER_SECONDS:.0f} s"
    raise HostError(failed.format(reason)) from error


@lru_cache(maxsize=1)
def _began() -> float:
    """Return when this process began to come to the others, by ``time.monotonic``."""
    return time.monotonic()


def _own_name() -> str:
    return f"{socket.gethostname()}, process {os.getpid()}"


def _place() -> tuple[str, int]:
    address = os.environ.get("MASTER_ADDR")
    if not address:
        raise HostError("MASTER_ADDR isn't set, and RANK is: give the address of host 0, or start hosts by torchrun")
    return address, variable("MASTER_PORT")


@lru_cache(maxsize=1)
def _serve() -> Any:
    """Serve the store, at the address that is given, and at no other."""
    import torch.distributed as distributed

    address, port = _place()
    kinds: Any = distributed
    try:
        addresses = [str(entry[4][0]) for entry in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)]
        listened = next((name for name in addresses if not _is_loopback(name)), addresses[0])
        if _is_loopback(listened) and not _is_loopback(address):
            listened = ""  # a machine that knows its own name as a loopback: others know it by an address
        kind = socket.AF_INET6 if ":" in listened else socket.AF_INET
        listening = socket.create_server((listened, port), family=kind, backlog=128)
    except OSError as error:
        raise HostError(
            f"MASTER_ADDR={address}, MASTER_PORT={port}: host 0 can't listen there ({error.strerror}); give all hosts "
            "an address of host 0 and a free port"
        ) from error
    return kinds.TCPStore(
        address, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach(),
        timeout=timedelta(seconds=ANSWER_SECONDS),
    )  # fmt: skip


def _reached_from(seconds: float) -> str:
    """Return the address from which this machine reaches the store, once something listens there."""
    (address, port), until = _place(), time.monotonic() + seconds
    while True:
        try:
            patience = min(ANSWER_SECONDS, max(1.0, until - time.monotonic()))
            with socket.create_connection((address, port), timeout=patience) as connection:
                return str(connection.getsockname()[0])
        except OSError as error:
            if time.monotonic() > until:
                _unreachable.set()
                raise HostError(
                    f"{address}:{port}: nothing answered for {seconds:.0f} s ({error.strerror or error}): "
                    "host 0 isn't there, or the network isn't"
                ) from error
        time.sleep(_LOOK_SECONDS)


def _choose_interface(address: str) -> None:
    """Have tensors go by the interface that has ``address``, where the environment names none."""
    if _INTERFACE in os.environ or (_is_loopback(address) and not _is_loopback(_place()[0])):
        return
    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            os.environ[_INTERFACE] = name


def _is_loopback(name: str) -> bool:
    with suppress(ValueError):
        return ipaddress.ip_address(name.partition("%")[0]).is_loopback
    return name == "localhost"
