"""Predicted against measured host peaks, bytes streamed for a token and its seconds, over budgets and requests.

    python -m tests.benchmarks.predictions 1.1b --budgets 300MB 600MB 1GB
    python -m tests.benchmarks.predictions qwen3-moe --budgets 90MB 120MB 150MB --tokens 65 --capped
    python -m tests.benchmarks.predictions /ckpt/gpt2 --budgets 2GB --requests 1x256 2x1200 4x1000

A request is SEQUENCESxLENGTH of its prompts, of which only the first is that long. Prints one line a run: what the plan
predicted, what the process held (anonymous memory), the same of the bytes streamed for a token and of its seconds, and
how far apart the two are in each. ``--capped`` runs each one again, in the same folder, under a hard cap at the
predicted peak and 5% more, and says whether it lives.

What a mixture streams is an expectation, of uniform routing: give it ``--tokens`` enough. Text is sampled from the
whole distribution of each token: random weights that decode greedily repeat themselves, and no expectation is of one
loop (``--greedy``).
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.stages.units import format_bytes
from tests.benchmarks.caps import run_capped
from tests.benchmarks.checkpoints import MIXTURES, SHAPES, make, make_mixture_like
from tests.e2e.conftest import COMMAND

BUDGETS = ["300MB", "450MB", "600MB", "800MB", "1GB", "1.25GB", "1.5GB", "1.8GB", "2.1GB", "2.5GB"]
SAMPLED = ["generate.do_sample=true", "generate.top_k=0"]


@dataclass(frozen=True, slots=True)
class Setup:
    """What all runs of one table have in common; ``work`` is the folder that they are made in."""

    checkpoint: Path
    work: Path
    tokens: int
    options: Sequence[str]
    capped: bool

    def command(self, budget: str, request: str, seed: int) -> list[str]:
        """Return the command that answers ``request`` under ``budget``; prompts and sampling go by ``seed``."""
        asked = [f"generate.{bound}_new_tokens={self.tokens}" for bound in ("min", "max")]
        given = [f"model.path={self.checkpoint}", "model=pretrained", f"max_memory.cpu={budget}", f"seed={seed}"]
        return [*COMMAND, *given, f"generate.prompts={prompts(request, seed)}", *asked, *self.options]

    def run(self, asked: Sequence[str]) -> dict[str, Any]:
        """Return the run record of the command ``asked``."""
        subprocess.run(asked, cwd=self.work, check=True, capture_output=True)
        newest = max(self.work.glob("outputs/runs/*/*/run.json"), key=lambda path: path.stat().st_mtime_ns)
        record: dict[str, Any] = json.loads(newest.read_text())
        return record

    def fate(self, asked: Sequence[str], predicted: int) -> str:
        """Return how the command ``asked`` ends under a cap that leaves 5% beside what was ``predicted``."""
        shutil.rmtree(self.work / "outputs/cache/generate")
        code = run_capped(asked, round(1.05 * predicted), cwd=self.work).returncode
        return "lives" if code == 0 else "KILLED" if code == -9 else f"exit code {code}"


def prompts(request: str, seed: int = 0) -> str:
    """Return the prompts of ``request``, e.g. 4x1000, as token ids; all but the first are padded to its length."""
    sequences, length = map(int, request.split("x"))
    ids = random.Random(seed)
    return str([[ids.randrange(5, 95) for _ in range(length - min(row, length // 2))] for row in range(sequences)])


def main() -> None:
    """Print the table, and the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join([*SHAPES, *MIXTURES])
    parser.add_argument("model", help=f"the folder of a checkpoint, or one to make: {names}")
    parser.add_argument("--requests", nargs="+", default=["1x4"], metavar="SEQUENCESxLENGTH")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--greedy", action="store_true", help="decode greedily, not by sampling")
    parser.add_argument("--capped", action="store_true", help="each first one again under its peak and 5%%")
    parser.add_argument("--option", action="append", default=[], help="an override, e.g. storage.io=direct")
    given = parser.parse_args()
    checkpoint = checkpoint_of(given.model, given.folder)
    options = [*([] if given.greedy else SAMPLED), *given.option]
    setup = Setup(checkpoint, given.folder / f"predictions-{checkpoint.name}", given.tokens, options, given.capped)
    rows = [measure(setup, budget, request) for budget, request in itertools.product(given.budgets, given.requests)]
    peaks, streamed, seconds = (max(map(abs, each)) for each in zip(*rows, strict=True))
    largest = f"{peaks:.1%} of peaks, {streamed:.1%} of bytes streamed, {seconds:.1%} of seconds"
    say(f"largest error {largest}, over {len(rows)} runs")


def measure(setup: Setup, budget: str, request: str) -> list[float]:
    """Return the errors of a run of ``request`` under ``budget``, and print its line; nothing is cached at first."""
    shutil.rmtree(setup.work, ignore_errors=True)
    setup.work.mkdir(parents=True)
    asked = setup.command(budget, request, 0)
    pairs = figures(setup.run(asked))
    errors = [_error(*pair) for pair in pairs]
    *counts, seconds = pairs
    sizes = " ".join(f"{format_bytes(count):>10}" for pair in counts for count in pair)
    sizes += "".join(f"{count:>9.4f}" for count in seconds)
    fate = f"  {setup.fate(asked, pairs[0][0])}" if setup.capped else ""
    apart = " ".join(f"{error:+.1%}" for error in errors)
    say(f"{budget:>8} {request:>8}  predicted, measured; streamed; seconds: {sizes}  {apart}{fate}")
    return errors


def checkpoint_of(model: str, folder: Path) -> Path:
    """Return the folder of the checkpoint ``model``, which is made in ``folder`` where it is a name."""
    if model in SHAPES:
        return make(model, folder / model)
    return make_mixture_like(model, folder / model) if model in MIXTURES else Path(model).resolve()


def figures(record: dict[str, Any]) -> list[tuple[float, float]]:
    """Return what was predicted and measured of the host's peak, of the bytes streamed for a token, and its seconds."""
    memory, metrics = record["memory"], record["metrics"]
    streamed = (metrics["predicted_streamed_bytes_per_token"], metrics["streamed_bytes_per_token"])
    seconds = (metrics["predicted_seconds_per_token"], metrics["decode_seconds_per_token"])
    return [(memory["predicted"]["cpu"], memory["measured"]["cpu"]), streamed, seconds]


def _error(predicted: float, measured: float) -> float:
    """Return by which share of what was ``measured`` the prediction is above it."""
    return predicted / measured - 1 if measured else float(predicted != measured)


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
