"""Predicted against measured host peaks and bytes streamed for a token, over a grid of budgets and requests.

    python -m tests.benchmarks.predictions 1.1b --budgets 300MB 600MB 1GB
    python -m tests.benchmarks.predictions qwen3-moe --budgets 60MB 120MB 200MB --tokens 33
    python -m tests.benchmarks.predictions /ckpt/gpt2 --budgets 2GB --requests 1x256 2x1200 4x1000

A request is SEQUENCESxLENGTH of its prompts, of which only the first is that long. Prints one line a run: what the plan
predicted, what the process held (anonymous memory), the same of the bytes streamed for a token, and how far apart the
two are in each. What a mixture streams is an expectation: give it ``--tokens`` enough. ``--capped`` runs each again, in
the same folder, under a hard cap at the predicted peak and 5% more, and says whether it lives.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from stages.units import format_bytes
from tests.benchmarks.caps import run_capped
from tests.benchmarks.checkpoints import MIXTURES, SHAPES, make, make_mixture_like

BUDGETS = ["300MB", "450MB", "600MB", "800MB", "1GB", "1.25GB", "1.5GB", "1.8GB", "2.1GB", "2.5GB"]
COMMAND = [sys.executable, "-P", "-c", "from pipeline.app import main; main()"]


def prompts(request: str) -> str:
    """Return the prompts of ``request``, e.g. 4x1000, as token ids; all but the first are padded to its length."""
    sequences, length = map(int, request.split("x"))
    return str([[5 + i % 90 for i in range(length - min(row, length // 2))] for row in range(sequences)])


def command(checkpoint: Path, budget: str, *, request: str, tokens: int, options: Sequence[str]) -> list[str]:
    """Return the command that generates so many ``tokens`` under ``budget``."""
    asked = [f"generate.{bound}_new_tokens={tokens}" for bound in ("min", "max")]
    given = [f"model.path={checkpoint}", "model=pretrained", f"max_memory.cpu={budget}"]
    return [*COMMAND, *given, f"generate.prompts={prompts(request)}", *asked, *options]


def measure(asked: Sequence[str], work: Path) -> dict[str, Any]:
    """Return the run record of the command ``asked``, run in ``work`` with nothing cached."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    subprocess.run(asked, cwd=work, check=True, capture_output=True)
    record: dict[str, Any] = json.loads(next(work.glob("outputs/runs/*/*/run.json")).read_text())
    return record


def main() -> None:
    """Print the table, and the largest errors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = ", ".join([*SHAPES, *MIXTURES])
    parser.add_argument("model", help=f"the folder of a checkpoint, or one to make: {names}")
    parser.add_argument("--requests", nargs="+", default=["1x4"], metavar="SEQUENCESxLENGTH")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--tokens", type=int, default=3)
    parser.add_argument("--capped", action="store_true", help="run each again under its predicted peak and 5%%")
    parser.add_argument("--option", action="append", default=[], help="an override, e.g. storage.io=direct")
    given = parser.parse_args()
    checkpoint = _checkpoint(given.model, given.folder)
    work, errors = given.folder / f"predictions-{checkpoint.name}", []
    for budget, request in itertools.product(given.budgets, given.requests):
        asked = command(checkpoint, budget, request=request, tokens=given.tokens, options=given.option)
        pairs = figures(measure(asked, work))
        errors.append(
            [predicted / measured - 1 if measured else float(bool(predicted)) for predicted, measured in pairs]
        )
        sizes = " ".join(f"{format_bytes(count):>10}" for pair in pairs for count in pair)
        fate = f"  {_fate(asked, work, pairs[0][0])}" if given.capped else ""
        apart = " ".join(f"{error:+.1%}" for error in errors[-1])
        say(f"{budget:>8} {request:>8}  predicted, measured; streamed: {sizes}  {apart}{fate}")
    peaks, streamed = (max(map(abs, each)) for each in zip(*errors, strict=True))
    say(f"largest error {peaks:.1%} of peaks, {streamed:.1%} of bytes streamed, over {len(errors)} runs")


def _checkpoint(model: str, folder: Path) -> Path:
    """Return the folder of the checkpoint ``model``, which is made in ``folder`` where it is a name."""
    if model in SHAPES:
        return make(model, folder / model)
    return make_mixture_like(model, folder / model) if model in MIXTURES else Path(model).resolve()


def figures(record: dict[str, Any]) -> list[tuple[int, int]]:
    """Return what was predicted and measured of the host's peak, and of the bytes streamed for a token."""
    memory, metrics = record["memory"], record["metrics"]
    streamed = (metrics["predicted_streamed_bytes_per_token"], metrics["streamed_bytes_per_token"])
    return [(memory["predicted"]["cpu"], memory["measured"]["cpu"]), streamed]


def _error(predicted: int, measured: int) -> float:
    """Return by which share of what was ``measured`` the prediction is above it."""
    return predicted / measured - 1 if measured else float(predicted != measured)


def _fate(asked: Sequence[str], work: Path, predicted: int) -> str:
    """Return how the command ``asked`` ends under a cap that leaves 5% beside what was ``predicted``."""
    shutil.rmtree(work / "outputs/cache/generate")
    code = run_capped(asked, round(1.05 * predicted), cwd=work).returncode
    return "lives" if code == 0 else "KILLED" if code == -9 else f"exit code {code}"


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
