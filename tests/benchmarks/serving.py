"""Clients at one loaded model: tokens a second where their calls go in lockstep, and where they follow each other.

    python -m tests.benchmarks.serving 1.1b --clients 32 --seconds 600 --cap 2GiB

Each client asks again as soon as it has its answer, of 4 to 40 tokens after a prompt of 4 to 40; now and then one goes
away in the midst. Each side is a process of its own under a hard cap, which holds weights, staging and all caches, with
direct reads. Printed is, of each side: tokens a second, the seconds that an answer took (median, and what nine in ten
were within), how many answers weren't what the same question had before, on either side, and how memory and open files
went from an early tenth of the answers to the last.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import CancelledError
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from offstage.stages.units import parse_size
from tests.benchmarks.caps import run_capped
from tests.benchmarks.predictions import checkpoint_of, say

SIDES = {"queue": 1, "lockstep": 8}
_LEAVE = 20
"""One client in so many goes away after its second token."""


@dataclass(slots=True)
class Served:
    """What one side came to: ``answers`` by question, tokens, seconds of each, and the process's ``usage`` then."""

    tokens: int = 0
    left: int = 0
    seconds: float = 0.0
    took: list[float] = field(default_factory=list)
    answers: dict[int, list[int]] = field(default_factory=dict)
    unlike: int = 0
    usage: list[tuple[int, int]] = field(default_factory=list)


def question(number: int) -> tuple[list[int], int]:
    """Return the prompt of the question ``number``, and how many tokens are asked for."""
    draw = random.Random(number)
    return [draw.randrange(5, 1000) for _ in range(draw.randint(4, 40))], draw.randint(4, 40)


def serve(folder: Path, side: str, clients: int, seconds: float) -> Served:
    """Have so many ``clients`` ask for so many ``seconds``; be the process that answers."""
    import torch

    import offstage

    run, lock, ended = Served(), threading.Lock(), time.monotonic() + seconds
    options: dict[str, Any] = {"storage": {"io": "direct"}, "concurrency": side, "batch_size": SIDES[side]}
    with offstage.load(folder, max_length=96, max_waiting=clients, **options) as loaded:
        model: Any = loaded.model

        def client(place: int) -> None:
            draw = random.Random(place)
            while time.monotonic() < ended:
                number = draw.randrange(200)
                prompt, count = question(number)
                asked = torch.tensor([prompt])
                begun = time.monotonic()
                call = loaded.submit(
                    model.generate, asked, max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
                )
                if draw.randrange(_LEAVE) == 0:
                    time.sleep(1)
                    call.cancel()
                try:
                    tokens = call.result()[0, len(prompt) :].tolist()
                except CancelledError:
                    with lock:
                        run.left += 1
                    continue
                with lock:
                    note(run, number, tokens, time.monotonic() - begun)

        began = time.monotonic()
        threads = [threading.Thread(target=client, args=(place,)) for place in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        run.seconds = time.monotonic() - began
    return run


def note(run: Served, number: int, tokens: list[int], took: float) -> None:
    """Count one answer: it is to be what the same question had before."""
    run.tokens += len(tokens)
    run.took.append(took)
    run.unlike += run.answers.setdefault(number, tokens) != tokens
    status = Path("/proc/self/status").read_text()
    (resident,) = (int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("RssAnon"))
    run.usage.append((resident, sum(1 for _ in Path("/proc/self/fd").iterdir())))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a checkpoint's folder, or one to make, such as 1.1b")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=600, help="of each side")
    parser.add_argument("--cap", default="2GiB")
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    parser.add_argument("--be", choices=list(SIDES), help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    folder = checkpoint_of(given.model, given.folder)
    if given.be:
        return say(json.dumps(asdict(serve(folder, given.be, given.clients, given.seconds))))
    answers: dict[int, list[int]] = {}
    for side in given.sides:
        run = _apart(side, given, folder)
        unlike = run.unlike + sum(answers.setdefault(int(key), one) != one for key, one in run.answers.items())
        say(line(side, run, unlike))
    return None


def _apart(side: str, given: argparse.Namespace, folder: Path) -> Served:
    command = [sys.executable, "-m", "tests.benchmarks.serving", str(folder), "--be", side]
    command += ["--clients", str(given.clients), "--seconds", str(given.seconds)]
    done = run_capped(command, parse_size(given.cap), cwd=Path.cwd())
    if done.returncode:
        raise SystemExit(f"{side}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return Served(**json.loads(done.stdout.splitlines()[-1]))


def line(side: str, run: Served, unlike: int) -> str:
    """Return the table's row."""
    tenth = max(1, len(run.usage) // 10)
    resident, files = map(max, zip(*run.usage[tenth : 2 * tenth], strict=True))
    resident_late, files_late = map(max, zip(*run.usage[-tenth:], strict=True))
    took = sorted(run.took)
    return (
        f"{side:9} {run.tokens / run.seconds:7.2f} tokens a second; an answer {statistics.median(took):6.1f} s, "
        f"{took[int(len(took) * 0.9)]:6.1f} s; {len(took)} answers, {unlike} unlike, {run.left} clients left; memory "
        f"{resident / 1e6:.0f} to {resident_late / 1e6:.0f} MB, files {files} to {files_late}"
    )


if __name__ == "__main__":
    main()
