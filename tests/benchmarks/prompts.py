"""Many prompts: the default's answers and speed beside those of one by one, in lockstep and of a batch.

    python -m tests.benchmarks.prompts FOLDER --prompts 240 --budget 60MB
    python -m tests.benchmarks.checkpoints 0.1b FOLDER    # makes such a checkpoint

The checkpoint in FOLDER answers so many prompts of 4 to 40 tokens in bfloat16, greedily, in a process of its own for
each side and placement: with all weights resident, and streaming from storage with ``--budget`` (direct reads, so that
the page cache plays no part). The sides follow each other in every one of ``--rounds``, the first another each time.

A table: tokens a second of all prompts together (of the stage generate, prefill included; medians), and how many of the
answers aren't those of the prompts one by one.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.offload import say
from tests.e2e.conftest import COMMAND

ONE_BY_ONE = "one by one"
SIDES: Mapping[str, tuple[str, ...]] = {
    ONE_BY_ONE: ("generate.lockstep=1",),
    "default": (),
    "8 in lockstep": ("generate.lockstep=8",),
    "batches of 16": ("generate.batch_size=16",),
    "batches, auto": ("generate.batch_size=auto",),
}


@dataclass(frozen=True, slots=True)
class Answered:
    """What a side came to once: its answers' tokens, tokens a second, and how many went together, if any did."""

    answers: Sequence[Sequence[int]]
    rate: float
    together: int | None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run all sides and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a checkpoint")
    parser.add_argument("--prompts", type=int, default=240)
    parser.add_argument("--tokens", type=int, default=16, help="new tokens for each")
    parser.add_argument("--budget", default="60MB", help="what of the weights is in memory where they stream")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sides", nargs="*", default=list(SIDES), choices=list(SIDES))
    given = parser.parse_args(arguments)
    prompts = make_prompts(given.prompts)
    placements = {"resident": (), "streaming": (f"max_memory.cpu={given.budget}", "storage.io=direct")}
    for placement, options in placements.items():
        answers_of: dict[str, list[Answered]] = {side: [] for side in given.sides}
        for number in range(given.rounds):
            turn = number % len(given.sides)
            for side in [*given.sides[turn:], *given.sides[:turn]]:
                answers_of[side].append(answer(given.folder, prompts, given.tokens, (*options, *SIDES[side])))
        for line in table(placement, answers_of):
            say(line)


def make_prompts(count: int) -> list[list[int]]:
    """Return so many prompts of 4 to 40 token ids, the same ones each time."""
    draw = random.Random(11)
    return [[draw.randrange(5, 1000) for _ in range(draw.randint(4, 40))] for _ in range(count)]


def answer(folder: Path, prompts: Sequence[Sequence[int]], tokens: int, options: Sequence[str]) -> Answered:
    """Have the command answer ``prompts``, and return what its record says."""
    with tempfile.TemporaryDirectory() as place:
        file = Path(place, "prompts.jsonl")
        file.write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
        asked = [f"generate.max_new_tokens={tokens}", f"generate.min_new_tokens={tokens}", "dtype=bfloat16"]
        named = [f"model.path={folder.resolve()}", f"generate.prompts_file={file}"]
        subprocess.run([*COMMAND, *named, *asked, *options], cwd=place, check=True, capture_output=True)
        (path,) = Path(place).glob("outputs/runs/*/*/run.json")
        record: dict[str, Any] = json.loads(path.read_text())
    answers = [output["token_ids"] for output in record["outputs"]]
    seconds = next(stage["seconds"] for stage in record["stages"] if stage["name"] == "generate")
    together = record["metrics"].get("lockstep") or record["metrics"].get("batch_size")
    return Answered(answers, sum(map(len, answers)) / seconds, together)


def table(placement: str, runs_by_side: Mapping[str, Sequence[Answered]]) -> Iterator[str]:
    """Yield the lines of one placement: the rates' medians, and the answers that differ from those one by one."""
    alone = runs_by_side[ONE_BY_ONE][0].answers if ONE_BY_ONE in runs_by_side else None
    yield f"{placement:<18}{'tokens/s':>10}{'together':>10}  other answers than one by one"
    for side, runs in runs_by_side.items():
        rate, together = statistics.median(run.rate for run in runs), runs[0].together or ""
        others = "" if alone is None else max(count_others(run.answers, alone) for run in runs)
        yield f"  {side:<16}{rate:>10.1f}{together:>10}  {others} of {len(runs[0].answers)}"


def count_others(answers: Sequence[Sequence[int]], alone: Sequence[Sequence[int]]) -> int:
    """Return how many of ``answers`` aren't those of ``alone``."""
    return sum(list(mine) != list(theirs) for mine, theirs in zip(answers, alone, strict=True))


if __name__ == "__main__":
    main()
