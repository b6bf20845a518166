"""A 12-job sweep that is stopped in the middle, and finished in its folder: is each of its jobs there, run once?

    python -m tests.benchmarks.resume interrupt kill orphan lost disk slurm

- interrupt: SIGINT to the sweep, twice, at its fourth and its eighth job
- kill: SIGKILL to the sweep and to all that it started
- orphan: SIGKILL to the sweep alone, whose job goes on; the sweep is resumed at once, by two at a time
- lost: SIGKILL to a job, whose sweep goes on
- disk: the sweep's folder on a file system that is full from the fourth job on (needs root)
- slurm: on a Slurm of this machine: a job is requeued, then the sweep is killed while its jobs go on

Prints a line a scene, and exits 1 where a job is missing, ran again after it had completed, or is told wrongly.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.e2e.conftest import COMMAND, environment, heed_signals
from tests.e2e.slurm import cluster, missing

JOBS = 12
ARGUMENTS = ["-m", "max_memory.cpu=2MB,3MB,4MB"]
KINDS = {"plan": ["seed=1,2,3,4", "stop_after=plan"], "generate": ["generate.max_new_tokens=1,2,3,4"]}
RESUME = [sys.executable, "-c", "from offstage.pipeline.commands import sweep; sweep()", "resume"]
_SECONDS = 500
BALLAST = "ballast"


class Scene:
    """A sweep in ``folder``, in processes that are started and stopped."""

    def __init__(self, folder: Path, *options: str, variables: Mapping[str, str] | None = None) -> None:
        self.folder, self.sweep = folder, folder / "sweep"
        self._command = [*COMMAND, *ARGUMENTS, f"hydra.sweep.dir={self.sweep}", *options]
        self._variables = environment(variables)
        self.seen: dict[int, bytes] = {}

    def start(self, *, resumed: bool = False) -> subprocess.Popen[str]:
        command = [*RESUME, str(self.sweep)] if resumed else self._command
        return subprocess.Popen(
            command, cwd=self.folder, env=self._variables, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=heed_signals,
        )  # fmt: skip

    def wait_for(self, number: int, process: subprocess.Popen[str]) -> None:
        """Wait until the job of that number has begun."""
        until = time.monotonic() + _SECONDS
        while not self.path(number).exists():
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"job {number} never began: {process.communicate()[0]}")
            time.sleep(0.05)

    def finish(self, process: subprocess.Popen[str]) -> str:
        """Wait for the end of a command, remember which jobs have completed, and return what was printed."""
        out, _ = process.communicate(timeout=_SECONDS)
        self.note_completed()
        return out

    def path(self, number: int) -> Path:
        return self.sweep / str(number) / "run.json"

    def note_completed(self) -> None:
        """Remember the records of jobs that have completed: none of them may change any more."""
        for number, record in self.records().items():
            if record["status"] == "completed":
                self.seen.setdefault(number, self.path(number).read_bytes())

    def records(self) -> dict[int, dict[str, Any]]:
        numbers = [number for number in range(JOBS) if self.path(number).exists()]
        return {number: json.loads(self.path(number).read_text()) for number in numbers}

    def processes(self) -> Iterator[psutil.Process]:
        """Yield what was started for the sweep, jobs and those that wait for them."""
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if str(self.sweep) in " ".join(process.cmdline()):
                    yield process

    def faults(self, out: str) -> list[str]:
        """Return what isn't as it must be at the end, whose command printed ``out``."""
        records = self.records()
        faults = [f"job {number} has no record" for number in range(JOBS) if number not in records]
        faults += [
            f"job {number}: {each['status']}" for number, each in records.items() if each["status"] != "completed"
        ]
        faults += [f"job {n} ran again" for n, before in self.seen.items() if self.path(n).read_bytes() != before]
        faults += [] if f"{JOBS} of {JOBS} completed" in out else [f"the table: {out[-600:]}"]
        for path in self.sweep.glob("*/run-*.json"):
            if json.loads(path.read_text())["status"] == "completed":
                faults.append(f"{path}: completed, and set aside")
        return faults


def interrupt(scene: Scene) -> str:
    for resumed, number in ((False, 3), (True, 7)):
        process = scene.start(resumed=resumed)
        scene.wait_for(number, process)
        process.send_signal(signal.SIGINT)
        say(f"    {table(scene.finish(process))}")
    return scene.finish(scene.start(resumed=True))


