"""Prompts in lockstep under a hard memory cap, beside the batches of transformers + accelerate at the same cap.

    python -m tests.benchmarks.lockstep 1.1b --rounds 3
    python -m tests.benchmarks.lockstep 7b --rounds 3 --sizes 1 2 4 8 --remove

Needs root (a memory cgroup, dropped caches), the extra ``bench``, and room in ``--folder`` for the checkpoint. So many
prompts as each of ``--sizes`` says, of one length, go through the model together: with offstage in lockstep, with
accelerate as one batch. Each round runs every side once, cold, the first one another each time, between two
measurements of the raw direct-read bandwidth of the same files.

In the end a table: the seconds of a token of one prompt (a step's, over how many it served), tokens a second, what was
predicted, the peak beside the predicted one, and how many prompts got the tokens of the smallest group of offstage's
that they were in: with offstage that is to be all of them, and those of each prompt alone.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from stages.units import parse_size
from tests.benchmarks.offload import BUDGETS, USUAL_BUDGETS, rounds_parser, run_rounds, say
from tests.benchmarks.sides import Setting, Side, accelerate_side, offstage_side

LENGTH = 8
Rounds = Sequence[Mapping[str, Any]]


def main() -> None:
    """Run the rounds and print one line a side and a table."""
    run_rounds(_arguments(), prepare=prepare, summarise=show, results="results-lockstep")


def _arguments() -> argparse.Namespace:
    parser = rounds_parser(str(__doc__), tokens=8)
    parser.add_argument("--sizes", nargs="*", type=int, default=[1, 2, 4, 8, 16, 32], help="how many prompts together")
    parser.add_argument("--budget", help="accelerate's host budget; the middle one of the offload benchmark's")
    return parser.parse_args()


def show(rounds: Rounds) -> None:
    """Print the table."""
    for line in table(rounds):
        say(line)


def prepare(setting: Setting, arguments: argparse.Namespace) -> Mapping[str, Callable[[], Side]]:
    """Return what runs each side, by the side's name."""
    budget = parse_size(arguments.budget or BUDGETS.get(arguments.size, USUAL_BUDGETS)[1])
    sides: dict[str, Callable[[], Side]] = {}
    for size in arguments.sizes:
        prompts = make_prompts(size)
        options = [f"generate.prompts={prompts}", f"generate.lockstep={size}", "generate.exact=true"]
        sides[f"offstage {size}"] = partial(offstage_side, setting, options)
        sides[f"accelerate {size}"] = partial(accelerate_side, setting, budget, prompts)
    return sides


def make_prompts(count: int) -> list[list[int]]:
    """Return so many prompts, the first of them always the same."""
    draw = random.Random(5)
    return [[draw.randrange(5, 1000) for _ in range(LENGTH)] for _ in range(count)]


def table(rounds: Rounds) -> Iterator[str]:
    """Yield the lines of the table: medians of the rounds that a side lived through."""
    titles = f"{'predicted':>11}{'streamed':>11}{'peak':>9}{'predicted':>11}"
    yield f"{'':<16}{'s a token':>10}{'tokens/s':>10}{titles}  same tokens"
    first = first_answers(rounds)
    for name in rounds[0]["sides"]:
        tool, size = name.split()
        lived = [one["sides"][name] for one in rounds if one["sides"][name]["seconds"]]
        if not lived:
            yield f"{name:<16}no figure: {rounds[0]['sides'][name]['failed']}"
            continue
        shared = int(size) if tool == "accelerate" else 1
        seconds = statistics.median(side["seconds"] for side in lived) / shared
        answers = lived[0]["answers"]
        same = sum(answer == first[place] for place, answer in enumerate(answers) if place in first)
        cells = [f"{seconds:>10.3f}{1 / seconds:>10.2f}"]
        cells += [_bytes(lived[0], "predicted", "{:>11.3f}", 1), _bytes(lived[0], "streamed", "{:>8.2f} GB", 1e9)]
        cells += [_bytes(lived[0], "peak", "{:>6.2f} GB", 1e9), _bytes(lived[0], "predicted_peak", "{:>8.2f} GB", 1e9)]
        yield f"{name:<16}{''.join(cells)}  {same} of {len(answers)}"


def first_answers(rounds: Rounds) -> dict[int, list[int]]:
    """Return the tokens of each prompt in the first of offstage's groups that it was in: the first prompt's alone."""
    found: dict[int, list[int]] = {}
    for one in rounds:
        for name, side in one["sides"].items():
            if name.startswith("offstage") and side["seconds"]:
                for place, answer in enumerate(side["answers"]):
                    found.setdefault(place, answer)
    return found


def _bytes(side: Side, key: str, shape: str, unit: float) -> str:
    width = len(shape.format(0.0))
    return shape.format(side[key] / unit) if side.get(key) is not None else " " * (width - 1) + "-"


if __name__ == "__main__":
    main()
