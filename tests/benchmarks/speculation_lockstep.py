"""Guessed tokens of many prompts in lockstep: ``python -m tests.benchmarks.speculation_lockstep --prompts 50``.

For each model, a small one of random weights that stream from disk: so many prompts, every other one with long repeats
(it has in it what the model answers to its end), are answered by the command. Tokens are looked up in what came before
(``prompt_lookup_num_tokens``) or guessed by an assistant, a copy of the model whose weights are a little off; prompts
go one by one or ``--together``. Tokens and their log-probabilities are held against those of each prompt plainly
decoded alone, to the bit. It measures no time; one line for each way, and an exit code of 1 where anything differs.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.offload import say
from tests.e2e.conftest import enter, records_in
from tests.stages.generate.guessed_models import CONFIGS, edited_prompt, random_prompt, save_model

MODELS = ("llama", "qwen3_moe", "t5", "mistral")
PLAIN, LOOKED_UP, ASSISTED = "plain", "looked up", "by an assistant"
RATES = "{storage: 1MB, host: 10GB, host_to_device: 10GB, device: 10GB}"
"""Storage that is slow beside computing, as it is for models of a real size: a pass carries many forwards for free."""


@dataclass(frozen=True, slots=True)
class Side:
    """What the prompts came to in one way: the tokens and log-probabilities of each, and the metrics of all."""

    answers: Sequence[Mapping[str, Any]]
    metrics: Mapping[str, Any]

    @property
    def tokens(self) -> int:
        """How many tokens came of all prompts."""
        return sum(len(answer["token_ids"]) for answer in self.answers)

    def count_same(self, other: Side) -> int:
        """Return how many answers have the tokens and the log-probabilities that they have in ``other``."""
        keys = ("token_ids", "logprobs")
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(all(mine[each] == theirs[each] for each in keys) for mine, theirs in pairs)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a line for each model and way; exit with 1 where an answer differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--together", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=16, help="new tokens for each prompt")
    parser.add_argument("--models", nargs="*", choices=CONFIGS, default=MODELS)
    given = parser.parse_args(arguments)
    say(f"{'':12}{'':22}{'the same':>10}{'tokens':>8}{'passes':>8}{'a pass':>8}{'guessed':>9}{'stood':>7}")
    differing = 0
    for name in given.models:
        with tempfile.TemporaryDirectory() as folder:
            sides = answer(name, Path(folder), given.prompts, together=given.together, tokens=given.tokens)
        for line in table(name, sides):
            say(line)
        differing += sum(given.prompts - side.count_same(sides[PLAIN]) for side in sides.values())
    sys.exit(bool(differing))


def answer(name: str, folder: Path, count: int, *, together: int, tokens: int) -> dict[str, Side]:
    """Return what ``count`` prompts come to with the model ``name``, by the way in which they are answered."""
    return {
        way if size == 1 else f"{way}, {size}": run(folder, *options, f"generate.lockstep={size}")
        for way, options in prepare(name, folder, count, tokens=tokens).items()
        for size in (1, together)
    }


def prepare(name: str, folder: Path, count: int, *, tokens: int) -> dict[str, tuple[str, ...]]:
    """Write the model ``name``, its assistant and ``count`` prompts; return what has them answered in each way."""
    model = save_model(folder, name, torch.float32)
    prompts = [edited_prompt(model, number) if number % 2 else random_prompt(number) for number in range(count)]
    folder.joinpath("prompts.jsonl").write_text("".join(f"{json.dumps(prompt)}\n" for prompt in prompts))
    asked = (
        "model.path=checkpoint", "generate.prompts_file=prompts.jsonl", f"generate.max_new_tokens={tokens}",
        "generate.output_logprobs=true", "generate.exact=true", "device_map=disk", "storage.io=direct", "dtype=float32",
        f"hardware.rates={RATES}",
    )  # fmt: skip
    return {
        PLAIN: asked,
        LOOKED_UP: (*asked, "generate.prompt_lookup_num_tokens=5"),
        ASSISTED: (*asked, f"generate.assistant_model={save_assistant(model, folder)}"),
    }


def save_assistant(model: Any, folder: Path) -> Path:
    """Write an assistant of the ``model``'s opinion, often and not always; return its folder."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.02)
    model.save_pretrained(folder / "assistant")
    return folder / "assistant"


def run(folder: Path, *arguments: str) -> Side:
    """Have the command answer in ``folder``, and return what its record says."""
    before = records_in(folder)
    if enter(folder, *arguments):
        raise RuntimeError("the run failed: see what it said")
    (record,) = [record for path, record in records_in(folder).items() if path not in before]
    return Side(record["outputs"], record["metrics"])


def table(name: str, sides: Mapping[str, Side]) -> Iterator[str]:
    """Yield the line of each side: of how many prompts the answer is the plain one, and tokens a pass."""
    for way, side in sides.items():
        passes = side.metrics.get("passes", side.tokens)
        cells = f"{side.tokens:>8}{passes:>8}{side.tokens / passes:>8.2f}{side.metrics.get('drafted_tokens', '-'):>9}"
        stood = side.metrics.get("draft_acceptance")
        same = f"{side.count_same(sides[PLAIN])} of {len(side.answers)}"
        yield f"{name:12}{way:22}{same:>10}{cells}{'-' if stood is None else f'{stood:.0%}':>7}"


if __name__ == "__main__":
    main()