def kill(scene: Scene) -> str:
    process = scene.start()
    scene.wait_for(4, process)
    process.kill()
    for each in scene.processes():
        with suppress(psutil.Error):
            each.kill()
    scene.finish(process)
    return scene.finish(scene.start(resumed=True))


def orphan(scene: Scene) -> str:
    process = scene.start()
    scene.wait_for(3, process)
    process.kill()
    scene.finish(process)
    both = [scene.start(resumed=True), scene.start(resumed=True)]
    outs = [scene.finish(each) for each in both]
    refused = [out for out in outs if "another process is at this sweep" in out]
    say(f"    {len(refused)} of two was told: {refused[0].strip() if refused else 'nothing'}")
    return next(out for out in outs if out not in refused) if len(refused) == 1 else "both ran"


def lost(scene: Scene) -> str:
    process = scene.start()
    scene.wait_for(4, process)
    log = scene.path(4).with_name("run.log")
    while not log.exists() or "begins" not in log.read_text():
        time.sleep(0.02)
    (job,) = [each for each in scene.processes() if str(scene.sweep / "4") in each.cmdline()]
    job.kill()
    say(f"    {table(scene.finish(process))}")
    return scene.finish(scene.start(resumed=True))


def disk(scene: Scene) -> str:
    process = scene.start()
    scene.wait_for(3, process)
    ballast = scene.sweep / BALLAST
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(b"\0" * 4096):
            pass
    out = scene.finish(process)
    say(f"    {table(out)}; {[line for line in out.splitlines() if line.startswith('offstage: ')][-1:]}")
    ballast.unlink()
    return scene.finish(scene.start(resumed=True))


def slurm(scene: Scene) -> str:
    process = scene.start()
    scene.wait_for(0, process)
    queued = subprocess.run(
        ["squeue", "-h", "-t", "R", "-o", "%A"], env=scene._variables, capture_output=True, text=True, check=True
    )
    number = queued.stdout.split()[0]
    subprocess.run(["scontrol", "requeue", number], env=scene._variables, check=True)
    say(f"    requeued {number}")
    scene.wait_for(2, process)
    process.kill()
    scene.finish(process)
    say(f"    killed with {len(scene.records())} jobs begun")
    return scene.finish(scene.start(resumed=True))


SCENES: Mapping[str, Callable[[Scene], str]] = {
    each.__name__: each for each in (interrupt, kill, orphan, lost, disk, slurm)
}


@contextmanager
def staged(name: str, kind: str) -> Iterator[Scene]:
    """Yield the scene of that name, in a folder of its own that is removed again."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=f"offstage-resume-{name}-")))
        options = list(KINDS[kind])
        variables: dict[str, str] = {}
        if name == "slurm":
            apart = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offstage-slurm-")))
            variables["SLURM_CONF"] = stack.enter_context(cluster(apart))["SLURM_CONF"]
            options.append("hydra/launcher=submitit_slurm")
        scene = Scene(folder, *options, variables=variables)
        if name == "disk":
            scene.sweep.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "none", str(scene.sweep)], check=True)
            stack.callback(subprocess.run, ["umount", str(scene.sweep)], check=True)
        yield scene


def table(out: str) -> str:
    """Return what a closing table says of all jobs."""
    return next((line for line in reversed(out.splitlines()) if f" of {JOBS} completed" in line), out[-300:])


def main() -> int:
    """Play the scenes that the arguments name, and return 1 if anything was wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenes", nargs="*", choices=[*SCENES, []], help="all by default")
    parser.add_argument("--jobs", choices=[*KINDS], default="plan", help="what each job is to do")
    given, wrong = parser.parse_args(), 0
    for name in given.scenes or SCENES:
        if (name == "slurm" and missing()) or (name == "disk" and os.geteuid() != 0):
            say(f"{name}: not here")
            continue
        with staged(name, given.jobs) as scene:
            began = time.monotonic()
            faults = scene.faults(SCENES[name](scene))
            aside = len(list(scene.sweep.glob("*/run-*.json")))
        said = "; ".join(faults) or f"{JOBS} of {JOBS}, each completed once"
        say(f"{name}: {said}; {aside} attempts before, {time.monotonic() - began:.0f} s")
        wrong += bool(faults)
    return int(wrong > 0)


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
