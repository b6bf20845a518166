"""A Slurm on this machine, of one node or of several that share it, for as long as a test needs it.

It installs nothing: munge and slurm-wlm must be there. All that it writes lies in one temporary folder, and it stops
what it started.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "sinfo", "squeue", "scancel", "scontrol")
CONFIG = """
ClusterName=offstage
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=10
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_min_interval=10000,sched_interval=1
MpiDefault=none
KillWait=10
ReturnToService=2
{nodes}
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the programs that aren't installed: none of them, and there can be a Slurm here."""
    return [name for name in (*DAEMONS, *COMMANDS) if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@contextmanager
def cluster(folder: Path, nodes: int = 1) -> Iterator[dict[str, str]]:
    """Yield the environment in which Slurm's commands, and offstage, find the cluster that runs in ``folder``.

    It has so many ``nodes``, each with its own daemon.
    """
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    names = [f"node{number}" for number in range(nodes)]
    _configure(folder, names)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in _commands(folder, names):
            with folder.joinpath(f"{Path(command[0]).name}.out").open("ab") as out:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
            time.sleep(1)
        _wait_for_node(folder, environment)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            _end(process)


def _configure(folder: Path, nodes: Sequence[str]) -> None:
    for name in ("state", *(f"spool-{node}" for node in nodes)):
        folder.joinpath(name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    host = socket.gethostname().split(".")[0]
    has = f"NodeHostname={host} NodeAddr=127.0.0.1 CPUs={os.cpu_count()} RealMemory=1000 State=UNKNOWN"
    values = {
        "host": host,
        "user": getpass.getuser(),
        "folder": folder,
        "controller_port": _free_port(),
        "nodes": "\n".join(f"NodeName={node} Port={_free_port()} {has}" for node in nodes),
    }
    folder.joinpath("slurm.conf").write_text(CONFIG.format(**values))


def _commands(folder: Path, nodes: Sequence[str]) -> list[list[str]]:
    munge = [f"--{name}={folder / file}" for name, file in (
        ("key-file", "munge.key"), ("socket", "munge.socket"), ("pid-file", "munge.pid"), ("log-file", "munge.log"),
        ("seed-file", "munge.seed"),
    )]  # fmt: skip
    daemons = {name: str(_find(name)) for name in DAEMONS}
    return [
        [daemons["munged"], "--foreground", "--force", *munge],
        [daemons["slurmctld"], "-D", "-f", str(folder / "slurm.conf")],
        *([daemons["slurmd"], "-D", "-N", node, "-f", str(folder / "slurm.conf")] for node in nodes),
    ]


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _wait_for_node(folder: Path, environment: dict[str, str], *, seconds: float = 250) -> None:
    deadline = time.monotonic() + seconds
    state = ""
    while time.monotonic() < deadline:
        shown = subprocess.run([str(_find("sinfo")), "-h", "-o", "%T"], env=environment, capture_output=True, text=True)
        state = shown.stdout.strip() or shown.stderr.strip()
        if state == "idle":
            return
        time.sleep(0.5)
    logs = "\n".join(
        f"{path.name}: {path.read_text(errors='replace')[-800:]}" for path in folder.glob("*.[lo][ou][gt]")
    )
    raise RuntimeError(f"the nodes are {state!r} after {seconds} s\n{logs}")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
