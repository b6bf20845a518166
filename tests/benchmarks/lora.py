"""LoRA through streamed weights under a hard memory cap: what a step takes, reads, and holds.

    python -m tests.benchmarks.lora 1.1b
    python -m tests.benchmarks.lora 1.1b --cap 2GiB --budget 500MB --checkpointing --cpu-offload 1

Needs root (a memory cgroup, dropped caches) and peft. Adapters of rank 8 on ``q_proj`` and ``v_proj`` learn a few steps
of AdamW on random tokens, in a process under the cap; the frozen weights are streamed from disk within ``--budget``.
Each step is told with what was read for its forward and its backward; in the end the peak of the cgroup, which counts
page cache too, and the rate of raw direct reads of the same files before and after.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from offstage.stages.units import parse_size
from tests.benchmarks.caps import cap, drop_page_cache
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.storage import direct_read_bandwidth

STEPS = """
import json, resource, sys, time
from contextlib import nullcontext
import torch
import offstage
from peft import LoraConfig, get_peft_model
folder, work, budget, steps, length, checkpointing, ratio = sys.argv[1:]
began = time.perf_counter()
loaded = offstage.load(folder, cache=work, max_memory={"cpu": int(budget)}, storage={"io": "direct"})
torch.manual_seed(0)
model = get_peft_model(loaded.model, LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
model.train()
if checkpointing == "True":
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
optimiser = torch.optim.AdamW(learning, lr=1e-3)
tokens = torch.randint(100, 30_000, (1, int(length)))
offload = offstage.CPUOffload(float(ratio), target="disk", folder=work) if float(ratio) else nullcontext()
print(json.dumps({"load": time.perf_counter() - began, "learning": sum(p.numel() for p in learning)}), flush=True)
for _ in range(int(steps)):
    marks = [(time.perf_counter(), loaded.traffic.storage_bytes, loaded.traffic.stall_seconds)]
    def mark():
        marks.append((time.perf_counter(), loaded.traffic.storage_bytes, loaded.traffic.stall_seconds))
    optimiser.zero_grad()
    with offload:
        loss = model(input_ids=tokens, labels=tokens).loss
    mark()
    loss.backward()
    mark()
    optimiser.step()
    mark()
    forward, backward, update = ([b - a for a, b in zip(*pair)] for pair in zip(marks, marks[1:]))
    print(json.dumps({
        "loss": float(loss.detach()), "forward": forward, "backward": backward, "seconds": marks[-1][0] - marks[0][0],
        "overflow": loaded.traffic.overflow_bytes, "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }), flush=True)
"""
"""What runs under the cap; prints one line of JSON once it has loaded, and one a step."""

PEAKS = ("memory.max_usage_in_bytes", "memory.peak")
"""What a cgroup held at most, in versions 1 and 2."""


def main() -> None:
    """Run the steps and print what each took."""
    arguments = _arguments()
    checkpoint = make(arguments.size, arguments.folder / arguments.size)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as work:
        drop_page_cache()
        before = direct_read_bandwidth(checkpoint)
        drop_page_cache()
        given = (checkpoint, work, parse_size(arguments.budget), arguments.steps, arguments.length)
        options = (arguments.checkpointing, arguments.cpu_offload)
        run(
            [sys.executable, "-c", STEPS, *map(str, (*given, *options))],
            parse_size(arguments.cap),
            weights=sum(file.stat().st_size for file in checkpoint.glob("*.safetensors")),
        )
        drop_page_cache()
        after = direct_read_bandwidth(checkpoint)
    say(f"raw direct reads {before / 1e9:.2f} and {after / 1e9:.2f} GB/s")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--cap", default="3GiB", help="the hard memory cap")
    parser.add_argument("--budget", default="1GB", help="the bytes of weights that the host may hold")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--length", type=int, default=128, help="tokens a step")
    parser.add_argument("--checkpointing", action="store_true", help="compute activations again in the backward")
    parser.add_argument("--cpu-offload", type=float, default=0, metavar="RATIO", help="of activations, to disk")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    return parser.parse_args()


def run(command: list[str], limit_bytes: int, *, weights: int) -> None:
    """Run ``command`` under a cap and print what it says, and the most that its cgroup held."""
    with cap(limit_bytes) as group:
        process = subprocess.Popen(group.entering(command), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        for line in process.stdout:
            tell(json.loads(line))
        code = process.wait()
        peak = next(int((group.folder / name).read_text()) for name in PEAKS if (group.folder / name).exists())
    say(f"exit {code}; the cgroup held at most {peak / 2**20:.0f} MiB of {limit_bytes / 2**20:.0f}")
    say(f"the checkpoint has {weights / 2**20:.0f} MiB")


def tell(said: dict[str, Any]) -> None:
    """Print what the process under the cap said of its load or of a step."""
    if "load" in said:
        say(f"loaded in {said['load']:.1f} s; {said['learning']} numbers learn")
        return
    halves = []
    for half in ("forward", "backward"):
        seconds, read, stall = said[half]
        halves.append(f"{half} {seconds:.2f} s, {read / 1e6:.0f} MB read, {stall:.2f} s waited")
    memory = f"overflow {said['overflow']} B, {said['rss'] / 2**20:.0f} MiB resident at most"
    say(f"step {said['seconds']:.2f} s  {'; '.join(halves)}; loss {said['loss']:.6f}; {memory}")


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
