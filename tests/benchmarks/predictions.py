"""Predicted against measured host peaks, over a grid of budgets.

    python -m tests.benchmarks.predictions 1.1b --budgets 300MB 600MB 1GB

Prints one line a budget: what the plan predicted, what the process held (anonymous memory), and how far apart they are.
"""

from __future__ import annotations

import argparse
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


def measure(checkpoint: Path, work: Path, budget: str, options: list[str]) -> dict[str, Any]:
    """Return the run record of a few tokens under ``budget``."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    request = ["generate.prompts=[[5,6,7,8]]", "generate.max_new_tokens=3", "generate.min_new_tokens=3"]
    asked = [f"model.path={checkpoint}", "model=pretrained", f"max_memory.cpu={budget}", *request, *options]
    subprocess.run([*COMMAND, *asked], cwd=work, check=True, capture_output=True)
    record: dict[str, Any] = json.loads(next(work.glob("outputs/runs/*/*/run.json")).read_text())
    return record


def main() -> None:
    """Print the table, and the largest error."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--budgets", nargs="+", default=BUDGETS)
    parser.add_argument("--option", action="append", default=[], help="an override, e.g. storage.io=direct")
    arguments = parser.parse_args()
    checkpoint = make(arguments.size, arguments.folder / arguments.size)
    errors = []
    for budget in arguments.budgets:
        record = measure(checkpoint, arguments.folder / "predictions", budget, arguments.option)
        predicted, measured = (record["memory"][kind]["cpu"] for kind in ("predicted", "measured"))
        errors.append(predicted / measured - 1)
        streamed = [record["metrics"][f"{kind}streamed_bytes_per_token"] for kind in ("predicted_", "")]
        sizes = " ".join(f"{format_bytes(count):>10}" for count in (predicted, measured, *streamed))
        say(f"{budget:>8}  predicted, measured; streamed: {sizes}  {errors[-1]:+.1%}")
    say(f"largest error {max(map(abs, errors)):.1%} over {len(errors)} budgets")


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
