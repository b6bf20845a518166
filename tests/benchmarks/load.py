"""Loading a checkpoint onto the host: offstage against ``from_pretrained`` with the same map, in turn.

    python -m tests.benchmarks.load 1.1b --rounds 3
    python -m tests.benchmarks.load 7b --rounds 1 --remove

Needs root (dropped page cache) and room for the checkpoint in ``--folder``. Each round loads cold (page cache dropped)
and warm (all files read before), each side in a fresh process. Two limits are measured in each round: the raw direct-
read bandwidth of the same files, before and after the cold loads, and the bandwidth at which as much memory is touched
for the first time, which is what a virtual machine may be slow at whose host takes back free memory. Warm is left out
where the files and the weights don't fit in memory together.

``from_pretrained`` returns with weights that are only mapped: nothing of them is in memory until something computes,
and then it is the page cache's, which the system may drop and read again. So it is measured twice: ``touched``, until
every page of every weight was read; ``owned``, until each weight was copied into memory of the process's own, which
is what offstage's weights are in when it returns. ``returned`` is when ``from_pretrained`` itself was done. All seconds
include building the model, not the imports; offstage's ``load`` is the reading alone, to hold against the raw one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil

from tests.benchmarks.caps import drop_page_cache
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.storage import direct_read_bandwidth

METER = """
import json, sys, threading, time, torch, transformers
from pathlib import Path
transformers.LlamaForCausalLM  # imported here: transformers imports its parts when they are first named
def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon"))
done, peak, base = threading.Event(), [0], anonymous()
def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], anonymous())
def digest(model):
    return sum(int(p.detach().view(-1).view(torch.int16).sum(dtype=torch.int64)) for p in model.parameters())
def finish(model, **seconds):
    done.set()
    watcher.join()
    print(json.dumps({**seconds, "peak": peak[0] - base, "digest": digest(model)}))
watcher = threading.Thread(target=watch)
folder = sys.argv[1]
"""

OFFSTAGE = (
    METER
    + """
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.shard_load import load_checkpoint_in_model
watcher.start()
began = time.perf_counter()
config = transformers.AutoConfig.from_pretrained(folder)
with init_empty_weights():
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=config.dtype)
model.tie_weights()
built = time.perf_counter()
load_checkpoint_in_model(model, folder, device_map={"": "cpu"})
loaded = time.perf_counter()
finish(model, seconds=loaded - began, load=loaded - built)
"""
)

TRANSFORMERS = (
    METER
    + """
watcher.start()
began = time.perf_counter()
model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", device_map={"": "cpu"})
returned = time.perf_counter()
for parameter in model.parameters():
    MAKE_RESIDENT
finish(model, seconds=time.perf_counter() - began, returned=returned - began)
"""
)

TOUCH = """
import mmap, sys, time
from concurrent.futures import ThreadPoolExecutor
import numpy as np
size, chunk = int(sys.argv[1]) // 2**23 * 2**23, 2**23
memory = np.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)
def touch(begin):
    memory[begin : begin + chunk : 4096] = 1
time.sleep(6)  # as long as a side imports: until then, what was freed last is still at hand
began = time.perf_counter()
with ThreadPoolExecutor(4) as pool:
    list(pool.map(touch, range(0, size, chunk)))
print(size / (time.perf_counter() - began))
"""

SIDES = {
    "offstage": OFFSTAGE,
    "touched": TRANSFORMERS.replace("MAKE_RESIDENT", "parameter.view(-1).view(torch.uint8)[::4096].sum()"),
    "owned": TRANSFORMERS.replace("MAKE_RESIDENT", "parameter.data = parameter.data.clone()"),
}
"""What runs in a process of its own; ``touched`` and ``owned`` are ``from_pretrained``, made resident either way."""


def main() -> None:
    """Run the rounds and print one line a side and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--remove", action="store_true", help="remove the checkpoint afterwards")
    arguments = parser.parse_args()
    checkpoint = make(arguments.size, arguments.folder / arguments.size)
    try:
        rounds = [run_round(checkpoint, number) for number in range(arguments.rounds)]
        summarise(rounds, size_of(checkpoint))
    finally:
        if arguments.remove:
            shutil.rmtree(checkpoint)


