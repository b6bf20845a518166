"""What is done to hosts that run together, and what must come of it."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
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
from offstage.pipeline.rendezvous import CONNECT_VARIABLE
from tests.faults.hosts import SHORT, Hosts, Scene

ROOT = Path(__file__).parents[2]
TINY = ROOT / "conf/checkpoints/tiny"
_SUSPENDED_SECONDS = 25.0
_MEETING_SECONDS = 1.5
"""After how long a host that has a record waits for those that don't come."""
ENDED, KILLED, BOTH = {5}, {-9}, {0: {5}, 1: {5}}


def during(rank: int, stage: str, number: int = signal.SIGKILL) -> Callable[[Hosts], None]:
    """Send ``rank`` a signal once ``stage`` is at work there."""

    def fault(hosts: Hosts) -> None:
        hosts.await_log(f"{stage}: begins", [rank] if stage != "generate" else [0, 1])
        hosts.signal(rank, number)

    return fault


def torchrun_during(rank: int, number: int) -> tuple[Callable[[Hosts], None], Callable[[Hosts], None]]:
    """Start hosts by torchrun, one for each, and send ``rank`` a signal while all generate."""

    def prepare(hosts: Hosts) -> None:
        hosts.by_torchrun = True

    return prepare, during(rank, "generate", number)


def short_wait(hosts: Hosts) -> None:
    """Have hosts wait for each other for less long than they do by default."""
    hosts.variables |= {rank: {CONNECT_VARIABLE: "12"} for rank in hosts.ranks}


def at_start(hosts: Hosts) -> None:
    """Kill host 1 before it has come to the others."""
    hosts.signal(1, signal.SIGKILL)


def before_they_met(rank: int, number: int, *, held: int) -> Callable[[Hosts], None]:
    """Send ``rank`` a signal before ``held`` has come to the others, which is stopped until then; they may be one."""

    def fault(hosts: Hosts) -> None:
        await_heeding(hosts, held)
        os.kill(hosts.process(held), signal.SIGSTOP)
        hosts.await_record([other for other in hosts.ranks if other != held])
        time.sleep(_MEETING_SECONDS)
        hosts.signal(rank, number)
        time.sleep(1)
        os.kill(hosts.process(held), signal.SIGCONT)

    return fault


def await_heeding(hosts: Hosts, rank: int) -> None:
    """Wait until ``rank`` heeds signals, which it does from its first imports on; before, they end any interpreter."""
    status = Path(f"/proc/{hosts.process(rank)}/status")
    while not int(status.read_text().split("SigCgt:")[1].split()[0], 16) >> (signal.SIGTERM - 1) & 1:
        time.sleep(0.001)


def as_it_starts(hosts: Hosts) -> None:
    """Send host 1 a signal as soon as it heeds any."""
    await_heeding(hosts, 1)
    hosts.signal(1, signal.SIGTERM)


def hangs_before_they_met(hosts: Hosts) -> None:
    """Stop host 0 for good as it waits for host 1, which comes then."""
    os.kill(hosts.process(1), signal.SIGSTOP)
    hosts.await_record([0])
    time.sleep(_MEETING_SECONDS)
    hosts.signal(0, signal.SIGSTOP)
    os.kill(hosts.process(1), signal.SIGCONT)


def of_three(hosts: Hosts) -> None:
    """Start three hosts."""
    hosts.size, hosts.ranks, hosts.arguments = 3, [0, 1, 2], [*SHORT]


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


def suspended(hosts: Hosts) -> None:
    """Stop both hosts for longer than a silence may be, as Slurm suspends a job, and have them go on."""
    hosts.await_log("generate: begins")
    hosts.began = time.monotonic()
    for rank, number in ((0, signal.SIGSTOP), (1, signal.SIGSTOP), (1, signal.SIGCONT), (0, signal.SIGCONT)):
        os.kill(hosts.process(rank), number)
        time.sleep(_SUSPENDED_SECONDS if (rank, number) == (1, signal.SIGSTOP) else 0.5)


def ports_of(hosts: Hosts) -> list[int]:
    """Return the ports by which host 1 is connected."""
    connections = psutil.Process(hosts.processes[1].pid).net_connections("tcp")
    return sorted({one.laddr.port for one in connections if one.status == psutil.CONN_ESTABLISHED})


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
    """Have host 1 get 2 MB more, in a memory group, and no byte beyond."""
    hosts.await_log("shard_load: begins")
    group = make_group()
    hosts.stack.callback(group.folder.rmdir)
    (group.folder / "memory.limit_in_bytes").write_text(str(2 << 20))
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
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
            about = opened.metadata()
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
    for file in folder.glob("*.safetensors"):
        file.unlink()


