"""Exact speculation over many prompts: ``python -m tests.benchmarks.speculation_grid --prompts 50 --models llama``.

For each model and dtype, greedily and sampled: so many prompts with long repeats (each has in it what the model answers
to its end) and as many without. Tokens and their log-probabilities are held against plain decoding's, to the bit. It
measures no time; one line for each setting, and an exit code of 1 where anything differs.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from tests.benchmarks.offload import say
from tests.stages.generate.guessed_models import (
    CONFIGS,
    SAMPLED,
    answer,
    edited_prompt,
    open_streamed,
    random_prompt,
    save_model,
)

SETTINGS = {"greedy": {}, "sampled": SAMPLED}


def main() -> None:
    """Print a line for each model, dtype and way to choose tokens."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=50)
    parser.add_argument("--models", nargs="*", choices=CONFIGS, default=[*CONFIGS])
    parser.add_argument("--dtypes", nargs="*", choices=("float32", "bfloat16"), default=["float32", "bfloat16"])
    arguments = parser.parse_args()
    settings = [(name, dtype) for name in arguments.models for dtype in arguments.dtypes]
    differing = sum(compare(name, getattr(torch, dtype), arguments.prompts) for name, dtype in settings)
    sys.exit(bool(differing))


def compare(name: str, dtype: torch.dtype, count: int) -> int:
    """Print how many answers of the model ``name`` are plain decoding's; return how many aren't."""
    differing = 0
    with tempfile.TemporaryDirectory() as folder:
        plain = save_model(Path(folder), name, dtype)
        prompts = [edited_prompt(plain, number) for number in range(count)]
        prompts += [random_prompt(number) for number in range(count)]
        with open_streamed(Path(folder)) as loaded:
            for way, options in SETTINGS.items():
                pairs = [
                    (answer(loaded.model, ids, **options), answer(loaded.model, ids, guesses=5, **options))
                    for ids in prompts
                ]
                same = sum((one.tokens, one.scores) == (other.tokens, other.scores) for one, other in pairs)
                judged = [other.judged for _, other in pairs]
                counts = {
                    key: sum(getattr(each, key) for each in judged)
                    for key in ("tokens", "passes", "guessed", "accepted")
                }
                say(f"{name:10}{dtype!s:16}{way:9}{same} of {len(pairs)} the same  {counts}")
                differing += len(pairs) - same
    return differing


if __name__ == "__main__":
    main()
