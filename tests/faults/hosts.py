"""Faults of runs over several hosts: ``python -m tests.faults.hosts --rounds 3``.

Each host is a process of this machine with a folder, a cache and a disk of its own, started by hand as Slurm or a shell
would, or by torchrun. A scene does something to one of them; then all must end within 30 s with a line that names the
host and the reason, with an exit code of the table, no process left, a record that says so, and the next run right.
Prints a row for each round of each scene. Needs root for the scenes with memory groups, networks and small disks.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.conftest import Process, environment, records_in
from tests.e2e.warm_server import WarmServer

SHORT = ["generate.max_new_tokens=12", "max_memory.cpu=2MB"]
LONG = ["generate.max_new_tokens=900", "generate.min_new_tokens=900", "generate.prompts=[Once]", "max_memory.cpu=6MB"]
WITHIN_SECONDS = 30
_MARK = "OFFSTAGE_TRIAL"
_PATIENCE_SECONDS = 300


@dataclass
class Hosts:
    """Hosts of one run, in folders below ``root``: what a scene prepares, does to them, and looks at."""

    root: Path
    server: WarmServer
    stack: ExitStack
    size: int = 2
    ranks: list[int] = field(default_factory=lambda: [0, 1])
    arguments: list[str] = field(default_factory=lambda: [*LONG])
    own: dict[int, list[str]] = field(default_factory=dict)
    variables: dict[int, dict[str, str]] = field(default_factory=dict)
    by_torchrun: bool = False
    port: int = 0
    began: float = 0.0
    processes: dict[int, Process] = field(default_factory=dict)

    def folder(self, rank: int) -> Path:
        """Return where ``rank`` works."""
        return self.root / str(rank)

    def start(self) -> None:
        """Start every host."""
        self.port = self.port or free_port()
        self.began = time.monotonic()
        for rank in self.ranks:
            said = {"RANK": str(rank), "WORLD_SIZE": str(self.size), "MASTER_ADDR": "127.0.0.1"}
            said = {} if self.by_torchrun else said
            common = {"MASTER_PORT": str(self.port), "OMP_NUM_THREADS": "1", _MARK: str(self.root)}
            given = environment({**said, **common, **self.variables.get(rank, {})})
            arguments = [*self.arguments, *self.own.get(rank, [])]
            with self.folder(rank).joinpath("said").open("w") as out:
                self.processes[rank] = self._start(rank, arguments, given, out.fileno())

    def _start(self, rank: int, arguments: list[str], given: Mapping[str, str], out: int) -> Process:
        if not self.by_torchrun and "PYTHONPATH" not in given:
            with open(os.devnull) as nothing:  # noqa: PTH123 - a device
                streams = (nothing.fileno(), out, out)
                return self.server.start_on(streams, self.folder(rank), arguments, given, leads="session")
        launcher = ["torch.distributed.run", "--nnodes", str(self.size), "--nproc-per-node", "1"]
        launcher += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{self.port}", "-m"]
        command = [sys.executable, "-m", *(launcher if self.by_torchrun else []), "offstage", *arguments]
        return subprocess.Popen(
            command, cwd=self.folder(rank), env=given, stdout=out, stderr=out, start_new_session=True, text=True
        )

    def await_log(self, text: str, ranks: Collection[int] = (0, 1)) -> None:
        """Wait until each of ``ranks`` has ``text`` in the log of its run."""
        for rank in ranks:
            while not any(text in log.read_text() for log in self.folder(rank).glob("outputs/runs/*/*/run.log")):
                assert self.processes[rank].poll() is None, f"{rank} ended before {text!r}: {self.last_line(rank)}"
                assert time.monotonic() - self.began < _PATIENCE_SECONDS, f"no {text!r}"
                time.sleep(0.01)

    def await_record(self, ranks: Collection[int]) -> None:
        """Wait until each of ``ranks`` has a record of its run."""
        for rank in ranks:
            while not records_in(self.folder(rank)):
                assert self.processes[rank].poll() is None, f"{rank} ended before its record: {self.last_line(rank)}"
                assert time.monotonic() - self.began < _PATIENCE_SECONDS, "no record"
                time.sleep(0.01)

    def process(self, rank: int) -> int:
        """Return the process of ``rank`` itself, and not torchrun's."""
        pid = self.processes[rank].pid
        return psutil.Process(pid).children()[0].pid if self.by_torchrun else pid

    def signal(self, rank: int, number: int) -> None:
        """Send ``rank`` the signal; what a scene does counts from now on."""
        os.kill(self.process(rank), number)
        self.began = time.monotonic()

    def await_end(self, spared: Collection[int] = ()) -> None:
        """Wait until all but the ``spared`` have ended, then end these."""
        for rank, process in self.processes.items():
            if rank not in spared:
                process.wait(_PATIENCE_SECONDS)
        self.ended = time.monotonic()
        for rank in spared:
            self.processes[rank].kill()
            self.processes[rank].wait(_PATIENCE_SECONDS)

    def last_line(self, rank: int) -> str:
        """Return what ``rank`` said last."""
        lines = self.folder(rank).joinpath("said").read_text().splitlines()
        own = [line for line in lines if line.startswith("offstage: ")]
        return (own or lines or [""])[-1]

    def records(self) -> dict[int, dict[str, Any]]:
        """Return the record of the last run of each host that has one."""
        by_rank = {rank: [*records_in(self.folder(rank)).values()] for rank in self.ranks}
        return {rank: records[-1] for rank, records in by_rank.items() if records}

    def left_over(self) -> list[int]:
        """Return the processes that are left of these hosts."""
        return [process.pid for process in psutil.process_iter() if _has_mark(process, str(self.root))]


