"""What hooks cost, and weights on disk where memory is to spare: ``python -m tests.benchmarks.overhead 1.1b``.

In turn, in one process: the plain model; the same model dispatched with everything resident; with half of its weights
served from a map of the checkpoint; and transformers + accelerate with the same device map. Prints medians of seconds a
token and their ratios to the plain model.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.offload import say
from tests.e2e.pipelines import dispatched_model


def seconds_a_token(model: Any, tokens: int) -> float:
    """Return seconds a token of greedy decoding, the prefill left out."""
    ids = torch.tensor([[5, 6, 7, 8]])
    times = []

    def note(*_: Any) -> None:
        times.append(time.perf_counter())

    handle = model.register_forward_hook(note)
    options = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    handle.remove()
    return (times[-1] - times[0]) / (len(times) - 1)


def models(checkpoint: Path, work: Path, share: float) -> dict[str, Any]:
    """Return the models to compare; ``share`` of the weights is resident in those that aren't whole."""
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    for parameter in plain.parameters():  # what from_pretrained maps, the others hold
        parameter.data = parameter.data.clone()
    budget = int(share * sum(parameter.nbytes for parameter in plain.parameters()))
    resident = dispatched_model(checkpoint, work / "resident", max_memory={"cpu": "1TB"})
    options = {"max_memory": {"cpu": str(budget)}, "storage": {"io": "mmap"}, "device_map": "sequential"}
    mapped = dispatched_model(checkpoint, work / "mapped", **options)
    device_map = (work / "mapped" / "cache").glob("plan/*/device_map.json")
    return {"plain": plain, "resident": resident, "mapped": mapped, "accelerate": _theirs(checkpoint, next(device_map))}


def _theirs(checkpoint: Path, device_map: Path) -> Any:
    import json

    placement = json.loads(device_map.read_text())
    folder = device_map.parent / "accelerate"
    return AutoModelForCausalLM.from_pretrained(checkpoint, device_map=placement, offload_folder=folder)


def main() -> None:
    """Run the rounds and print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    arguments = parser.parse_args()
    checkpoint = make(arguments.size, arguments.folder / arguments.size)
    work = arguments.folder / "overhead"
    shutil.rmtree(work, ignore_errors=True)
    measured = models(checkpoint, work, arguments.share)
    seconds: dict[str, list[float]] = {name: [] for name in measured}
    for name, model in measured.items():
        seconds_a_token(model, 3)
        say(f"warm    {name}")
    for _ in range(arguments.rounds):
        for name, model in measured.items():
            seconds[name].append(seconds_a_token(model, arguments.tokens))
    plain = statistics.median(seconds["plain"])
    for name, values in seconds.items():
        median = statistics.median(values)
        say(f"median  {name:10} {median:.4f} s a token, {median / plain:.3f} of the plain model")


if __name__ == "__main__":
    main()
