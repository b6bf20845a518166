"""Every path on a real accelerator: the logits and tokens of the model that lies there whole, bit for bit.

    python -m tests.benchmarks.gpu_paths
    python -m tests.benchmarks.gpu_paths llama mixtral --random 10

A small model of each architecture answers with its weights on the accelerator, with its layers on the host or on disk,
and placed at random over all three. Prints a line an architecture, and each path that answers otherwise or fails; exits
with 1 where there is one.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from tests.benchmarks.offload import say
from tests.benchmarks.sides import SIMULATED, add_simulated, need_accelerator
from tests.e2e.pipelines import dispatched
from tests.e2e.test_equals_transformers import MODELS, auto, save_random
from tests.e2e.test_same_answer import ROWS, padded, random_map
from tests.stages.dispatch.placed_models import tensors_of

LAYERS = {"layers", "h", "block", "blocks"}
"""What the lists of layers are called."""
OPTIONS: Mapping[str, Any] = {"max_new_tokens": 8, "pad_token_id": 0}
ROOM = {0: "2GB", "cpu": "2GB"}


def answers(model: Any, device: torch.device) -> list[torch.Tensor]:
    """Return the logits of one row, and the tokens of it and of a padded batch, greedy and sampled."""
    tokens, mask = (each.to(device) for each in padded())
    one = torch.tensor([ROWS[0]], device=device)
    decoder = {"decoder_input_ids": one[:, :1]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        outputs = [model(input_ids=one, **decoder).logits]
    outputs.append(model.generate(one, attention_mask=torch.ones_like(one), do_sample=False, **OPTIONS))
    outputs.append(model.generate(tokens, attention_mask=mask, do_sample=False, **OPTIONS))
    torch.manual_seed(11)
    outputs.append(model.generate(tokens, attention_mask=mask, do_sample=True, temperature=0.9, top_p=0.9, **OPTIONS))
    return [each.cpu() for each in outputs]


def maps(model: torch.nn.Module, count: int, seed: str) -> Iterator[tuple[str, Any]]:
    """Yield maps by what they are called: so many of them at random."""
    tensors = tensors_of(model)
    yield "resident", 0
    for tier in ("cpu", "disk"):
        yield f"layers on {tier}", {name: 0 if LAYERS.isdisjoint(name.split(".")) else tier for name in tensors}
    chance, first = random.Random(seed), next(iter(tensors.values()))
    begins = {name: 0 for name, tensor in tensors.items() if tensor is first}  # there it computes, and its inputs come
    for number in range(count):
        yield f"random {number}", {**random_map(model, chance, others=(0, "cpu")), **begins}


def faults(name: str, count: int, *, simulated: bool) -> Iterator[str]:
    """Yield what is wrong with each path of the architecture ``name``."""
    device = torch.device("cpu") if simulated else torch.device("cuda", 0)
    machine = {"hardware": SIMULATED} if simulated else {}
    with TemporaryDirectory() as folder:
        checkpoint = Path(folder, name)
        save_random(checkpoint)
        plain = auto(checkpoint).from_pretrained(checkpoint).to(device)
        expected = answers(plain, device)
        for path, placed in maps(plain, count, name):
            options = {"device_map": placed, "max_memory": ROOM, "storage": {"io": "direct"}, **machine}
            live = dispatched(checkpoint, Path(folder, "outputs"), **options)
            try:
                compared = zip(WHAT, answers(live.model, device), expected, strict=True)
                others = [what for what, got, wanted in compared if not torch.equal(got, wanted)]
                if others:
                    yield f"{path}: other {', '.join(others)}"
            except RuntimeError as error:
                yield f"{path}: {type(error).__name__}: {error}"[:300]


WHAT = ("logits", "tokens", "tokens of a batch", "sampled tokens")


def main() -> None:
    """Compare, and print what differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("architectures", nargs="*", default=[*MODELS], metavar="ARCHITECTURE", help=", ".join(MODELS))
    parser.add_argument("--random", type=int, default=3, help="so many placements at random")
    add_simulated(parser)
    given = parser.parse_args()
    need_accelerator(parser, simulated=given.simulated)
    wrong = 0
    for name in given.architectures:
        began, mismatches = time.perf_counter(), list(faults(name, given.random, simulated=given.simulated))
        for fault in mismatches:
            say(f"{name}, {fault}")
        wrong += len(mismatches)
        say(f"{name}: {len(mismatches)} of {3 + given.random} paths differ, {time.perf_counter() - began:.1f} s")
    parser.exit(min(1, wrong))


if __name__ == "__main__":
    main()
