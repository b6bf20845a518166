"""Long prompts and batches beside the plain model, all in memory: ``python -m tests.benchmarks.long_prompts 0.4b``.

Each side has a process of its own, in turn: what a process's allocator is told holds for all in it. Prints medians of
the seconds to the first token and of those of each later one, and what a process held at its peak.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.offload import say

SIDES = ("plain", "offstage")


def measure(side: str, checkpoint: Path, dtype: str, shape: tuple[int, int], tokens: int) -> dict[str, float]:
    """Return seconds to the first token and of each later one, and the peak in bytes, of this process."""
    model = _model(side, checkpoint, dtype)
    ids = torch.randint(5, 95, shape, generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {
        "min_new_tokens": tokens,
        "max_new_tokens": tokens,
        "do_sample": False,
        "pad_token_id": 0,
    }
    for _ in range(2):  # kernels are compiled in the first
        times = [time.perf_counter()]

        def note(*_: object, times: list[float] = times) -> None:
            times.append(time.perf_counter())

        handle = model.register_forward_hook(note)
        model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        handle.remove()
    begun, first, *later = times
    spans = [after - before for before, after in zip([first, *later], later, strict=False)]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"first": first - begun, "token": statistics.median(spans), "peak": peak}


def _model(side: str, checkpoint: Path, dtype: str) -> Any:
    if side == "plain":
        from transformers import AutoModelForCausalLM

        return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=getattr(torch, dtype)).eval()
    import offstage

    return offstage.load(checkpoint, dtype=dtype, cache=checkpoint.parent / "long-prompts").model


def main() -> None:
    """Run the rounds and print the medians; or be one side, and print what it took."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--prompts", nargs="+", default=["1x512", "1x1500", "4x64"], metavar="SEQUENCESxLENGTH")
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    given = parser.parse_args()
    checkpoint = make(given.size, given.folder / given.size)
    if given.side:
        ((sequences, length),) = (map(int, prompt.split("x")) for prompt in given.prompts)
        say(json.dumps(measure(given.side, checkpoint, given.dtypes[0], (sequences, length), given.tokens)))
        return
    for dtype in given.dtypes:
        for prompt in given.prompts:
            asked = [given.size, "--folder", str(given.folder), "--tokens", str(given.tokens)]
            asked += ["--dtypes", dtype, "--prompts", prompt, "--side"]
            rounds = [[_other_process([*asked, side]) for side in SIDES] for _ in range(given.rounds)]
            sides = [
                {name: statistics.median(one[name] for one in of_side) for name in ("first", "token", "peak")}
                for of_side in zip(*rounds, strict=True)
            ]
            for side, taken in zip(SIDES, sides, strict=True):
                seconds = f"first {taken['first']:.3f} s, a token {taken['token'] * 1e3:.1f} ms"
                say(f"{dtype:9} {prompt:>7} {side:9} {seconds}, peak {taken['peak'] / 1e9:.2f} GB")


def _other_process(asked: list[str]) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.long_prompts", *asked]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    figures: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return figures


if __name__ == "__main__":
    main()