@dataclass(frozen=True, slots=True)
class Scene:
    """``prepare`` changes how hosts are started, ``fault`` does something to those that were.

    ``says`` is found in the last line of a host that could say something; empty: the run is to complete, with the same
    tokens. ``codes`` are the exit codes of each host; ``spared`` are ended by the scene;
    ``unrecorded`` are those whose command is refused before it has a record. ``seconds`` is how long it may
    take from the fault on.
    """

    name: str
    says: str
    codes: Mapping[int, Collection[int]]
    prepare: Callable[[Hosts], None] = lambda hosts: None
    fault: Callable[[Hosts], None] = lambda hosts: None
    spared: Collection[int] = ()
    unrecorded: Collection[int] = ()
    seconds: float = WITHIN_SECONDS


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a scene, and what of that is wrong."""

    scene: str
    seconds: float
    lines: tuple[str, ...]
    codes: tuple[int | None, ...]
    statuses: tuple[str, ...]
    left_over: int
    next_right: bool
    faults: tuple[str, ...]


def attempt(scene: Scene, described: Path, server: WarmServer, expected: list[list[int]]) -> Outcome:
    """Play ``scene`` once; ``described`` is a cache that hosts begin with, ``expected`` the tokens of a next run."""
    with tempfile.TemporaryDirectory(prefix="offstage-hosts-") as root, ExitStack() as stack:
        hosts = Hosts(Path(root), server, stack)
        scene.prepare(hosts)
        for rank in hosts.ranks:
            shutil.copytree(described, hosts.folder(rank) / "outputs/cache", dirs_exist_ok=True)
        hosts.start()
        try:
            scene.fault(hosts)
            hosts.await_end(scene.spared)
            seconds, left = hosts.ended - hosts.began, len(hosts.left_over())
        finally:
            for process in hosts.processes.values():
                process.kill()
        records = hosts.records()
        statuses = tuple(records[rank]["status"] if rank in records else "none" for rank in hosts.ranks)
        lines = tuple(hosts.last_line(rank) for rank in hosts.ranks)
        codes = tuple(process.returncode for process in hosts.processes.values())
        stack.close()
        right = _next_tokens(hosts, server) == expected
        outcome = Outcome(scene.name, seconds, lines, codes, statuses, left, right, ())
        faults = (*_faults(scene, outcome, hosts.ranks), *(() if scene.says else _other_tokens(records)))
        return Outcome(scene.name, seconds, lines, codes, statuses, left, right, faults)


def _faults(scene: Scene, outcome: Outcome, ranks: list[int]) -> Iterator[str]:
    if outcome.seconds > scene.seconds:
        yield f"took {outcome.seconds:.1f} s"
    if scene.says and not any(re.search(scene.says, line) for line in outcome.lines):
        yield f"nobody says {scene.says!r}"
    for rank, code, status in zip(ranks, outcome.codes, outcome.statuses, strict=True):
        if code not in scene.codes[rank]:
            yield f"host {rank} exited {code}"
        if status not in ({"none"} if rank in scene.unrecorded else _statuses(code)):
            yield f"the record of host {rank} says {status}"
    if any("unforeseen" in line or "Traceback" in line for line in outcome.lines):
        yield "something nobody foresaw"
    if outcome.left_over:
        yield f"{outcome.left_over} processes left"
    if not outcome.next_right:
        yield "the next run isn't right"


def _statuses(code: int | None) -> set[str]:
    """Return what the record of a host may say that exited so: one that was killed could say nothing any more."""
    if code is not None and code < 0:
        return {"running", "none"}
    return {"failed", "interrupted", "running"} if code == 1 else {"failed", "interrupted"} if code else {"completed"}


def _other_tokens(records: Mapping[int, Mapping[str, Any]]) -> Iterator[str]:
    if any(len(output["token_ids"]) != 900 for record in records.values() for output in record["outputs"]):
        yield "not all tokens"
    if len({str([output["token_ids"] for output in record["outputs"]]) for record in records.values()}) > 1:
        yield "hosts have other tokens"


def _next_tokens(hosts: Hosts, server: WarmServer) -> list[list[int]]:
    """Return the tokens of a run of two hosts in the same folders, without a fault."""
    with ExitStack() as stack:
        after = Hosts(hosts.root, server, stack, arguments=[*SHORT])
        for rank in after.ranks:
            after.folder(rank).mkdir(exist_ok=True)
        after.start()
        after.await_end()
        return tokens_of(after.records()[0])


def tokens_of(record: Mapping[str, Any]) -> list[list[int]]:
    """Return the tokens that ``record`` has, of each prompt."""
    return [output["token_ids"] for output in record["outputs"]]


def begin(root: Path, server: WarmServer) -> tuple[Path, list[list[int]]]:
    """Return a cache that knows the embedded model and this machine, and the tokens of one host."""
    alone = environment({"OMP_NUM_THREADS": "1"})
    for arguments in (["stop_after=plan"], SHORT):
        with root.joinpath("said").open("w") as out, open(os.devnull) as nothing:  # noqa: PTH123 - a device
            code = server.start_on((nothing.fileno(), out.fileno(), out.fileno()), root, arguments, alone).wait()
        assert code == 0, root.joinpath("said").read_text()
    tokens = tokens_of([*records_in(root).values()][-1])
    for stage in ("plan", "shard_load", "dispatch", "generate"):
        shutil.rmtree(root / "outputs/cache" / stage, ignore_errors=True)
    return root / "outputs/cache", tokens


def free_port() -> int:
    """Return a port that nobody listens at."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _has_mark(process: psutil.Process, mark: str) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    return False


