"""Generating under a hard memory cap: offstage against transformers + accelerate and AirLLM, in turn.

    python -m tests.benchmarks.offload 1.1b --rounds 3 --airllm /tmp/airllm/bin/python
    python -m tests.benchmarks.offload 1.1b --rounds 3 --doors
    python -m tests.benchmarks.offload 7b --rounds 3 --tokens 6 --airllm /tmp/airllm/bin/python --remove

Needs root (a memory cgroup, dropped caches), the extra ``bench``, and room in ``--folder`` for the checkpoint, and for
a second copy of it where AirLLM runs. ``--airllm`` is the interpreter of an environment that has it;
``tests/benchmarks/airllm.py`` says how to make one. Its conversion of the checkpoint is done once, before the rounds
and without a cap, and is told apart.

Each round runs every side once, cold (page cache dropped), the first one another each time, between two measurements
of the raw direct-read bandwidth of the same files. A side that is killed or takes too long is told and stops nothing.
Each result is printed when it is there, and the rounds so far lie in ``results-SIZE.json`` in the folder. In the end:
medians of seconds a token, the ratios to the others, and the share of the raw bandwidth. With ``--doors`` the sides are
the command, ``offstage.load``, and ``load_checkpoint_and_dispatch``, ours and accelerate's.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offstage.stages.units import parse_size
from tests.benchmarks import airllm
from tests.benchmarks.caps import drop_page_cache
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.sides import (
    Setting,
    Side,
    accelerate_side,
    airllm_side,
    in_turn,
    measure_machine,
    offstage_side,
    python_side,
)
from tests.benchmarks.storage import direct_read_bandwidth

CAPS = {"7b": "6GiB"}
BUDGETS = {"7b": ["3GB", "4GB", "5GB"]}
USUAL_CAP, USUAL_BUDGETS = "2GiB", ["800MB", "1GB", "1.2GB"]
OURS = "offstage"
PYTHON_DOORS = ("offstage.load", "offstage.load_checkpoint_and_dispatch")

Sides = Mapping[str, Callable[[], Side]]


def main() -> None:
    """Run the rounds and print one line a side and a summary."""
    run_rounds(_arguments(), prepare=prepare, summarise=summarise, results="results")


def run_rounds(
    arguments: argparse.Namespace,
    *,
    prepare: Callable[[Setting, argparse.Namespace], Sides],
    summarise: Callable[[list[dict[str, Any]]], None],
    results: str,
    write: Callable[[str, Path], Path] = make,
) -> None:
    """Run the rounds of the sides that ``prepare`` returns, keep them in the file ``results``, and ``summarise``.

    ``write`` makes the checkpoint, of a size and in a folder, unless it is there.
    """
    checkpoint = write(arguments.size, arguments.folder / arguments.size)
    work = arguments.folder / "work"
    work.mkdir(exist_ok=True)
    cap = parse_size(arguments.cap or CAPS.get(arguments.size, USUAL_CAP))
    setting = Setting(checkpoint, work, cap, arguments.tokens, arguments.timeout)
    try:
        sides = prepare(setting, arguments)
        rounds: list[dict[str, Any]] = []
        for number in range(arguments.rounds):
            rounds.append(run_round(sides, checkpoint, number, work))
            keep(arguments.folder / f"{results}-{arguments.size}.json", arguments, rounds)
        summarise(rounds)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if arguments.remove:
            shutil.rmtree(checkpoint)


def _arguments() -> argparse.Namespace:
    parser = rounds_parser(str(__doc__), tokens=12)
    parser.add_argument("--budgets", nargs="*", help="accelerate's host budgets; for 7b 3GB 4GB 5GB")
    parser.add_argument("--airllm", metavar="PYTHON", help="the interpreter of an environment with AirLLM")
    parser.add_argument("--doors", action="store_true", help="the functions of the Python API, ours and accelerate's")
    parser.add_argument("--option", action="append", default=[], help="an override for offstage")
    return parser.parse_args()


def rounds_parser(description: str, *, tokens: int) -> argparse.ArgumentParser:
    """Return a parser of what ``run_rounds`` goes by, for a benchmark of this ``description``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--cap", help="the hard memory cap; 6GiB for 7b, else 2GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=tokens)
    parser.add_argument("--timeout", type=float, default=1800, help="seconds that a side may take")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--remove", action="store_true", help="remove the checkpoint afterwards")
    return parser


