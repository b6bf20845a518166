"""Predicted against measured host peaks, over a grid of budgets and requests.

    python -m tests.benchmarks.predictions 1.1b --budgets 300MB 600MB 1GB
    python -m tests.benchmarks.predictions /ckpt/gpt2 --budgets 2GB --requests 1x256 2x1200 4x1000

A request is SEQUENCESxLENGTH of its prompts, of which only the first is that long. Prints one line a run: what the plan
predicted, what the process held (anonymous memory), and how far apart they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from stages.units import format_bytes
from tests.benchmarks.checkpoints import SHAPES, make

BUDGETS = ["300MB", "450MB", "600MB", "800MB", "1GB", "1.25GB", "1.5GB", "1.8GB", "2.1GB", "2.5GB"]
COMMAND = [sys.executable, "-P", "-c", "from pipeline.app import main; main()"]


def prompts(request: str) -> str:
    """Return the prompts of ``request``, e.g. 4x1000, as token ids; all but the first are padded to its length."""
    sequences, length = map(int, request.split("x"))
    return str([[5 + i % 90 for i in range(length - min(row, length // 2))] for row in range(sequences)])


def measure(checkpoint: Path, work: Path, budget: str, *, request: str, options: list[str]) -> dict[str, Any]:
    """Return the run record of a few tokens under ``budget``."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    tokens = [f"generate.prompts={prompts(request)}", "generate.max_new_tokens=3", "generate.min_new_tokens=3"]
    asked = [f"model.path={checkpoint}", "model=pretrained", f"max_memory.cpu={budget}", *tokens, *options]
    subprocess.run([*COMMAND, *asked], cwd=work, check=True, capture_output=True)
    record: dict[str, Any] = json.loads(next(work.glob("outputs/runs/*/*/run.json")).read_text())
    return record


def main() -> None:
    """Print the table, and the largest error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help=f"the folder of a checkpoint, or a size to make one of: {', '.join(SHAPES)}")
    parser.add_argument("--requests", nargs="+", default=["1x4"], metavar="SEQUENCESxLENGTH")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--option", action="append", default=[], help="an override, e.g. storage.io=direct")
    arguments = parser.parse_args()
    sized = arguments.model in SHAPES
    checkpoint = make(arguments.model, arguments.folder / arguments.model) if sized else Path(arguments.model).resolve()
    errors = []
    for budget, request in itertools.product(arguments.budgets, arguments.requests):
        place = arguments.folder / f"predictions-{checkpoint.name}"
        record = measure(checkpoint, place, budget, request=request, options=arguments.option)
        predicted, measured = (record["memory"][kind]["cpu"] for kind in ("predicted", "measured"))
        errors.append(predicted / measured - 1)
        streamed = [record["metrics"][f"{kind}streamed_bytes_per_token"] for kind in ("predicted_", "")]
        sizes = " ".join(f"{format_bytes(count):>10}" for count in (predicted, measured, *streamed))
        say(f"{budget:>8} {request:>8}  predicted, measured; streamed: {sizes}  {errors[-1]:+.1%}")
    say(f"largest error {max(map(abs, errors)):.1%} over {len(errors)} runs")


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
