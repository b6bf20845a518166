"""What runs make of hard memory caps: how much of each they leave unused, what they stream for it, and who is killed.

    python -m tests.benchmarks.cap_grid /ckpt/1.1b --caps 700MB 1GB 1.5GB 2GiB 3GB
    python -m tests.benchmarks.cap_grid /ckpt/1.1b --stage finetune --option finetune.text_file=/text.txt --caps 2GB
    python -m tests.benchmarks.cap_grid /ckpt/1.1b --caps 2GiB --beside 300MB 100MB 50MB 25MB

A cap is a memory cgroup that a fresh process begins in, without swap. Budgets are worked out from it, or, with
``--beside``, given: so much is left of the cap beside what the plan predicts, which shows what it costs where pages of
libraries are scarce. These and the checkpoint's leave the page cache before each run, so that the group pays for all
that it reads. That needs an environment of whose files no other process runs: pages that another maps stay, and are its
own.

One line a run: the budget, what the plan predicts and what was held at the peak (anonymous and shared memory, and the
kernel's own pages of the group, sampled together), the file pages that were mapped then, libraries' for the most part,
the share of the cap that none of these fills, bytes streamed and seconds for a token, and how many pages were read
again since the kernel had taken them back (``refaults``). Then how it ended.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.cgroup_files import INTERFACES, read_lines
from offstage.pipeline.memory_cgroups import MemoryGroup
from offstage.stages.plan.budgets import LIBRARY_BYTES
from offstage.stages.units import parse_size
from tests.benchmarks.caps import cap

COMMAND = [sys.executable, "-P", "-c", "from offstage.pipeline.app import main; main()"]
ASKED: Mapping[str, tuple[str, ...]] = {
    "generate": ("generate.prompts=[[5,6,7,8]]", "generate.min_new_tokens=8", "generate.max_new_tokens=8"),
    "score": (),
    "finetune": (),
}
TOO_SLOW = -1
FATES = {0: "lives", 4: "refused", -9: "KILLED", TOO_SLOW: "TOO SLOW"}
_STREAMED = ("streamed_bytes_per_token", "streamed_bytes_per_forward")
_SECONDS = ("decode_seconds_per_token", "score_seconds", "train_seconds")
_PAUSE = 0.01


@dataclass(slots=True)
class Held:
    """What a group held at its peak, in bytes, and the pages of files that it has read again."""

    bytes: int = 0
    files: int = 0
    refaults: int = 0

    def sample(self, group: MemoryGroup) -> None:
        """Look at the ``group`` once more."""
        stat = dict(line.split() for line in read_lines(group.folder / "memory.stat"))
        names, total = INTERFACES[group.version].held, "total_" if group.version == 1 else ""
        kernel = read_lines(group.folder / "memory.kmem.usage_in_bytes")
        held = sum(int(stat[name]) for name in names) + int(kernel[0] if kernel else stat["kernel"])
        self.refaults = int(stat[f"{total}workingset_refault_file"])
        mapped = int(stat[f"{total}mapped_file" if group.version == 1 else "file_mapped"])
        cached = int(stat[f"{total}cache"] if group.version == 1 else stat["file"]) - int(stat[names[1]])
        files = max(mapped, min(cached, LIBRARY_BYTES))
        if held + files > self.bytes + self.files:
            self.bytes, self.files = held, files


@contextmanager
def watched(group: MemoryGroup) -> Iterator[Held]:
    """Sample what ``group`` holds, every hundredth of a second, until the block ends."""
    held, done = Held(), threading.Event()

    def watch() -> None:
        while not done.wait(_PAUSE):
            with suppress(OSError):
                held.sample(group)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield held
    finally:
        done.set()
        thread.join()


def forget(*folders: Path) -> None:
    """Have the page cache forget the files in ``folders``, as far as no process maps them."""
    os.sync()
    for file in (each for folder in folders for each in folder.rglob("*") if each.is_file()):
        opened = os.open(file, os.O_RDONLY)
        os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(opened)


@dataclass(frozen=True, slots=True)
class Setup:
    """What the runs of one table have in common; ``work`` is the folder that they are made in."""

    checkpoint: Path
    work: Path
    options: tuple[str, ...]
    patience_seconds: float

    def run(self, limit: int, *options: str) -> tuple[int, Held, dict[str, Any]]:
        """Return how a run under ``limit`` bytes ended, what it held, and its record; only measures stay cached."""
        for folder in ("runs", "cache/generate", "cache/score", "cache/finetune", "cache/plan"):
            shutil.rmtree(self.work / "outputs" / folder, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        forget(Path(sys.prefix), self.checkpoint)
        asked = [*COMMAND, "model=pretrained", f"model.path={self.checkpoint}", *self.options, *options]
        with cap(limit) as group, watched(group) as held:
            code, said = self._outcome(group.entering(asked))
        records = list(self.work.glob("outputs/runs/*/*/run.json"))
        record = json.loads(records[0].read_text()) if records else {}
        if code not in FATES:
            raise SystemExit(f"{limit}: exit code {code}\n{said[-4000:]}")
        return code, held, record

    def _outcome(self, command: list[str]) -> tuple[int, str]:
        try:
            done = subprocess.run(
                command, cwd=self.work, text=True, check=False, timeout=self.patience_seconds,
                stdin=subprocess.DEVNULL, capture_output=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return TOO_SLOW, ""
        return done.returncode, done.stderr

    def beside(self, limit: int, left: int) -> tuple[str, ...]:
        """Return the option that gives the budget by which ``left`` bytes of ``limit`` are over, as it is predicted."""
        _, _, record = self.run(1 << 40, "stages=plan_only", f"max_memory.cpu={limit // 2}")
        predicted = record["memory"]["predicted"]["cpu"]
        budget = limit // 2 + limit - left - predicted
        return (f"max_memory.cpu={budget}",)


def line(limit: int, code: int, held: Held, record: Mapping[str, Any]) -> str:
    """Return the table's line of a run under ``limit`` bytes."""
    memory, metrics = record.get("memory") or {}, record.get("metrics") or {}
    budget, predicted = ((memory.get(key) or {}).get("cpu") or 0 for key in ("budget", "predicted"))
    sizes = " ".join(f"{count / 1e6:8.0f}" for count in (limit, budget, predicted, held.bytes, held.files))
    unused = 1 - (held.bytes + held.files) / limit
    streamed, seconds = (
        next((metrics[name] for name in names if metrics.get(name)), 0) for names in (_STREAMED, _SECONDS)
    )
    told = metrics.get("predicted_seconds_per_token") or 0
    load = f"{held.refaults:8} (load {os.getloadavg()[0]:.1f})"
    return f"{sizes} {unused:7.1%} {streamed / 1e6:8.1f} {told:8.3f} {seconds:8.3f} {load} {FATES[code]}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("--stage", choices=ASKED, default="generate")
    parser.add_argument("--caps", nargs="+", default=["600MB", "800MB", "1GB", "1.5GB", "2GiB", "3GB", "4GB", "8GiB"])
    parser.add_argument("--beside", nargs="+", default=[], help="what given budgets leave beside the predicted peak")
    parser.add_argument("--patience", type=float, default=120, metavar="SECONDS", help="after which a run is ended")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--option", action="append", default=[], help="an override, e.g. storage.io=direct")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    given = parser.parse_args()
    work = given.folder / f"caps-{given.checkpoint.name}"
    setup = Setup(
        given.checkpoint.resolve(), work, (f"stages={given.stage}", *ASKED[given.stage], *given.option), given.patience
    )
    print(
        "MB: cap, budget, predicted, held, files; unused; MB streamed, seconds: predicted, measured; refaults; fate",
        flush=True,
    )
    for limit in map(parse_size, given.caps):
        for budgets in [setup.beside(limit, left) for left in map(parse_size, given.beside)] or [()]:
            for _ in range(given.repeats):
                print(line(limit, *setup.run(limit, *budgets)), flush=True)


if __name__ == "__main__":
    main()
