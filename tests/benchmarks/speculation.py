"""Guessed tokens under a hard memory cap: exact and batched speculation, beside plain decoding of the same prompts.

    python -m tests.benchmarks.speculation 1.1b --rounds 3
    python -m tests.benchmarks.speculation 7b --rounds 3 --remove

Needs root (a memory cgroup, dropped caches), the extra ``bench``, and room in ``--folder`` for the checkpoint. Tokens
are looked up in what came before (``prompt_lookup_num_tokens``), as when a text is edited: each prompt holds a text in
which one token in ``--every`` is wrong, and the answer is the text as it should be, so that guesses fall where the
edits are. Random weights would answer something else; so the checkpoint's embeddings and head are arranged
(``checkpoints.make_copying``): each token of the text asks for the next one. All else is as it ever is: every weight is
read and multiplied, and no guess is known to be right before the model has judged it.

Each round runs every side once, cold, the first one another each time, between two measurements of the raw direct-read
bandwidth of the same files. In the end a table: the seconds of a token, how many times as fast as plain decoding that
is, tokens a pass, the guesses that stood, the peak beside the predicted one, whether the tokens are plain decoding's.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.checkpoints import make_copying
from tests.benchmarks.offload import rounds_parser, run_rounds, say
from tests.benchmarks.sides import Setting, Side, offstage_side

TEXT = range(5, 101)
"""The tokens of the text that is edited, in its order."""
_BEGUN = 4
"""So many tokens of its answer stand in a prompt."""
PLAIN = "plain"
Rounds = Sequence[Mapping[str, Any]]


def main() -> None:
    """Run the rounds and print one line a side and a table."""
    run_rounds(_arguments(), prepare=prepare, summarise=show, results="results-speculation", write=write_copying)


def write_copying(size: str, folder: Path) -> Path:
    """Write the checkpoint that goes on with the text, unless it is there; return its folder."""
    return make_copying(size, folder, TEXT)


def _arguments() -> argparse.Namespace:
    parser = rounds_parser(str(__doc__), tokens=32)
    parser.add_argument("--prompts", type=int, default=2, help="how many prompts are answered, one after another")
    parser.add_argument("--every", type=int, default=10, help="one token in so many of a prompt's text is wrong")
    parser.add_argument("--guesses", type=int, default=12, help="the most tokens that are guessed at once")
    parser.add_argument("--option", action="append", default=[], help="an override for all sides")
    return parser.parse_args()


def prepare(setting: Setting, arguments: argparse.Namespace) -> Mapping[str, Callable[[], Side]]:
    """Return what runs each side, by the side's name."""
    prompts = make_prompts(arguments.prompts, every=arguments.every)
    asked = [f"generate.prompts={prompts}", "generate.exact=true", *arguments.option]
    guessing = [*asked, f"generate.prompt_lookup_num_tokens={arguments.guesses}"]
    return {
        PLAIN: partial(offstage_side, setting, asked),
        **{
            mode: partial(offstage_side, setting, [*guessing, f"generate.speculation={mode}"])
            for mode in ("exact", "batched")
        },
    }


def make_prompts(count: int, *, every: int) -> list[list[int]]:
    """Return so many prompts: the text with its mistakes, and of the text without them the first tokens.

    Each begins elsewhere, and has its mistakes elsewhere, ``every`` so many tokens.
    """
    prompts, draw = [], random.Random(7)
    for number in range(count):
        first = len(TEXT) // max(1, count) * number
        text = [*TEXT[first:], *TEXT[:first]]
        wrong = {place: draw.randrange(200, 1000) for place in range(draw.randrange(every), len(text), every)}
        prompts.append([*(wrong.get(place, token) for place, token in enumerate(text)), *text[:_BEGUN]])
    return prompts


def show(rounds: Rounds) -> None:
    """Print the table."""
    for line in table(rounds):
        say(line)


def table(rounds: Rounds) -> Iterator[str]:
    """Yield the lines of the table: medians of the rounds that a side lived through, beside those of plain decoding."""
    titles = ("s a token", "times", "a pass", "stood", "peak", "predicted")
    yield f"{'':<10}{''.join(f'{title:>11}' for title in titles)}  tokens"
    lived = {
        name: [one["sides"][name] for one in rounds if one["sides"][name]["seconds"]] for name in rounds[0]["sides"]
    }
    for name, sides in lived.items():
        if not sides:
            yield f"{name:<10}no figure: {rounds[0]['sides'][name]['failed']}"
            continue
        seconds = _median(sides)
        plainly = lived.get(PLAIN)
        cells = [f"{seconds:.3f}", f"{_median(plainly) / seconds:.2f}" if plainly else "-"]
        cells += [_cell(sides[0], "tokens_per_pass", "{:.2f}"), _cell(sides[0], "draft_acceptance", "{:.0%}")]
        cells += [_cell(sides[0], key, "{:.2f} GB", 1e9) for key in ("peak", "predicted_peak")]
        same = bool(plainly) and all(side["answers"] == plainly[0]["answers"] for side in sides)
        yield f"{name:<10}{''.join(f'{cell:>11}' for cell in cells)}  {'the same' if same else 'OTHERS'}"


def _median(sides: Sequence[Side]) -> float:
    return statistics.median(side["seconds"] for side in sides)


def _cell(side: Side, key: str, shape: str, unit: float = 1) -> str:
    return shape.format(side[key] / unit) if side.get(key) is not None else "-"


if __name__ == "__main__":
    main()