def prepare(setting: Setting, arguments: argparse.Namespace) -> Sides:
    """Return what runs each side, by the side's name; AirLLM's checkpoint is converted now."""
    budgets = BUDGETS.get(arguments.size, USUAL_BUDGETS) if arguments.budgets is None else arguments.budgets
    sides: dict[str, Callable[[], Side]] = {OURS: partial(offstage_side, setting, arguments.option)}
    for door in PYTHON_DOORS if arguments.doors else ():
        sides[door] = partial(python_side, setting, door)
    for budget in budgets if arguments.doors else ():
        door = "accelerate.load_checkpoint_and_dispatch"
        sides[f"{door} {budget}"] = partial(python_side, setting, door, parse_size(budget))
    for budget in () if arguments.doors else budgets:
        sides[f"accelerate {budget}"] = partial(accelerate_side, setting, parse_size(budget))
    if arguments.airllm:
        folder = setting.work / "airllm"
        seconds = airllm.convert(setting.checkpoint, folder, arguments.airllm)
        say(f"AirLLM converted the checkpoint in {seconds:.1f} s, once, outside the cap")
        sides["AirLLM"] = partial(airllm_side, setting, folder, arguments.airllm)
    return sides


def run_round(
    sides: Sides,
    checkpoint: Path,
    number: int,
    work: Path,
    *,
    bandwidth: Callable[[Path], float] = direct_read_bandwidth,
    also: Mapping[Path, Sequence[str]] = MappingProxyType({}),
) -> dict[str, Any]:
    """Run every side once, with the raw ``bandwidth`` of the checkpoint's files measured before and after.

    What plans go by is measured before, in the folder ``work``: those for other checkpoints that are ``also`` run, with
    options, too.
    """
    measure_machine({checkpoint: (), **also}, work)
    drop_page_cache()
    raw = [bandwidth(checkpoint)]
    by_side = {}
    for name in in_turn([*sides], number):
        drop_page_cache()
        by_side[name] = sides[name]()
        figures = " ".join(f"{key}={value}" for key, value in by_side[name].items() if key not in ("tokens", "answers"))
        say(f"round {number + 1}  {name:42} {figures}")
    drop_page_cache()
    raw.append(bandwidth(checkpoint))
    say(f"round {number + 1}  raw direct reads    {raw[0] / 1e9:.2f} and {raw[1] / 1e9:.2f} GB/s")
    return {"sides": by_side, "raw": raw}


def keep(path: Path, arguments: argparse.Namespace, rounds: object) -> None:
    """Write the rounds so far, with what was asked."""
    asked = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    path.write_text(json.dumps({"asked": asked, "rounds": rounds}, indent=1) + "\n")


def summarise(rounds: list[dict[str, Any]]) -> None:
    """Print medians, the ratios to the other tools, the share of the raw bandwidth, and whether all said the same."""
    medians = {}
    for name in rounds[0]["sides"]:
        lived = [one["sides"][name]["seconds"] for one in rounds if one["sides"][name]["seconds"]]
        medians[name] = statistics.median(lived) if lived else None
        median = f"{medians[name]:.3f} s a token" if lived else "no figure"
        say(f"median  {name:42} {median}, survived {len(lived)} of {len(rounds)} rounds")
    for door in PYTHON_DOORS:
        if medians.get(door) and medians[OURS]:
            say(f"{door} takes {medians[door] / medians[OURS]:.2f} of the command's time")
    for tool in ("accelerate", "AirLLM"):
        best = min((median for name, median in medians.items() if name.startswith(tool) and median), default=None)
        if best and medians[OURS]:
            say(f"offstage is {best / medians[OURS]:.2f} times as fast as {tool} at its best")
    ours = [(one["sides"][OURS], statistics.mean(one["raw"])) for one in rounds if one["sides"][OURS]["seconds"]]
    if ours:
        shares = [side["streamed"] / side["seconds"] / raw for side, raw in ours]
        say(f"offstage streams at {statistics.median(shares):.2f} of the raw direct-read bandwidth")
    said = {tuple(side["tokens"]) for one in rounds for side in one["sides"].values() if side["seconds"]}
    if said:
        say("all gave the same tokens" if len(said) == 1 else f"THE SIDES GAVE {len(said)} DIFFERENT ANSWERS")


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
