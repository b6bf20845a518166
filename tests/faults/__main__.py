"""Tries faults of the storage by hand: ``nice python -m tests.faults --minutes 50 --seed 1``.

Needs strace, and with ``--short`` a C compiler. Prints what isn't as it must be when it is found, and a table in the
end: call and error against outcomes. ``--json`` keeps every outcome.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

from tests.faults.campaign import FaultOutcome, choose, compile_short_counts, rehearse
from tests.faults.fork_server import ForkServer
from tests.faults.scenarios import SCENARIOS


def main() -> int:
    """Try faults until the time or the number is up; return 1 if anything was wrong."""
    given = _arguments()
    outcomes: list[FaultOutcome] = []
    until = time.monotonic() + 60 * given.minutes
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="offstage-faults-")))
        library = compile_short_counts(root) if given.short else None
        server = stack.enter_context(ForkServer(preload=library))
        rehearsed = rehearse(root, server, given.scenarios, library)
        faults = [fault for fault in choose(rehearsed, given.seed) if given.only in str(fault)]
        say(f"{len(faults)} faults to try; {sum(len(each.calls) for each in rehearsed.values())} calls")
        for fault in faults[given.skip : given.skip + given.number]:
            if time.monotonic() > until:
                break
            outcome = rehearsed[fault.scenario].attempt(fault)
            outcomes.append(outcome)
            if outcome.wrong or given.all:
                say(f"{fault}: {outcome.code} {outcome.stage} {outcome.line!r} {outcome.hit}")
                for wrong in outcome.wrong:
                    say(f"    {wrong}")
            if given.json:
                given.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1, default=str))
    for line in table(outcomes):
        say(line)
    return int(any(each.wrong for each in outcomes))


def table(outcomes: list[FaultOutcome]) -> list[str]:
    """Return the lines of a table: each call and error, how often it was tried, and how the runs ended."""
    rows: dict[tuple[str, str], Counter[str]] = {}
    for each in outcomes:
        ending = "not reached" if not each.hit else "wrong" if each.wrong else f"exit {each.code}"
        rows.setdefault((each.fault.call.name, each.fault.error), Counter())[ending] += 1
    total = sum((count for count in rows.values()), Counter())
    lines = [f"{name:16} {error:11} {_ended(count)}" for (name, error), count in sorted(rows.items())]
    return [*lines, f"{len(outcomes)} faults: {_ended(total)}"]


def _ended(count: Counter[str]) -> str:
    return ", ".join(f"{ending}: {number}" for ending, number in sorted(count.items()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    names = [each.name for each in SCENARIOS]
    parser.add_argument("--minutes", type=float, default=50)
    parser.add_argument("--number", type=int, default=10**6, help="how many to try at most")
    parser.add_argument("--skip", type=int, default=0, help="how many of the seed's order to leave out")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", default="", help="only faults whose description has this in it")
    parser.add_argument("--scenarios", nargs="+", choices=names, default=names)
    parser.add_argument("--short", action="store_true", help="short counts of reads and writes instead of errors")
    parser.add_argument("--all", action="store_true", help="print every outcome")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def say(line: str) -> None:
    """Write one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
