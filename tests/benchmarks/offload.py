"""Generating under a hard memory cap: offstage against transformers + accelerate, in turn, page cache dropped.

    python -m tests.benchmarks.offload 1.1b --cap 2GiB --rounds 3

Needs root (a memory cgroup, dropped caches), the extra ``bench``, and room for the checkpoint in ``--folder``. Prints
seconds a token of each side (medians over the rounds), the ratio, and the share of the raw direct-read bandwidth that
was measured before and after each round on the same files.
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

from stages.units import parse_size
from tests.benchmarks.caps import drop_page_cache, run_capped
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.storage import direct_read_bandwidth

PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]

ACCELERATE = """
import json, sys, time, torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
folder, budget, tokens, offload = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
model = AutoModelForCausalLM.from_pretrained(
    folder, dtype="auto", device_map="auto", max_memory={"cpu": budget}, offload_folder=offload)
times = []
class Clock(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)
ids = torch.tensor([json.loads(sys.argv[5])])
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                     do_sample=False, stopping_criteria=StoppingCriteriaList([Clock()]))
print(json.dumps({"seconds": (times[-1] - times[0]) / (len(times) - 1), "tokens": out[0, ids.shape[1]:].tolist()}))
"""


def failure(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the result of a side that died, with the last thing it said."""
    said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    return {"seconds": None, "failed": said[-1][-120:]}


def accelerate_side(folder: Path, work: Path, *, cap: int, budget: int, tokens: int) -> dict[str, Any]:
    """Run transformers + accelerate with a host budget of ``budget`` bytes; seconds a token, or null if it died."""
    spill = work / "accelerate-offload"
    command = [sys.executable, "-c", ACCELERATE, str(folder), str(budget), str(tokens), str(spill), json.dumps(PROMPT)]
    done = run_capped(command, cap, cwd=work)
    shutil.rmtree(spill, ignore_errors=True)
    if done.returncode:
        return failure(done)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def offstage_side(folder: Path, work: Path, *, cap: int, tokens: int, options: list[str]) -> dict[str, Any]:
    """Run offstage with budgets worked out from the cap; what its record says."""
    shutil.rmtree(work / "outputs", ignore_errors=True)
    command = [
        sys.executable, "-c", "from pipeline.app import main; main()", f"model.path={folder}", "max_memory=null",
        f"generate.prompts=[{PROMPT}]", f"generate.max_new_tokens={tokens}", f"generate.min_new_tokens={tokens}",
        *options,
    ]  # fmt: skip
    done = run_capped(command, cap, cwd=work)
    if done.returncode:
        return failure(done)
    record = json.loads(next(work.glob("outputs/runs/*/*/run.json")).read_text())
    metrics = record["metrics"]
    return {
        "seconds": metrics["decode_seconds_per_token"],
        "tokens": record["outputs"][0]["token_ids"],
        "streamed": metrics["streamed_bytes_per_token"],
        "stall": metrics["stall_seconds"],
        "peak": metrics["peak_host_bytes"],
        "budget": record["memory"]["budget"].get("cpu"),
    }


def main() -> None:
    """Run the rounds and print one line a side and a summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--cap", default="2GiB", help="the hard memory cap, e.g. 2GiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=12)
    parser.add_argument("--budgets", nargs="+", default=["600MB", "800MB", "1GB"], help="accelerate's host budgets")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--option", action="append", default=[], help="an override for offstage")
    arguments = parser.parse_args()
    checkpoint = make(arguments.size, arguments.folder / arguments.size)
    work = arguments.folder / "work"
    work.mkdir(exist_ok=True)
    rounds = [run_round(arguments, checkpoint, work, number) for number in range(arguments.rounds)]
    summarise(rounds)


def run_round(arguments: argparse.Namespace, checkpoint: Path, work: Path, number: int) -> dict[str, Any]:
    """Run every side once, with the raw bandwidth measured before and after."""
    cap, tokens = parse_size(arguments.cap), arguments.tokens
    drop_page_cache()
    raw = [direct_read_bandwidth(checkpoint)]
    drop_page_cache()
    sides = {"offstage": offstage_side(checkpoint, work, cap=cap, tokens=tokens, options=arguments.option)}
    for budget in arguments.budgets:
        drop_page_cache()
        side = accelerate_side(checkpoint, work, cap=cap, budget=parse_size(budget), tokens=tokens)
        sides[f"accelerate {budget}"] = side
    drop_page_cache()
    raw.append(direct_read_bandwidth(checkpoint))
    for name, side in sides.items():
        say(f"round {number + 1}  {name:18} " + " ".join(f"{k}={v}" for k, v in side.items() if k != "tokens"))
    say(f"round {number + 1}  raw direct reads    {raw[0] / 1e9:.2f} and {raw[1] / 1e9:.2f} GB/s")
    return {"sides": sides, "raw": sum(raw) / 2}


def summarise(rounds: list[dict[str, Any]]) -> None:
    """Print medians, the ratio to the best of the other side, and the share of the raw bandwidth."""
    names = rounds[0]["sides"]
    seconds = {name: [one["sides"][name]["seconds"] for one in rounds] for name in names}
    medians = {name: statistics.median(s for s in found if s) for name, found in seconds.items() if any(found)}
    for name, median in medians.items():
        survived = sum(map(bool, seconds[name]))
        say(f"median  {name:18} {median:.3f} s a token, survived {survived} of {len(rounds)} rounds")
    others = [median for name, median in medians.items() if name != "offstage"]
    if others and "offstage" in medians:
        say(f"offstage is {min(others) / medians['offstage']:.2f} times as fast as accelerate at its best budget")
    shares = [
        one["sides"]["offstage"]["streamed"] / one["sides"]["offstage"]["seconds"] / one["raw"]
        for one in rounds
        if one["sides"]["offstage"]["seconds"]
    ]
    if shares:
        say(f"offstage streams at {statistics.median(shares):.2f} of the raw direct-read bandwidth")


def say(line: str) -> None:
    """Print one line now."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
