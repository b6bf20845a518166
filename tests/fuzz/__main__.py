"""Runs the fuzzer: ``python -m tests.fuzz --cases N --seed S [--only FORMAT …]``.

Prints, for each format, how many cases came to what, and keeps the input of every fault. The same seed gives the same
cases. Exits 1 where there was a fault.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.fuzz.formats import Format
    from tests.fuzz.workers import Result

NAME = "tests.fuzz"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases that ``arguments`` ask for and return the exit code."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ["HF_HUB_OFFLINE"] = "1"
    from tests.fuzz.catalogue import FORMATS, warm_up

    given = _parser(sorted(FORMATS)).parse_args(arguments)
    chosen = [FORMATS[name] for name in given.only or FORMATS if given.only or _count(FORMATS[name], given)]
    warm_up(chosen)
    faults = 0
    folder = Path(tempfile.mkdtemp(prefix="offstage-fuzz-"))
    try:
        for kind in chosen:
            count = given.cases if given.only else _count(kind, given)
            numbers = [given.case] if given.case is not None else range(count)
            faults += _run(kind, numbers, folder=folder, given=given)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 1 if faults else 0


def _count(kind: Format, given: argparse.Namespace) -> int:
    """Return how many cases of ``kind`` are asked for: of whole commands a share, or none."""
    if not kind.apart:
        return int(given.cases)
    return int(given.cases) // given.share if given.share else 0


def _parser(names: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description="Fuzzes everything that offstage reads.")
    parser.add_argument("--cases", type=int, default=100, help="how many of each format")
    parser.add_argument(
        "--share", type=int, default=20, help="whole commands are tried once in so many cases; 0: never"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=names, metavar="FORMAT", help=f"some of: {', '.join(names)}")
    parser.add_argument("--case", type=int, help="this case alone, and what came of it in full")
    parser.add_argument(
        "--save", type=Path, default=Path(tempfile.gettempdir(), "offstage-fuzz"), help="faults go here"
    )
    return parser


def _run(kind: Format, numbers: Sequence[int], *, folder: Path, given: argparse.Namespace) -> int:
    """Try the cases of one format, say what came of them, and return how many were faults."""
    from tests.fuzz.workers import run_cases

    outcomes: Counter[str] = Counter()
    seen: set[str] = set()
    began, faults, slowest = time.perf_counter(), 0, 0.0
    for result in run_cases(kind, numbers, seed=given.seed, folder=folder):
        outcomes[result.outcome] += 1
        slowest = max(slowest, result.seconds)
        if given.case is not None:
            print(f"{result.case.file}: {result.outcome}: {result.words}")
        if result.is_fault:
            faults += 1
            kept = _keep(result, given.save)
            last = re.sub(r"[0-9]+", "9", result.words.strip().splitlines()[-1] if result.words.strip() else "")[:160]
            if last not in seen:
                print(
                    f"  {result.outcome} in case {result.case.number}, {result.case.file}: {last} ({kept})", flush=True
                )
            seen.add(last)
    tally = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    taken = f"{time.perf_counter() - began:6.1f} s, the slowest {slowest:.1f} s of processor time"
    print(f"{kind.name:18} {outcomes.total():6} cases, {taken}: {tally}", flush=True)
    return faults


def _keep(result: Result, folder: Path) -> Path:
    """Keep the file of a case that was a fault, and what was said."""
    place = folder / result.case.format.replace(" ", "-") / f"{result.case.seed}-{result.case.number}"
    place.mkdir(parents=True, exist_ok=True)
    place.joinpath(Path(result.case.file).name).write_bytes(result.case.content)
    place.joinpath("fault.txt").write_text(f"{result.case.file}: {result.outcome}\n{result.words}\n", errors="replace")
    return place


if __name__ == "__main__":
    sys.exit(main())
