"""Networks between hosts that share a machine: ``python -m tests.benchmarks.networks --latency 0.0002``.

Each host has a network namespace of its own, with one link to all others. A rate is kept by tc's token bucket. Messages
are delayed outside of the kernel, which may have no netem: links are tap devices then, and one process hands every
frame that one of them sends to the others, so many seconds later. Run by itself it prints how long a message and its
answer take. Needs root.
"""

from __future__ import annotations

import argparse
import fcntl
import heapq
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count

from tests.benchmarks.offload import say

_TUNSETIFF, _TAP_WITHOUT_HEADER = 0x400454CA, 0x1002
_LONGEST_FRAME = 65_536
_AWAKE_SECONDS = 100e-6
"""So long before a frame is due the relay sleeps no more: waking takes a while."""
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}


@dataclass(frozen=True, slots=True)
class Links:
    """What joins hosts: the ``rate`` of each one's link, as tc takes it (``1gbit``), and a message's ``latency`` in
    seconds. Without either all are in one network, this process's.
    """

    rate: str | None = None
    latency: float | None = None

    @property
    def is_own(self) -> bool:
        """Whether each host has a network namespace of its own."""
        return self.rate is not None or self.latency is not None

    def address_of(self, host: int) -> str:
        """Return the address of ``host``."""
        return f"10.77.0.{host + 1}" if self.is_own else "127.0.0.1"

    @property
    def options(self) -> list[str]:
        """The overrides by which a plan knows of them."""
        found = []
        if self.rate is not None:
            number, unit = self.rate[:-4], self.rate[-4:]
            found.append(f"hardware.network.rate={float(number) * _BITS[unit] / 8:.0f}")
        if self.latency is not None:
            found.append(f"hardware.network.latency={self.latency}")
        return found


@contextmanager
def network(hosts: int, links: Links) -> Iterator[list[list[str]]]:
    """Lend a network namespace for each of ``hosts``, joined by links; yield what begins a command in each.

    Where none has one of its own all are in this one.
    """
    if not links.is_own:
        yield [[] for _ in range(hosts)]
        return
    names, inner = [f"offstage-{host}" for host in range(hosts)], [f"offs{host}b" for host in range(hosts)]
    with ExitStack() as undo:
        for name in names:
            _ip("netns", "add", name)
            undo.callback(_ip, "netns", "del", name)
        outer = undo.enter_context(_bridged(inner) if links.latency is None else _relayed(inner, links.latency))
        for host, name in enumerate(names):
            _ip("link", "set", inner[host], "netns", name)
            _ip("-n", name, "addr", "add", f"{links.address_of(host)}/24", "dev", inner[host])
            _ip("-n", name, "link", "set", inner[host], "up")
            _ip("-n", name, "link", "set", "lo", "up")
        within = [["ip", "netns", "exec", name] for name in names]
        for device, inside in [*zip(inner, within, strict=True), *((end, []) for end in outer)] if links.rate else ():
            bucket = ["rate", str(links.rate), "burst", "256kb", "latency", "50ms"]
            subprocess.run([*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket], check=True)
        # ``ip netns exec`` would mount another /sys, without the memory groups
        yield [
            ["nsenter", f"--net=/var/run/netns/{name}", "env", f"GLOO_SOCKET_IFNAME={device}"]
            for name, device in zip(names, inner, strict=True)
        ]


@contextmanager
def _bridged(inner: Sequence[str]) -> Iterator[list[str]]:
    """Make the devices ``inner``, whose other ends a bridge joins; yield these ends."""
    bridge, outer = "offstage-net", [f"{device}-out" for device in inner]
    with ExitStack() as undo:
        _ip("link", "add", bridge, "type", "bridge")
        undo.callback(_ip, "link", "del", bridge)
        _ip("link", "set", bridge, "up")
        for end, device in zip(outer, inner, strict=True):
            _ip("link", "add", end, "type", "veth", "peer", "name", device)
            undo.callback(_ip, "link", "del", end)  # with its other end, which the kernel forgets later than the name
            _ip("link", "set", end, "master", bridge, "up")
        yield outer


@contextmanager
def _relayed(inner: Sequence[str], seconds: float) -> Iterator[list[str]]:
    """Make the devices ``inner``, which a process joins that delays all by ``seconds``; yield no other ends."""
    taps = [os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK) for _ in inner]
    child = 0
    try:
        for tap, device in zip(taps, inner, strict=True):
            fcntl.ioctl(tap, _TUNSETIFF, struct.pack("16sH", device.encode(), _TAP_WITHOUT_HEADER))
        child = os.fork()
        if not child:
            try:
                _relay(taps, seconds)
            finally:
                os._exit(1)
        yield []
    finally:
        if child:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        for tap in taps:
            os.close(tap)


def _relay(taps: Sequence[int], seconds: float) -> None:
    """Hand what is sent by each of ``taps`` to all others after so many ``seconds``, for ever."""
    order = count()
    waiting: list[tuple[float, int, int, bytes]] = []
    while True:
        left = waiting[0][0] - time.perf_counter() - _AWAKE_SECONDS if waiting else None
        ready, _, _ = select.select(taps, [], [], None if left is None else max(0.0, left))  # epoll counts ms
        for tap in ready:
            frame = os.read(tap, _LONGEST_FRAME)
            heapq.heappush(waiting, (time.perf_counter() + seconds, next(order), tap, frame))
        while waiting and waiting[0][0] <= time.perf_counter():
            _, _, source, frame = heapq.heappop(waiting)
            for tap in taps:
                if tap != source:
                    with suppress(OSError):  # a device that isn't up loses it, as a cable would
                        os.write(tap, frame)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


_ANSWERING = """
import socket
door = socket.create_server(({address!r}, 29612))
print("open", flush=True)
peer, _ = door.accept()
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
while message := peer.recv(1):
    peer.sendall(message)
"""
_ASKING = """
import socket, time
peer = socket.create_connection(({address!r}, 29612))
peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
for _ in range(200):
    time.sleep(0.005)
    began = time.perf_counter()
    peer.sendall(b"x")
    peer.recv(1)
    print(time.perf_counter() - began)
"""


def round_trip(inside: Sequence[Sequence[str]], address: str) -> list[float]:
    """Return how many seconds each of some messages of a byte and its answer take between two hosts.

    ``inside`` begins a command on each, and the first one has the ``address``.
    """
    answer, ask = (
        [*inside[place], sys.executable, "-c", code.format(address=address)]
        for place, code in enumerate((_ANSWERING, _ASKING))
    )
    answering = subprocess.Popen(answer, stdout=subprocess.PIPE)
    try:
        assert answering.stdout is not None
        answering.stdout.readline()
        return [float(line) for line in subprocess.check_output(ask, text=True, timeout=60).split()]
    finally:
        answering.kill()
        answering.communicate()


def main() -> None:
    """Print how long a message and its answer take."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--latency", type=float, help="seconds that each message is under way")
    parser.add_argument("--rate", help="of each link, as tc takes it: 1gbit")
    arguments = parser.parse_args()
    links = Links(arguments.rate, arguments.latency)
    with network(2, links) as inside:
        took = round_trip(inside, links.address_of(0))
    say(f"a message of a byte and its answer: {statistics.median(took) * 1e3:.3f} ms, {max(took) * 1e3:.3f} at most")


if __name__ == "__main__":
    main()
