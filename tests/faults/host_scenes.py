"""What is done to hosts that run together, and what must come of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from importlib import metadata
from pathlib import Path

import psutil
from safetensors import safe_open
from safetensors.torch import save_file

from offstage.pipeline.memory_cgroups import make_group
from tests.faults.hosts import SHORT, Hosts, Scene

ROOT = Path(__file__).parents[2]
TINY = ROOT / "conf/checkpoints/tiny"
ENDED, KILLED, BOTH = {5}, {-9}, {0: {5}, 1: {5}}
CUT_SECONDS = 28.0


def during(rank: int, stage: str, number: int = signal.SIGKILL) -> Callable[[Hosts], None]:
    """Send ``rank`` a signal once ``stage`` is at work there."""

    def fault(hosts: Hosts) -> None:
        hosts.await_log(f"{stage}: begins", [rank] if stage != "generate" else [0, 1])
        hosts.signal(rank, number)

    return fault


def at_start(hosts: Hosts) -> None:
    """Kill host 1 before it has come to the others."""
    hosts.signal(1, signal.SIGKILL)


def slow(hosts: Hosts) -> None:
    """Have host 1 at work for a tenth of the time."""
    hosts.await_log("generate: begins")
    process, until = hosts.processes[1], time.monotonic() + 12
    hosts.began = time.monotonic()
    while process.poll() is None and time.monotonic() < until:
        process.send_signal(signal.SIGSTOP)
        time.sleep(0.9)
        process.send_signal(signal.SIGCONT)
        time.sleep(0.1)


def ports_of(hosts: Hosts) -> list[int]:
    """Return the ports by which host 1 is connected."""
    found = psutil.Process(hosts.processes[1].pid).net_connections("tcp")
    return sorted({one.laddr.port for one in found if one.status == psutil.CONN_ESTABLISHED})


def cut(hosts: Hosts, seconds: float | None) -> None:
    """Have every packet from and to host 1 lost, for so many ``seconds`` or for good."""
    hosts.await_log("generate: begins")
    rules = [[way, str(port)] for port in ports_of(hosts) for way in ("--sport", "--dport")]
    for rule in rules:
        _filter("-I", rule)
        hosts.stack.callback(_filter, "-D", rule)
    hosts.began = time.monotonic()
    if seconds is not None:
        time.sleep(seconds)
        hosts.stack.close()


def _filter(what: str, rule: list[str]) -> None:
    command = ["iptables", "-w", "10", what, "INPUT", "-i", "lo", "-p", "tcp", *rule, "-j", "DROP"]
    subprocess.run(command, check=True, capture_output=True)


def out_of_memory(hosts: Hosts) -> None:
    """Give host 1 a memory group that is smaller than what it holds already."""
    hosts.await_log("shard_load: begins")
    group = make_group()
    hosts.stack.callback(group.folder.rmdir)
    (group.folder / "memory.limit_in_bytes").write_text(str(40 << 20))
    (group.folder / "cgroup.procs").write_text(str(hosts.processes[1].pid))
    hosts.began = time.monotonic()


def with_checkpoints(change: Callable[[Path], object]) -> Callable[[Hosts], None]:
    """Give each host a copy of the embedded checkpoint, and ``change`` that of host 1."""

    def prepare(hosts: Hosts) -> None:
        for rank in hosts.ranks:
            folder = hosts.root / f"checkpoint-{rank}"
            shutil.copytree(TINY, folder)
            hosts.own[rank] = [f"model.path={folder}", "model=pretrained"]
        change(hosts.root / "checkpoint-1")

    return prepare


def other_content(folder: Path) -> None:
    """Change one number of each tensor of the checkpoint in ``folder``."""
    (file,) = folder.glob("*.safetensors")
    with safe_open(file, "pt") as opened:
        tensors, about = {name: opened.get_tensor(name) for name in opened.keys()}, opened.metadata()  # noqa: SIM118
    for tensor in tensors.values():
        tensor.view(-1)[0] += 1
    save_file(tensors, file, about)


def other_config(folder: Path) -> None:
    """Give the checkpoint in ``folder`` another constant of its norms."""
    text = (folder / "config.json").read_text()
    changed = text.replace('"rms_norm_eps": 1e-', '"rms_norm_eps": 2e-')
    assert changed != text
    (folder / "config.json").write_text(changed)


def no_weights(folder: Path) -> None:
    """Have the weights in ``folder`` be gone."""
    (file,) = folder.glob("*.safetensors")
    file.unlink()


def damaged_weights(folder: Path) -> None:
    """Cut the weights in ``folder`` in half."""
    (file,) = folder.glob("*.safetensors")
    os.truncate(file, file.stat().st_size // 2)


def option(*arguments: str) -> Callable[[Hosts], None]:
    """Give host 1 other arguments."""

    def prepare(hosts: Hosts) -> None:
        hosts.own[1] = [*arguments]

    return prepare


def version(distribution: str) -> Callable[[Hosts], None]:
    """Have host 1 find the ``distribution`` installed as another version."""

    def prepare(hosts: Hosts) -> None:
        folder = hosts.root / "installed" / f"{distribution.replace('-', '_')}-99.0.dist-info"
        folder.mkdir(parents=True)
        text = metadata.distribution(distribution).read_text("METADATA") or ""
        own = f"Version: {metadata.version(distribution)}"
        assert own in text
        (folder / "METADATA").write_text(text.replace(own, "Version: 99.0", 1))
        hosts.variables[1] = {"PYTHONPATH": str(folder.parent)}

    return prepare


def port_taken(hosts: Hosts) -> None:
    """Have another program listen at the port, and never answer."""
    listening = hosts.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    hosts.port = int(listening.getsockname()[1])


def missing(hosts: Hosts) -> None:
    """Start host 0 of two alone."""
    hosts.ranks = [0]


def one_too_many(hosts: Hosts) -> None:
    """Start a third host of two."""
    hosts.ranks = [0, 1, 2]
    hosts.arguments = [*SHORT]


def twice(hosts: Hosts) -> None:
    """Start host 1 as host 0 too."""
    hosts.variables[1] = {"RANK": "0"}


def other_size(hosts: Hosts) -> None:
    """Tell host 1 that there are three."""
    hosts.variables[1] = {"WORLD_SIZE": "3"}


def small_disk(hosts: Hosts) -> None:
    """Give host 1 a disk for its outputs that is full."""
    folder = hosts.folder(1) / "disk"
    folder.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], check=True)
    hosts.stack.callback(subprocess.run, ["umount", "-l", folder], check=True)
    (folder / "filled").write_bytes(bytes(900 << 10))
    hosts.own[1] = [f"offload_folder={folder}/offload", "model.dtype=float32"]
    hosts.own[0] = ["model.dtype=float32"]


def strangers(hosts: Hosts) -> None:
    """Have strangers connect to every port of the hosts, while they generate, and send what is no message."""
    hosts.await_log("generate: begins")
    hosts.began = time.monotonic()
    ports = {
        one.laddr.port
        for process in hosts.processes.values()
        for one in psutil.Process(process.pid).net_connections("tcp")
        if one.status == psutil.CONN_LISTEN
    }
    assert ports

    def disturb(port: int) -> None:
        for noise in (b"", b"GET / HTTP/1.0\r\n\r\n", os.urandom(1 << 16), b"\xff" * 64, b"\0" * 64):
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=2) as connection:
                connection.sendall(noise)
                time.sleep(0.2)

    noisy = [threading.Thread(target=disturb, args=(port,)) for port in ports]
    for each in noisy:
        each.start()
    for each in noisy:
        each.join()


def waiting_interrupt(hosts: Hosts) -> None:
    """Have host 1 wait for host 0, which hangs, and interrupt host 1."""
    hosts.await_log("generate: begins")
    hosts.processes[0].send_signal(signal.SIGSTOP)
    time.sleep(1)
    hosts.signal(1, signal.SIGINT)


COMPLETED = {0: {0}, 1: {0}}
SCENES = (
    Scene("killed at the start, host 1", "host 1 didn't come|host 1 went away", {0: ENDED, 1: KILLED}, fault=at_start, seconds=150),
    Scene("killed in plan, host 1", "host 1 went away", {0: ENDED, 1: KILLED}, fault=during(1, "plan")),
    Scene("killed in shard_load, host 1", "host 1 went away", {0: ENDED, 1: KILLED}, fault=during(1, "shard_load")),
    Scene("killed in dispatch, host 0", "host 0 went away", {0: KILLED, 1: ENDED}, fault=during(0, "dispatch")),
    Scene("killed in generate, host 0", "host 0 went away", {0: KILLED, 1: ENDED}, fault=during(0, "generate")),
    Scene("killed in generate, host 1", "host 1 went away", {0: ENDED, 1: KILLED}, fault=during(1, "generate")),
    Scene("hangs (SIGSTOP), host 0", "host 0.* (has said nothing for 20 s|can't be reached)", {0: KILLED, 1: ENDED}, fault=during(0, "generate", signal.SIGSTOP), spared=[0]),
    Scene("hangs (SIGSTOP), host 1", "host 1 has said nothing for 20 s", {0: ENDED, 1: KILLED}, fault=during(1, "generate", signal.SIGSTOP), spared=[1]),
    Scene("slow, host 1", "", COMPLETED, fault=slow, seconds=120),
    Scene("the network stalls for 10 s", "", COMPLETED, fault=lambda hosts: cut(hosts, 10), seconds=120),
    Scene("the link is cut for good", "host 1 has said nothing|host 0.* can't be reached", BOTH, fault=lambda hosts: cut(hosts, None)),
    Scene("out of memory, host 1", "host 1 went away", {0: ENDED, 1: KILLED}, fault=out_of_memory),
    Scene("another checkpoint, host 1", r"model.safetensors of the checkpoint is .* on host", BOTH, with_checkpoints(other_content)),
    Scene("another config.json, host 1", r"config.json of the checkpoint is .* on host", BOTH, with_checkpoints(other_config)),
    Scene("no weights, host 1", "host 1: model.path", {0: {5}, 1: {3}}, with_checkpoints(no_weights)),
    Scene("damaged weights, host 1", "host 1: .*model.safetensors", {0: {5}, 1: {3}}, with_checkpoints(damaged_weights)),
    Scene("another config, host 1", "generate.max_new_tokens is 900 on host 0 and 7 on host 1|is 7 on host 1 and 900", BOTH, option("generate.max_new_tokens=7", "generate.min_new_tokens=7")),
    Scene("another dtype, host 1", "model.dtype is ", BOTH, option("model.dtype=float32")),
    Scene("a wrong key, host 1", "host 1: ", {0: {5}, 1: {2}}, option("generate.max_new_tokens=none")),
    Scene("another offstage, host 1", "offstage is .*99.0", BOTH, version("offstage-pipeline")),
    Scene("another torch, host 1", "torch is .*99.0", BOTH, version("torch")),
    Scene("the port is taken", "MASTER_PORT=.* can't listen there", BOTH, port_taken),
    Scene("a host never comes", "host 1 didn't come within 120 s", {0: {5}}, missing, seconds=150),
    Scene("one host too many", "RANK=2: the 2 hosts", {0: {0}, 1: {0}, 2: {5}}, one_too_many, seconds=120),
    Scene("two are host 0", "is host 0 .* for who came first|can't listen there", BOTH, twice),
    Scene("hosts of two runs", "WORLD_SIZE is ", BOTH, other_size),
    Scene("SIGINT, host 0", "host 0: interrupted", {0: {130}, 1: {5}}, fault=during(0, "generate", signal.SIGINT)),
    Scene("SIGINT, host 1", "host 1: interrupted", {0: {5}, 1: {130}}, fault=during(1, "generate", signal.SIGINT)),
    Scene("SIGTERM, host 1", "host 1: interrupted", {0: {5}, 1: {130}}, fault=during(1, "generate", signal.SIGTERM)),
    Scene("SIGINT while host 0 hangs, host 1", "interrupted", {0: KILLED, 1: {130, 5}}, fault=waiting_interrupt, spared=[0]),
    Scene("disk full, host 1", "host 1: .*(No space left|offload)", {0: {5}, 1: {4, 5}}, small_disk),
    Scene("strangers at every port", "", COMPLETED, fault=strangers, seconds=120),
)  # fmt: skip
"""The table."""