def run_round(checkpoint: Path, number: int) -> dict[str, Any]:
    """Load with every side cold and, where memory allows, warm; the sides begin in turn."""
    order = list(SIDES) if number % 2 == 0 else list(reversed(SIDES))
    raw = [raw_bandwidth(checkpoint)]
    cold = {name: run_side(name, checkpoint, warm=False) for name in order}
    raw.append(raw_bandwidth(checkpoint))
    touched = touch_bandwidth(size_of(checkpoint))
    fits = 2.2 * size_of(checkpoint) < psutil.virtual_memory().available
    warm = {name: run_side(name, checkpoint, warm=True) for name in order} if fits else {}
    for state, sides in (("cold", cold), ("warm", warm)):
        for name, side in sides.items():
            say(f"round {number + 1}  {state}  {name:9}" + describe(side, size_of(checkpoint)))
    say(f"round {number + 1}  raw direct reads  {raw[0] / 1e9:.2f} and {raw[1] / 1e9:.2f} GB/s")
    say(f"round {number + 1}  first touch of as much memory  {touched / 1e9:.2f} GB/s")
    return {"cold": cold, "warm": warm, "raw": sum(raw) / 2}


def run_side(name: str, checkpoint: Path, *, warm: bool) -> dict[str, Any]:
    """Run one side in a process of its own; what it printed."""
    drop_page_cache()
    for file in checkpoint.glob("*.safetensors") if warm else ():
        with file.open("rb") as stream:
            while stream.read(2**24):
                pass
    command = [sys.executable, "-c", SIDES[name], str(checkpoint)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{name} failed: {done.stderr.strip()[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def raw_bandwidth(checkpoint: Path) -> float:
    """Return the bytes a second that the storage gives now, the page cache dropped."""
    drop_page_cache()
    return direct_read_bandwidth(checkpoint)


def touch_bandwidth(size: int) -> float:
    """Return the bytes a second at which ``size`` bytes of memory are touched for the first time, by four threads."""
    drop_page_cache()
    done = subprocess.run([sys.executable, "-c", TOUCH, str(size)], capture_output=True, text=True, check=True)
    return float(done.stdout)


def size_of(checkpoint: Path) -> int:
    """Return the bytes of the weights' files."""
    return sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))


def describe(side: dict[str, Any], size: int) -> str:
    """Return one side's figures as one line."""
    parts = [f"{key} {side[key]:.2f} s" for key in ("seconds", "returned", "load") if key in side]
    return f"  {', '.join(parts)}, {size / side['seconds'] / 1e9:.2f} GB/s, peak {side['peak'] / 1e9:.2f} GB"


def summarise(rounds: list[dict[str, Any]], size: int) -> None:
    """Print the ratios of the medians, offstage's share of the raw bandwidth, and whether all sides loaded the same."""
    for state in ("cold", "warm"):
        sides = [one[state] for one in rounds if one[state]]
        if not sides:
            say(f"{state}: left out, the files and the weights don't fit in memory together")
            continue
        ours = statistics.median(one["offstage"]["seconds"] for one in sides)
        for until in ("touched", "owned"):
            theirs = statistics.median(one[until]["seconds"] for one in sides)
            say(
                f"{state}: median {ours:.2f} s, from_pretrained until {until} {theirs:.2f} s: "
                f"offstage is {theirs / ours:.2f} times as fast"
            )
    shares = [size / one["cold"]["offstage"]["load"] / one["raw"] for one in rounds]
    say(f"offstage loads cold at {statistics.median(shares):.2f} of the raw direct-read bandwidth")
    digests = {side["digest"] for one in rounds for state in ("cold", "warm") for side in one[state].values()}
    say("all loaded the same values" if len(digests) == 1 else "THE SIDES LOADED DIFFERENT VALUES")


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