def damaged_weights(folder: Path) -> None:
    """Cut the weights in ``folder`` in half."""
    file = min(folder.glob("*.safetensors"))
    os.truncate(file, file.stat().st_size // 2)


def option(*arguments: str) -> Callable[[Hosts], None]:
    """Give host 1 other arguments."""

    def prepare(hosts: Hosts) -> None:
        hosts.own[1] = [*arguments]

    return prepare


def version(distribution: str) -> Callable[[Hosts], None]:
    """Have host 1 find the ``distribution`` installed as another version."""

    def prepare(hosts: Hosts) -> None:
        installed = metadata.distribution(distribution)
        (about,) = {
            Path(str(installed.locate_file(file))).parent for file in installed.files or () if file.name == "METADATA"
        }
        folder = hosts.root / "installed" / f"{distribution.replace('-', '_')}-99.0.dist-info"
        shutil.copytree(about, folder)
        text = (folder / "METADATA").read_text()
        own = f"Version: {installed.version}"
        assert own in text
        (folder / "METADATA").write_text(text.replace(own, "Version: 99.0", 1))
        hosts.variables[1] = {"PYTHONPATH": str(folder.parent)}

    return prepare


def other_kernels(hosts: Hosts) -> None:
    """Have torch choose its kernels on host 1 for a processor with less, and ask for hosts that compute alike."""
    hosts.arguments = [*hosts.arguments, "+hardware.exact_hosts=true"]
    hosts.variables[1] = {"ATEN_CPU_CAPABILITY": "avx2", "PYTHONPATH": str(ROOT)}  # read as torch is imported


def port_taken(hosts: Hosts) -> None:
    """Have another program listen at the port, and never answer."""
    listening = hosts.stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    hosts.port = int(listening.getsockname()[1])


def missing(hosts: Hosts) -> None:
    """Start host 0 of two alone, which doesn't wait for long."""
    hosts.ranks = [0]
    hosts.variables[0] = {CONNECT_VARIABLE: "5"}


def one_too_many(hosts: Hosts) -> None:
    """Start a third host of two."""
    hosts.ranks = [0, 1, 2]
    hosts.arguments = [*SHORT]


def twice(hosts: Hosts) -> None:
    """Start host 1 as host 0 too."""
    hosts.variables |= {0: {CONNECT_VARIABLE: "12"}, 1: {"RANK": "0", CONNECT_VARIABLE: "12"}}


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
    hosts.own[1] = [f"offload_folder={folder}/offload", "dtype=float32"]
    hosts.own[0] = ["dtype=float32"]


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
HANGS_0 = "host 0.* (has said nothing for 20 s|can't be reached)"
BY_TORCHRUN = {0: {1}, 1: {1}}
STOP, INT, TERM, KILL = signal.SIGSTOP, signal.SIGINT, signal.SIGTERM, signal.SIGKILL
ENDS_0, ENDS_1 = {0: KILLED, 1: ENDED}, {0: ENDED, 1: KILLED}
SCENES = (
    Scene("killed at the start, host 1", "host 1 (didn't come|went away)", ENDS_1, short_wait, at_start),
    Scene("killed in plan, host 1", "host 1 went away", ENDS_1, fault=during(1, "plan")),
    Scene("killed in shard_load, host 1", "host 1 went away", ENDS_1, fault=during(1, "shard_load")),
    Scene("killed in dispatch, host 0", "host 0 went away", ENDS_0, fault=during(0, "dispatch")),
    Scene("killed in generate, host 0", "host 0 went away", ENDS_0, fault=during(0, "generate")),
    Scene("killed in generate, host 1", "host 1 went away", ENDS_1, fault=during(1, "generate")),
    Scene("torchrun: killed, host 0", "host 0|interrupted", BY_TORCHRUN, *torchrun_during(0, KILL)),
    Scene("torchrun: killed, host 1", "host 1|interrupted", BY_TORCHRUN, *torchrun_during(1, KILL)),
    Scene("torchrun: SIGINT, host 1", "interrupted", BY_TORCHRUN, *torchrun_during(1, INT)),
    Scene("hangs (SIGSTOP), host 0", HANGS_0, ENDS_0, fault=during(0, "generate", STOP), spared=[0]),
    Scene("hangs (SIGSTOP), host 1", "host 1 has said no", ENDS_1, fault=during(1, "generate", STOP), spared=[1]),
    Scene("slow, host 1", "", COMPLETED, fault=slow, seconds=120),
    Scene("both suspended for 25 s", "", COMPLETED, fault=suspended, seconds=120),
    Scene("the network stalls for 10 s", "", COMPLETED, fault=lambda hosts: cut(hosts, 10), seconds=120),
    Scene("the link is cut for good", "host 1 has said nothing", BOTH, fault=lambda hosts: cut(hosts, None)),
    Scene("out of memory, host 1", "host 1 went away", ENDS_1, fault=out_of_memory),
    Scene("another checkpoint", r"safetensors of the checkpoint is .* on host", BOTH, with_checkpoints(other_content)),
    Scene("another config.json", r"config.json of the checkpoint is .* on host", BOTH, with_checkpoints(other_config)),
    Scene("no weights, host 1", "host 1: model.path", {0: {5}, 1: {3}}, with_checkpoints(no_weights)),
    Scene("damaged weights, host 1", "host 1: .*safetensors", {0: {5}, 1: {3}}, with_checkpoints(damaged_weights)),
    Scene("another config, host 1", "generate.max_new_tokens is .* on host", BOTH, option("generate.max_new_tokens=7")),
    Scene("another dtype, host 1", "dtype is ", BOTH, option("dtype=float32")),
    Scene("a wrong value, host 1", "host 1: max_memory", {0: {5}, 1: {2}}, option("max_memory.cpu=lots")),
    Scene(
        "a misspelt key, host 1",
        "host 1: it ended with exit code 2",
        {0: {5}, 1: {2}},
        option("genrate.seed=1"),
        unrecorded=[1],
    ),
    Scene("no room, host 1", "host 1.*max_memory", {0: {4, 5}, 1: {4, 5}}, option("max_memory.cpu=1KB")),
    Scene("another offstage, host 1", "offstage is .*99.0", BOTH, version("offstage-pipeline")),
    Scene("another torch, host 1", "torch is .*99.0", BOTH, version("torch")),
    Scene("other kernels, host 1", "exact_hosts: host 1 .* torch's kernels AVX2,", BOTH, other_kernels),
    Scene("the port is taken", "MASTER_PORT=.* can't listen there", BOTH, port_taken),
    Scene("a host never comes", "host 1 didn't come within 5 s", {0: {5}}, missing),
    Scene("one host too many", "RANK=2: the 2 hosts", {0: {0}, 1: {0}, 2: {5}}, one_too_many, seconds=120),
    Scene("two are host 0", "host 0.* for who came first|can't listen there", BOTH, twice),
    Scene("hosts of two runs", "WORLD_SIZE is ", BOTH, other_size),
    Scene("SIGINT, host 0", "host 0: interrupted", {0: {130}, 1: {5}}, fault=during(0, "generate", INT)),
    Scene("SIGINT, host 1", "host 1: interrupted", {0: {5}, 1: {130}}, fault=during(1, "generate", INT)),
    Scene("SIGTERM, host 1", "host 1: interrupted", {0: {5}, 1: {130}}, fault=during(1, "generate", TERM)),
    Scene(
        "SIGINT, host 0 waits for host 1",
        "host 0: interrupted",
        {0: {130}, 1: {5}},
        fault=before_they_met(0, INT, held=1),
    ),
    Scene(
        "SIGTERM, host 1 waits for host 0",
        "host 1: interrupted",
        {0: {5}, 1: {130}},
        fault=before_they_met(1, TERM, held=0),
    ),
    Scene(
        "SIGINT, host 0 comes to host 1",
        "host 0: interrupted",
        {0: {130}, 1: {5}},
        fault=before_they_met(0, INT, held=0),
        unrecorded=[0],
    ),
    Scene(
        "SIGTERM, host 1 comes to host 0",
        "host 1: interrupted",
        {0: {5}, 1: {130}},
        fault=before_they_met(1, TERM, held=1),
        unrecorded=[1],
    ),
    Scene("SIGTERM, host 1, as it starts", "host 1: inter", {0: {5}, 1: {130}}, fault=as_it_starts, unrecorded=[1]),
    Scene(
        "SIGINT, host 1 of 3, 2 isn't there",
        "host 1: interrupted",
        {0: {5}, 1: {130}, 2: {5}},
        of_three,
        before_they_met(1, INT, held=2),
    ),
    Scene("hangs, host 0 waits for host 1", "host 0", ENDS_0, fault=hangs_before_they_met, spared=[0]),
    Scene("SIGINT, host 1, as host 0 hangs", "interrupted", {0: KILLED, 1: {130}}, fault=waiting_interrupt, spared=[0]),
    Scene("disk full, host 1", "host 1: .*(No space left|offload)", {0: {5}, 1: {4, 5}}, small_disk),
    Scene("strangers at every port", "", COMPLETED, fault=strangers, seconds=120),
)
"""The table."""
