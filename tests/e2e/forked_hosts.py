"""Hosts without torchrun's start: forks with the environment that it gives, whose rendezvous is the test's.

The imports of three processes and of torchrun's own take most of such a test.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed

from tests.deadline import deadline
from tests.e2e.conftest import finish, start


def run_forks(
    folder: Path, *arguments: Sequence[str], entry: str = "offstage", own: Mapping[int, Mapping[str, str]] = {},
    seconds: int = 120,
) -> list[tuple[int, str, str]]:  # fmt: skip
    """Run a host with each of the ``arguments``, without torchrun; return of each its exit code, output and errors.

    Each is what ``entry`` names, as in ``tests.e2e.conftest.start``; ``own`` are variables of one host's environment.
    """
    folder.mkdir(exist_ok=True)
    distributed: Any = torch.distributed  # what it exports for type checkers lacks its stores
    # Asked for a free port itself, torch misses its own now and then.
    listening = socket.create_server(("127.0.0.1", 0))
    rendezvous = distributed.TCPStore(
        *listening.getsockname(), is_master=True, timeout=timedelta(seconds=60), master_listen_fd=listening.detach()
    )
    hosts = []
    for rank, given in enumerate(arguments):
        variables = {"RANK": rank, "WORLD_SIZE": len(arguments), "LOCAL_WORLD_SIZE": len(arguments)}
        variables |= {"TORCHELASTIC_USE_AGENT_STORE": True}
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": rendezvous.port}
        extra = {name: str(value) for name, value in {**variables, **place}.items()}
        hosts.append(start(folder, *given, entry=entry, extra={**extra, **own.get(rank, {})}))
    try:
        with deadline(seconds):
            ended = [finish(host, folder, {}, seconds=seconds) for host in hosts]
    finally:
        for host in hosts:  # those that are late, or that wait for one that is
            host.kill()
    return [(host.code, host.out, host.err) for host in ended]


def run_alike(count: int, main: Callable[[], None], folder: Path, *arguments: str) -> None:
    """Run ``main`` as each of ``count`` hosts with the ``folder`` and the ``arguments``; all must end well."""
    given = [str(folder), *arguments]
    ended = run_forks(folder, *[given] * count, entry=f"{main.__module__}:{main.__name__}", seconds=900)
    assert [code for code, _, _ in ended] == [0] * count, (arguments, [err[-3000:] for _, _, err in ended])
