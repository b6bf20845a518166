"""Prompts in lockstep under a hard memory cap, beside the batches of transformers + accelerate at the same cap.

    python -m tests.benchmarks.lockstep 1.1b --rounds 3
    python -m tests.benchmarks.lockstep 7b --rounds 3 --sizes 1 2 4 8 --remove --plot lockstep-7b.png
    python -m tests.benchmarks.lockstep 7b --json /tmp/offstage-bench/results-lockstep-7b.json --plot lockstep-7b.png

Needs root (a memory cgroup, dropped caches), the extra ``bench``, and room in ``--folder`` for the checkpoint. So many
prompts as each of ``--sizes`` says, of one length, go through the model together: with offstage in lockstep, with
accelerate as one batch. Each round runs every side once, cold, the first one another each time, between two
measurements of the raw direct-read bandwidth of the same files.

In the end a table: the seconds of a token of one prompt (a step's, over how many it served), tokens a second, what was
predicted, the peak beside the predicted one, and how many prompts got the tokens of the smallest group of offstage's
that they were in: with offstage that is to be all of them, and those of each prompt alone. Below it, from how many on
more bring nothing: where the line of a pass that is shared out meets that of computing; by how much each predicted peak
is off; how many times as fast the best group is as one prompt by itself, and as accelerate's best batch with the same
tokens.

The rounds stay in ``--folder`` as JSON; with ``--json`` they are read from there and nothing runs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from offstage.stages.units import parse_size
from tests.benchmarks.offload import BUDGETS, USUAL_BUDGETS, rounds_parser, run_rounds, say
from tests.benchmarks.sides import Setting, Side, accelerate_side, offstage_side

LENGTH = 8
OURS, THEIRS = "offstage", "accelerate"
Rounds = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class GroupResult:
    """What ``size`` prompts together came to with one tool, in the rounds that it lived through.

    ``seconds`` are those of a token of one prompt, one entry a round, ``predicted`` likewise if there is a plan.
    ``same`` of the prompts got the tokens that the smallest of offstage's groups gave them. ``side`` is the first that
    lived, as the round has it.
    """

    tool: str
    size: int
    seconds: tuple[float, ...]
    predicted: float | None
    same: int
    side: Side

    @property
    def median(self) -> float:
        """The seconds of a token in the middle of the rounds."""
        return statistics.median(self.seconds)


def main() -> None:
    """Run the rounds, or read those of an earlier time, and print one line a side and a table."""
    arguments = _arguments()
    summarise = partial(show, plot=arguments.plot)
    if arguments.json:
        summarise(json.loads(arguments.json.read_text())["rounds"])
    else:
        run_rounds(arguments, prepare=prepare, summarise=summarise, results="results-lockstep")


def _arguments() -> argparse.Namespace:
    parser = rounds_parser(str(__doc__), tokens=8)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32], help="how many prompts together")
    parser.add_argument("--budget", help="accelerate's host budget; the middle one of the offload benchmark's")
    parser.add_argument("--json", type=Path, help="rounds that an earlier time has kept: nothing runs")
    parser.add_argument("--plot", type=Path, help="a .png to draw tokens a second against prompts together into")
    return parser.parse_args()


def show(rounds: Rounds, *, plot: Path | None = None) -> None:
    """Print the table, and draw it into ``plot``."""
    for line in (*table(rounds), *verdicts(results(rounds))):
        say(line)
    if plot is not None:
        from tests.benchmarks.lockstep_plot import draw

        draw(results(rounds), plot)


def prepare(setting: Setting, arguments: argparse.Namespace) -> Mapping[str, Callable[[], Side]]:
    """Return what runs each side, by the side's name."""
    budget = parse_size(arguments.budget or BUDGETS.get(arguments.size, USUAL_BUDGETS)[1])
    sides: dict[str, Callable[[], Side]] = {}
    for size in arguments.sizes:
        prompts = make_prompts(size)
        options = [f"generate.prompts={prompts}", f"generate.lockstep={size}", "generate.exact=true"]
        sides[f"{OURS} {size}"] = partial(offstage_side, setting, options)
        sides[f"{THEIRS} {size}"] = partial(accelerate_side, setting, budget, prompts)
    return sides


def make_prompts(count: int) -> list[list[int]]:
    """Return so many prompts, the first of them always the same."""
    draw = random.Random(5)
    return [[draw.randrange(5, 1000) for _ in range(LENGTH)] for _ in range(count)]


