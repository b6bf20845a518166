"""A repeated sweep, on a quiet machine or a busy one: which differences between its jobs are more than noise.

    python -m tests.benchmarks.repeated 0.1b --plot .github/pictures/repeated-quiet.png
    python -m tests.benchmarks.repeated 0.1b --busy 2 --plot .github/pictures/repeated-busy.png
    python -m tests.benchmarks.repeated tiny --plot repeated.png                               # the embedded model
    python -m tests.benchmarks.repeated 0.1b --sweep FOLDER --plot repeated.png                # one that has been run

Four budgets, two policies, five repeats of each job after a warm-up, as in ``experiment=repeated_sweep``; for the
embedded model that experiment itself. Meanwhile ``--busy`` processes do nothing but compute. The sweep's folder lies
in ``--folder``, with the report's page in it; what is printed says which repeats were disturbed and which jobs can be
told apart, and the picture shows both.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
from pathlib import Path

from offstage.pipeline.report.checkpoint_groups import CheckpointGroup, group_jobs
from offstage.pipeline.report.command import run as report
from offstage.pipeline.report.run_folders import find
from tests.benchmarks.busy import busy
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.offload import say
from tests.benchmarks.sides import COMMAND, PROMPT

TINY = "tiny"
OPTIONS = (
    "max_memory.cpu=60MB,120MB,180MB,300MB", "device_map=sequential,optimal", "storage.io=direct", "measure.repeats=5",
    "measure.warmup=1", "generate.max_new_tokens=16", "generate.min_new_tokens=16",
    f"generate.prompts=[{PROMPT}]",
)  # fmt: skip
"""What the embedded model's experiment asks for, of a model of 0.1B in bfloat16: 0.2 GB."""


def main() -> None:
    """Run the sweep, or take one that has been run; say what came out, and draw it."""
    arguments = _arguments()
    sweep = arguments.sweep or _run(arguments)
    group = read(sweep)
    for line in describe(group):
        say(line)
    if arguments.plot:
        from tests.benchmarks.repeated_plot import draw

        draw(group, arguments.plot)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=[TINY, *SHAPES])
    parser.add_argument("--busy", type=int, default=0, help="so many processes compute meanwhile")
    parser.add_argument("--option", action="append", default=[], help="an override more for offstage")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--sweep", type=Path, help="a sweep's folder: nothing runs")
    parser.add_argument("--plot", type=Path, help="a .png to draw the sweep into")
    return parser.parse_args()


def _run(arguments: argparse.Namespace) -> Path:
    """Run the sweep and its report, and return the sweep's folder."""
    name = f"repeated-{arguments.size}-{'busy' if arguments.busy else 'quiet'}"
    folder: Path = arguments.folder / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    asked = ["experiment=repeated_sweep"]
    if arguments.size != TINY:
        asked = [f"model.path={make(arguments.size, arguments.folder / arguments.size)}", *OPTIONS]
    sweep = folder / "sweep"
    asked += [*arguments.option, f"outputs={folder / 'outputs'}", f"hydra.sweep.dir={sweep}"]
    overrides = {override.partition("=")[0]: override for override in asked}  # of one key the last, as Hydra takes one
    with busy(arguments.busy):
        done = subprocess.run([*COMMAND, "-m", *overrides.values()], check=False)
    if done.returncode:
        raise SystemExit(f"the sweep in {sweep} ended with {done.returncode}")
    report([str(sweep)])
    return sweep


def read(sweep: Path) -> CheckpointGroup:
    """Return the jobs below ``sweep``, and what can be said of them together."""
    groups = group_jobs(find([sweep]).jobs)
    if len(groups) > 1:
        raise SystemExit(f"{sweep}: {len(groups)} checkpoints; give the folder of a sweep over one")
    return groups[0]


def describe(group: CheckpointGroup) -> list[str]:
    """Return in words how many repeats there are and were disturbed, and which jobs can't be told apart."""
    repeats = [repeat for job in group.jobs for repeat in job.run.counting]
    busy = sum(repeat.is_contended for repeat in repeats)
    lines = [f"{len(group.jobs)} jobs, {len(repeats)} repeats, others used the processor in {busy} of them."]
    lines += [group.noise.describe()] * bool(group.noise.pairs)
    alike = [(name, others) for name, others in group.noise.like.items() if others]
    return lines + [f"Within the noise of {name}: {', '.join(others)}." for name, others in alike]


if __name__ == "__main__":
    main()
