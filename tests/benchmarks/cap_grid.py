"""What runs make of hard memory caps: how much of each they leave unused, what they stream for it, and who is killed.

    python -m tests.benchmarks.cap_grid
    python -m tests.benchmarks.cap_grid --short
    python -m tests.benchmarks.cap_grid dense --caps 2GiB --beside 300MB 100MB 50MB

Sixty runs from the least cap to 8 GiB, and ten of small models with ``--short``: a dense model of 1.1B, a mixture of
2 GB, the dense one in FP8 and with ``storage.codec=zstd``, scores, and a training; checkpoints of random weights are
made in ``--folder``, 7 GB in all. A cap is a memory cgroup that a fresh process begins in, without swap. Budgets are
worked out from it, or, with ``--beside``, given: so much is left of the cap beside what the plan predicts, which shows
what it costs where pages of libraries are scarce. These and the checkpoint's leave the page cache before each run, so
that the group pays for all that it reads. That needs an environment of whose files no other process runs: pages that
another maps stay, and are its own.

One line a run: the budget, what the plan predicts and what was held at the peak (anonymous and shared memory, and the
kernel's own pages of the group, sampled together), the file pages then, as far as they are mapped or are what budgets
leave to libraries, the share of the cap that none of these fills, bytes streamed and seconds for a token (of a score or
a training, in all), and how many pages were read again since the kernel had taken them back (``refaults``). Then how it
ended. Where nothing is streamed a cap can't be filled, and ``whole`` stands there.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.pipeline.memory_cgroups import INTERFACES, MemoryGroup, read_lines
from offstage.stages.plan.budgets import LIBRARY_BYTES
from offstage.stages.units import parse_size
from tests.benchmarks.caps import cap
from tests.benchmarks.checkpoints import make
from tests.benchmarks.mixture import make_mixture, mixture_config
from tests.benchmarks.packed_checkpoints import make_fp8
from tests.e2e.conftest import COMMAND

TOKENIZER = Path(__file__).parents[2] / "conf/checkpoints/tiny"
TEXT = "The weights wait offstage until their cue, and the model returns. "
LEAST = "least"
"""The cap that a refusal names as the least that works."""
REFUSED_UNDER = parse_size("400MB")
UNCAPPED = 1 << 40
TOO_SLOW = -1
REFUSED = 4
FATES = {0: "lives", REFUSED: "refused", -9: "KILLED", TOO_SLOW: "TOO SLOW"}
HEADER = (
    "MB: cap, budget, predicted, held, files; unused; streamed; seconds: predicted, measured; refaults (load); fate"
)
_STREAMED = ("streamed_bytes_per_token", "streamed_bytes_per_forward")
_SECONDS = ("decode_seconds_per_token", "score_seconds", "train_seconds")
_PAUSE = 0.01

GENERATE = ("generate.prompts=[[5,6,7,8]]", "generate.min_new_tokens=8", "generate.max_new_tokens=8")
SCORE = ("stages=score", f"model.tokenizer={TOKENIZER}", f"score.texts=['{TEXT}']")
FINETUNE = (
    "stages=finetune",
    f"model.tokenizer={TOKENIZER}",
    "finetune.window=64",
    "finetune.batch_size=4",
    "finetune.steps=3",
)


def _dense(folder: Path) -> Path:
    return make("1.1b", folder / "1.1b")


def _small(folder: Path) -> Path:
    return make("0.1b", folder / "0.1b")


def _mixture(folder: Path) -> Path:
    return make_mixture(mixture_config(2e9), folder / "mixture")


@dataclass(frozen=True, slots=True)
class Kind:
    """Runs that have a checkpoint and options in common, and the caps that they are under: in short, the ``short``."""

    make: Callable[[Path], Path]
    options: tuple[str, ...]
    caps: tuple[str, ...]
    short: tuple[str, ...] = ()


def _from_least(sizes: str) -> tuple[str, ...]:
    return (LEAST, *sizes.split())


KINDS: Mapping[str, Kind] = {
    "dense": Kind(_dense, GENERATE, _from_least("480MB 600MB 700MB 800MB 1GB 1.25GB 1.5GB 1.75GB 2GiB 2.5GB 3GB 8GiB")),
    "mixture": Kind(
        _mixture,
        ("generate.prompts=[[5,6,7,8]]", "generate.min_new_tokens=24", "generate.max_new_tokens=24"),
        _from_least("550MB 600MB 700MB 800MB 1GB 1.25GB 1.5GB 1.75GB 2GiB 3GB 8GiB"),
    ),
    "fp8": Kind(
        lambda folder: make_fp8(_dense(folder), folder / "fp8"),
        GENERATE,
        _from_least("600MB 800MB 1GB 1.5GB 2GiB 3GB"),
    ),
    "codec": Kind(_dense, (*GENERATE, "storage.codec=zstd"), _from_least("750MB 800MB 1GB 1.5GB 2GiB 3GB")),
    "score": Kind(_dense, SCORE, _from_least("600MB 800MB 1.2GB 1.8GB 2.5GB 4GB")),
    "mixture score": Kind(_mixture, SCORE, _from_least("800MB 1.2GB 1.8GB 3GB")),
    "finetune": Kind(
        _small, FINETUNE, _from_least("1.75GB 1.8GB 1.9GB 2GB 2.2GB 3GB 4GB 8GiB"), _from_least("2GB 8GiB")
    ),
    "small": Kind(_small, GENERATE, (), _from_least("480MB 550MB 8GiB")),
    "small score": Kind(_small, SCORE, (), _from_least("550MB 8GiB")),
}


@dataclass(slots=True)
class PeakUsage:
    """What a group held at its peak, in bytes, and the pages of files that it has read again."""

    bytes: int = 0
    files: int = 0
    refaults: int = 0

    def sample(self, group: MemoryGroup) -> None:
        """Look at the ``group`` once more."""
        stat = dict(line.split() for line in read_lines(group.folder / "memory.stat"))
        names, total = INTERFACES[group.version].usage_keys, "total_" if group.version == 1 else ""
        kernel = read_lines(group.folder / "memory.kmem.usage_in_bytes")
        own_bytes = sum(int(stat[name]) for name in names) + int(kernel[0] if kernel else stat["kernel"])
        self.refaults = int(stat[f"{total}workingset_refault_file"])
        mapped = int(stat[f"{total}mapped_file" if group.version == 1 else "file_mapped"])
        cached = int(stat[f"{total}cache"] if group.version == 1 else stat["file"]) - int(stat[names[1]])
        files = max(mapped, min(cached, LIBRARY_BYTES))
        if own_bytes + files > self.bytes + self.files:
            self.bytes, self.files = own_bytes, files


@contextmanager
def watched(group: MemoryGroup) -> Iterator[PeakUsage]:
    """Sample what ``group`` holds, every hundredth of a second, until the block ends."""
    usage, done = PeakUsage(), threading.Event()

    def watch() -> None:
        while not done.wait(_PAUSE):
            with suppress(OSError):
                usage.sample(group)

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield usage
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
class Outcome:
    """How a run under ``limit`` bytes ended, what it held, its record, and what it said."""

    limit: int
    code: int
    usage: PeakUsage
    record: Mapping[str, Any]
    said: str

    def metric(self, *names: str) -> float:
        """Return the first of the metrics ``names`` that the record has, 0 where it has none."""
        metrics = self.record.get("metrics") or {}
        return next((metrics[name] for name in names if metrics.get(name)), 0)

    @property
    def whole(self) -> bool:
        """Whether it had all weights in memory."""
        return self.code == 0 and not self.metric(*_STREAMED)

    @property
    def unused(self) -> float:
        """The share of the cap that nothing filled at the peak."""
        return max(0.0, 1 - (self.usage.bytes + self.usage.files) / self.limit)

    @property
    def predicted_seconds(self) -> float:
        """The seconds of a token that its plan predicts."""
        return self.metric("predicted_seconds_per_token")

    def __str__(self) -> str:
        memory = self.record.get("memory") or {}
        budget, predicted = ((memory.get(key) or {}).get("cpu") or 0 for key in ("budget", "predicted"))
        sizes = (self.limit, budget, predicted, self.usage.bytes, self.usage.files)
        unused = "  whole" if self.whole else f"{self.unused:7.1%}"
        seconds = f"{self.predicted_seconds:10.3f} {self.metric(*_SECONDS):8.3f}"
        load = f"{self.usage.refaults:9} ({os.getloadavg()[0]:4.1f})"
        cells = " ".join(f"{count / 1e6:8.0f}" for count in sizes)
        return f"{cells} {unused} {self.metric(*_STREAMED) / 1e6:9.1f} {seconds} {load}  {FATES[self.code]}"


@dataclass(frozen=True, slots=True)
class Setup:
    """What the runs of one table have in common; ``work`` is the folder that they are made in."""

    checkpoint: Path
    work: Path
    options: tuple[str, ...]
    patience_seconds: float

    def run(self, limit: int, *options: str) -> Outcome:
        """Return what became of a run under ``limit`` bytes; of earlier ones only what they measured stays cached."""
        for folder in ("runs", "cache/generate", "cache/score", "cache/finetune", "cache/plan"):
            shutil.rmtree(self.work / "outputs" / folder, ignore_errors=True)
        self.work.mkdir(parents=True, exist_ok=True)
        forget(Path(sys.prefix), self.checkpoint)
        asked = [*COMMAND, "model=pretrained", f"model.path={self.checkpoint}", *self.options, *options]
        with cap(limit) as group, watched(group) as usage:
            code, said = self._outcome(group.entering(asked))
        records = list(self.work.glob("outputs/runs/*/*/run.json"))
        record = json.loads(records[0].read_text()) if records else {}
        if code not in FATES:
            raise SystemExit(f"{limit}: exit code {code}\n{said[-4000:]}")
        return Outcome(limit, code, usage, record, said)

    def _outcome(self, command: list[str]) -> tuple[int, str]:
        try:
            done = subprocess.run(
                command, cwd=self.work, text=True, check=False, timeout=self.patience_seconds,
                stdin=subprocess.DEVNULL, capture_output=True,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return TOO_SLOW, ""
        return done.returncode, done.stderr

    def least(self) -> int:
        """Return the least cap that works, as a refusal names it; measures what plans go by first, under no cap."""
        self.run(UNCAPPED, "stop_after=plan")
        refused = self.run(REFUSED_UNDER, "stop_after=plan")
        named = re.search(r"the least that works is (\d+) bytes", refused.said)
        return int(named[1]) if named else REFUSED_UNDER

    def beside(self, limit: int, left: int) -> tuple[str, ...]:
        """Return the option that gives the budget by which ``left`` bytes of ``limit`` are over, as it is predicted."""
        predicted = self.run(UNCAPPED, "stop_after=plan", f"max_memory.cpu={limit // 2}").record["memory"]["predicted"]
        budget = limit // 2 + limit - left - predicted["cpu"]
        return (f"max_memory.cpu={budget}",)


def summary(kind: str, outcomes: Sequence[Outcome]) -> str:
    """Return in a line what the runs of a ``kind`` come to, whose caps grow."""
    short = [one.unused for one in outcomes if one.code == 0 and not one.whole]
    seconds = [one.predicted_seconds for one in outcomes if one.code == 0]
    slower = max((one / min(seconds[: at + 1]) - 1 for at, one in enumerate(seconds[1:])), default=0.0)
    lived = sum(one.code == 0 for one in outcomes)
    most = f"at most {max(short):.1%} unused where weights are streamed" if short else "all whole"
    later = f"a larger cap predicted at most {max(0.0, slower):.1%} slower"
    return f"{kind}: {lived} of {len(outcomes)} lived; {most}; {later}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {', '.join(KINDS)}; all by default")
    parser.add_argument("--short", action="store_true", help="ten runs of small models, in some minutes")
    parser.add_argument("--caps", nargs="+", help="instead of each kind's own; 'least' is what a refusal names")
    parser.add_argument("--beside", nargs="+", default=[], help="what given budgets leave beside the predicted peak")
    parser.add_argument("--patience", type=float, default=240, metavar="SECONDS", help="after which a run is ended")
    parser.add_argument("--option", action="append", default=[], help="an override, e.g. storage.io=direct")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    given = parser.parse_args()
    if unknown := set(given.kinds) - KINDS.keys():
        parser.error(f"no kind of runs: {', '.join(sorted(unknown))}")
    text, done = given.folder / "text.txt", []
    given.folder.mkdir(parents=True, exist_ok=True)
    text.write_text(TEXT * 250)
    print(HEADER, flush=True)
    for name in given.kinds or KINDS:
        kind = KINDS[name]
        caps = given.caps or (kind.short if given.short else kind.caps)
        if not caps:
            continue
        options = (*kind.options, *([f"finetune.text_file={text}"] if kind.options is FINETUNE else []), *given.option)
        work = given.folder / f"caps-{name.replace(' ', '-')}"
        setup = Setup(kind.make(given.folder.resolve()), work, options, given.patience)
        least, outcomes = setup.least(), []
        for limit in (least if size == LEAST else parse_size(size) for size in caps):
            for budgets in [setup.beside(limit, left) for left in map(parse_size, given.beside)] or [()]:
                outcomes.append(setup.run(limit, *budgets))
                print(outcomes[-1], name, flush=True)
        done.append(summary(name, outcomes))
    print(*done, sep="\n")


if __name__ == "__main__":
    main()