def row(outcome: Outcome) -> str:
    """Return the row of the table that ``outcome`` is."""
    lines = " | ".join(f"{rank}: {line.removeprefix('offstage: ')[:110]}" for rank, line in enumerate(outcome.lines))
    verdict = "right" if not outcome.faults else "WRONG: " + "; ".join(outcome.faults)
    codes, statuses = ",".join(map(str, outcome.codes)), ",".join(outcome.statuses)
    return f"{outcome.scene:34} {outcome.seconds:5.1f} s  {codes:9} {statuses:24} {verdict}\n    {lines}"


def main() -> int:
    """Play the scenes and print the table; return 1 where anything was wrong."""
    from tests.faults.host_scenes import SCENES

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=1, help="how many scenes are played at a time")
    parser.add_argument("--only", default="", help="a regular expression that the scene's name has")
    given = parser.parse_args()
    chosen = [scene for _ in range(given.rounds) for scene in SCENES if re.search(given.only, scene.name)]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryDirectory(prefix="offstage-described-") as root, ThreadPoolExecutor(given.lanes) as lanes:
        servers = [WarmServer(environment({"OMP_NUM_THREADS": "1"})) for _ in range(given.lanes)]
        described, expected = begin(Path(root), servers[0])

        def play(scene: Scene) -> Outcome:
            server = servers.pop()
            try:
                outcome = attempt(scene, described, server, expected)
            except Exception as error:  # noqa: BLE001 - a scene that can't be played is a row of the table too
                outcome = Outcome(scene.name, 0, (), (), (), 0, False, (f"not played: {error!r}",))
            finally:
                servers.append(server)
            sys.stdout.write(f"{row(outcome)}\n")
            sys.stdout.flush()
            return outcome

        outcomes = [*lanes.map(play, chosen)]
    wrong = sum(bool(outcome.faults) for outcome in outcomes)
    sys.stdout.write(f"{len(outcomes)} rounds of {len({one.scene for one in outcomes})} scenes, {wrong} wrong\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