def results(rounds: Rounds) -> list[GroupResult]:
    """Return what each side came to that lived through any of the ``rounds``."""
    group_results, first = [], first_answers(rounds)
    for name in rounds[0]["sides"]:
        tool, size = name.split()
        lived = [one["sides"][name] for one in rounds if one["sides"][name]["seconds"]]
        if lived:
            shared = int(size) if tool == THEIRS else 1  # a batch's seconds are those of a step
            answers = lived[0]["answers"]
            same = sum(answer == first[place] for place, answer in enumerate(answers) if place in first)
            seconds = tuple(side["seconds"] / shared for side in lived)
            group_results.append(GroupResult(tool, int(size), seconds, lived[0].get("predicted"), same, lived[0]))
    return group_results


def bend(seconds: Mapping[int, float]) -> float | None:
    """Return from how many together on more bring nothing, of the ``seconds`` of a token by how many there were.

    What streams for a pass is shared out, what each computes isn't: the seconds are the larger of ``pass / size`` and
    ``compute``. Both are fitted, with the least error of the logarithms over all ways to divide the sizes between
    them; where they meet is the bend. Null where no size, or each, has reached it.
    """
    sizes = sorted(seconds)
    ways = []
    for count in range(1, len(sizes)):
        shared = _mean(seconds[size] * size for size in sizes[:count])
        compute = _mean(seconds[size] for size in sizes[count:])
        errors = (math.log(seconds[size] / max(shared / size, compute)) ** 2 for size in sizes)
        ways.append((sum(errors), shared / compute))
    size_at_bend = min(ways)[1] if ways else 0
    return size_at_bend if sizes and sizes[0] < size_at_bend < sizes[-1] else None


def _mean(values: Iterable[float]) -> float:
    return math.exp(statistics.mean(map(math.log, values)))


def bends(group_results: Sequence[GroupResult]) -> tuple[float | None, float | None]:
    """Return the predicted bend of offstage's groups and the measured one."""
    ours = [group for group in group_results if group.tool == OURS]
    predicted = {group.size: group.predicted for group in ours if group.predicted}
    return bend(predicted), bend({group.size: group.median for group in ours})


def table(rounds: Rounds) -> Iterator[str]:
    """Yield the lines of the table: medians of the rounds that a side lived through; then where they bend."""
    titles = f"{'predicted':>11}{'streamed':>11}{'peak':>9}{'predicted':>11}"
    yield f"{'':<16}{'s a token':>10}{'tokens/s':>10}{titles}  same tokens"
    rows = results(rounds)
    groups = {f"{group.tool} {group.size}": group for group in rows}
    for name, side in rounds[0]["sides"].items():
        if name not in groups:
            yield f"{name:<16}no figure: {side['failed']}"
            continue
        group = groups[name]
        cells = [f"{group.median:>10.3f}{1 / group.median:>10.2f}"]
        cells += [_bytes(group.side, "predicted", "{:>11.3f}", 1), _bytes(group.side, "streamed", "{:>8.2f} GB", 1e9)]
        cells += [_bytes(group.side, "peak", "{:>6.2f} GB", 1e9)]
        cells += [_bytes(group.side, "predicted_peak", "{:>8.2f} GB", 1e9)]
        yield f"{name:<16}{''.join(cells)}  {group.same} of {len(group.side['answers'])}"
    predicted, measured = bends(rows)
    if predicted and measured:
        yield f"more bring nothing from {predicted:.1f} together on as predicted, from {measured:.1f} as measured"


def verdicts(group_results: Sequence[GroupResult]) -> Iterator[str]:
    """Yield how far predicted peaks are off, and how much faster the best group is than others that keep the tokens."""
    ours = {group.size: group for group in group_results if group.tool == OURS}
    peaks = {size: group.side["predicted_peak"] / group.side["peak"] - 1 for size, group in ours.items()}
    yield "predicted peaks: " + ", ".join(f"{off:+.1%} with {size} together" for size, off in peaks.items())
    best = min(ours.values(), key=lambda group: group.median)
    if 1 in ours:
        times = ours[1].median / best.median
        yield f"offstage is fastest with {best.size} together, {times:.2f} times as fast as one by one"
    exact = [group for group in group_results if group.tool == THEIRS and group.same == group.size]
    for other in sorted(exact, key=lambda group: group.median)[:1]:
        times = other.median / best.median
        yield f"and {times:.2f} times as fast as accelerate's best batch with the tokens of each alone, of {other.size}"


def first_answers(rounds: Rounds) -> dict[int, list[int]]:
    """Return the tokens of each prompt in the first of offstage's groups that it was in: the first prompt's alone."""
    answers: dict[int, list[int]] = {}
    for one in rounds:
        for name, side in one["sides"].items():
            if name.startswith(OURS) and side["seconds"]:
                for place, answer in enumerate(side["answers"]):
                    answers.setdefault(place, answer)
    return answers


def _bytes(side: Side, key: str, shape: str, unit: float) -> str:
    width = len(shape.format(0.0))
    return shape.format(side[key] / unit) if side.get(key) is not None else " " * (width - 1) + "-"


if __name__ == "__main__":
    main()
