"""A Slurm of one node on this machine, for as long as a test needs it.

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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

DAEMONS = ("munged", "slurmctld", "slurmd")
COMMANDS = ("sbatch", "sinfo", "squeue", "scancel")
CONFIG = """
ClusterName=offstage
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller_port}
SlurmdPort={node_port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SchedulerParameters=sched_min_interval=10000,sched_interval=1
MpiDefault=none
KillWait=10
ReturnToService=2
NodeName={host} NodeAddr=127.0.0.1 CPUs={cpus} RealMemory={memory} State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def missing() -> list[str]:
    """Return the programs that aren't installed: none of them, and there can be a Slurm here."""
    return [name for name in (*DAEMONS, *COMMANDS) if _find(name) is None]


def _find(name: str) -> str | None:
    return shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")


@contextmanager
def cluster(folder: Path) -> Iterator[dict[str, str]]:
    """Yield the environment in which Slurm's commands, and offstage, find the cluster that runs in ``folder``."""
    environment = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
    _configure(folder)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for command in _commands(folder):
            with folder.joinpath(f"{Path(command[0]).name}.out").open("wb") as out:
                processes.append(subprocess.Popen(command, env=environment, stdout=out, stderr=subprocess.STDOUT))
            time.sleep(1)
        _wait_for_node(folder, environment)
        yield environment
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in reversed(processes):
            _end(process)


def _configure(folder: Path) -> None:
    for name in ("state", "spool"):
        folder.joinpath(name).mkdir()
    folder.chmod(0o755)
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o600)
    values = {
        "host": socket.gethostname().split(".")[0],
        "user": getpass.getuser(),
        "folder": folder,
        "cpus": os.cpu_count(),
        "memory": 1000,
        "controller_port": _free_port(),
        "node_port": _free_port(),
    }
    folder.joinpath("slurm.conf").write_text(CONFIG.format(**values))


def _commands(folder: Path) -> list[list[str]]:
    munge = [f"--{name}={folder / file}" for name, file in (
        ("key-file", "munge.key"), ("socket", "munge.socket"), ("pid-file", "munge.pid"), ("log-file", "munge.log"),
        ("seed-file", "munge.seed"),
    )]  # fmt: skip
    daemons = {name: str(_find(name)) for name in DAEMONS}
    return [
        [daemons["munged"], "--foreground", "--force", *munge],
        [daemons["slurmctld"], "-D", "-f", str(folder / "slurm.conf")],
        [daemons["slurmd"], "-D", "-f", str(folder / "slurm.conf")],
    ]


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


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
    raise RuntimeError(f"the node is {state!r} after {seconds} s\n{logs}")


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(15)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
