"""Streaming to an accelerator: seconds a token from the host's memory and from disk, beside what the link can do.

    python -m tests.benchmarks.link 1.1b --rounds 3
    python -m tests.benchmarks.link 7b --tiers host

The layers of the model wait on the tier, everything else lies on accelerator 0. Needs an accelerator and room for the
checkpoint in ``--folder``; for the tier disk also the right to drop the page cache. Prints, a round: seconds a token,
the bytes streamed a token, and both as a rate, beside the rate of pinned copies and of direct reads measured in
that round, and beside transformers + accelerate with the same map where that is installed; then medians, shares and
ratios, and whether all sides gave the same tokens.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from offstage.pipeline.kept_memory import WITHOUT_CUDNN_ATTENTION
from offstage.stages.dispatch.transfer.link import pin
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.machine.aligned_memory import private_bytes
from offstage.stages.machine.devices import Devices
from tests.benchmarks.caps import drop_page_cache
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.offload import say
from tests.benchmarks.sides import (
    SIMULATED,
    accelerate_command,
    add_simulated,
    need_accelerator,
    offstage_command,
    record_in,
)
from tests.benchmarks.storage import direct_read_bandwidth

TIERS = {"host": "cpu", "disk": "disk"}
COPY_BYTES, COPIES = 256 * 2**20, 16


def pinned_copy_bandwidth(*, simulated: bool = False) -> float:
    """Return bytes a second of copies from registered host memory to accelerator 0, one after the other."""
    link, memory = open_link(Devices({0: 2 * COPY_BYTES} if simulated else {}), 0), private_bytes(COPY_BYTES)
    unpin = pin(link, memory)
    source = torch.frombuffer(memory, dtype=torch.uint8)
    target, _ = link.memory(COPY_BYTES).lend(0, COPY_BYTES)
    link.copy([(source, target)], after=link.computed())
    link.close()
    began = time.perf_counter()
    for _ in range(COPIES):
        link.copy([(source, target)], after=link.computed())
    link.close()
    seconds = time.perf_counter() - began
    unpin()
    return COPIES * COPY_BYTES / seconds


def device_map(tier: str, work: Path) -> Path:
    """Write a map with a Llama's layers on ``tier`` and the rest on accelerator 0; return its path."""
    resident = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head")
    path = work / f"{tier}.json"
    path.write_text(json.dumps({**dict.fromkeys(resident, 0), "model.layers": TIERS[tier]}))
    return path


def run_theirs(tier: str, checkpoint: Path, work: Path, *, tokens: int) -> dict[str, Any] | None:
    """Run transformers + accelerate with the layers on ``tier``; null where accelerate isn't installed."""
    if importlib.util.find_spec("accelerate") is None:
        return None
    placed, spill = json.loads(device_map(tier, work).read_text()), work / "theirs"
    command = accelerate_command(checkpoint, tokens, {"device_map": placed}, spill=spill, device="cuda")
    same = {**os.environ, WITHOUT_CUDNN_ATTENTION: "1"}  # the kernels of attention that offstage's side has
    done = subprocess.run(command, cwd=work, env=same, capture_output=True, text=True, check=False)
    shutil.rmtree(spill, ignore_errors=True)
    if done.returncode:
        return _failed(done)
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _failed(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    said = done.stderr.strip().splitlines() or [f"exit {done.returncode}"]
    return {"seconds": None, "failed": said[-1][-200:]}


def run_tier(tier: str, checkpoint: Path, work: Path, *, tokens: int, options: list[str]) -> dict[str, Any]:
    """Run offstage with the layers on ``tier``; what its record says."""
    shutil.rmtree(work / "outputs", ignore_errors=True)
    placed = [f"device_map={device_map(tier, work)}", "max_memory=null", *options]
    command = offstage_command(checkpoint, tokens, placed)
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        return _failed(done)
    record = record_in(work)
    metrics = record["metrics"]
    seconds, streamed = metrics["decode_seconds_per_token"], metrics["streamed_bytes_per_token"]
    return {
        "seconds": seconds, "streamed": streamed, "rate": streamed / seconds, "stall": metrics["stall_seconds"],
        "tokens": record["outputs"][0]["token_ids"], "peaks": record["memory"],
    }  # fmt: skip


def run_round(arguments: argparse.Namespace, checkpoint: Path, work: Path, number: int) -> dict[str, Any]:
    """Run each tier once, with the limits of link and storage measured beside it."""
    limits = {"host": pinned_copy_bandwidth(simulated=arguments.simulated)}
    forget = (lambda: None) if arguments.simulated else drop_page_cache
    if "disk" in arguments.tiers:
        forget()
        limits["disk"] = direct_read_bandwidth(checkpoint)
        forget()
    say(f"round {number + 1}  pinned copies       {limits['host'] / 1e9:.2f} GB/s")
    if "disk" in limits:
        say(f"round {number + 1}  raw direct reads    {limits['disk'] / 1e9:.2f} GB/s")
    sides = {}
    for tier in arguments.tiers:
        sides[tier] = side = run_tier(tier, checkpoint, work, tokens=arguments.tokens, options=arguments.option)
        if side["seconds"] is None:
            say(f"round {number + 1}  from {tier:14} failed: {side['failed']}")
            continue
        say(
            f"round {number + 1}  from {tier:14} {side['seconds']:.4f} s a token, {side['streamed'] / 1e9:.2f} GB"
            f" over the link at {side['rate'] / 1e9:.2f} GB/s, stalls {side['stall']:.2f} s"
        )
        for device in ("0", "cpu"):
            predicted, measured = (side["peaks"][kind][device] / 1e9 for kind in ("predicted", "measured"))
            say(f"round {number + 1}  peak of {device:4} {measured:.2f} GB, predicted {predicted:.2f} GB")
        theirs = None if arguments.simulated else run_theirs(tier, checkpoint, work, tokens=arguments.tokens)
        if theirs is not None:
            sides[f"{tier}, accelerate"] = theirs
            same = "the same tokens" if theirs.get("tokens") == side["tokens"] else "other tokens"
            outcome = theirs.get("failed") or f"{theirs['seconds']:.4f} s a token, {same}"
            say(f"round {number + 1}  accelerate from {tier}: {outcome}")
    return {"limits": limits, "sides": sides}


def summarise(rounds: list[dict[str, Any]], tiers: list[str]) -> None:
    """Print each tier's medians, and its share of what bounds it: the link, or the slower of link and storage."""
    for tier in tiers:
        done = [one for one in rounds if one["sides"][tier]["seconds"]]
        if not done:
            continue
        seconds = statistics.median(one["sides"][tier]["seconds"] for one in done)
        bounds = [min(one["limits"]["host"], one["limits"].get(tier, one["limits"]["host"])) for one in done]
        shares = [one["sides"][tier]["rate"] / bound for one, bound in zip(done, bounds, strict=True)]
        say(f"median  from {tier:14} {seconds:.4f} s a token, {statistics.median(shares):.2f} of what bounds it")
        others = (one["sides"].get(f"{tier}, accelerate") for one in done)
        theirs = [other["seconds"] for other in others if other and other["seconds"]]
        if theirs:
            say(f"median  accelerate from {tier}: {statistics.median(theirs) / seconds:.2f} times as long a token")


def main() -> None:
    """Run the rounds and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--tiers", nargs="+", choices=TIERS, default=list(TIERS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    parser.add_argument("--option", action="append", default=[], help="an override for offstage")
    add_simulated(parser)
    arguments = parser.parse_args()
    need_accelerator(parser, ": there is no link to measure", simulated=arguments.simulated)
    machine = [f"hardware.{key}={json.dumps(value)}".replace('"', "") for key, value in SIMULATED.items()]
    arguments.option += machine if arguments.simulated else []
    checkpoint = make(arguments.size, arguments.folder / arguments.size)
    work = arguments.folder / "work"
    work.mkdir(exist_ok=True)
    rounds = [run_round(arguments, checkpoint, work, number) for number in range(arguments.rounds)]
    summarise(rounds, arguments.tiers)


if __name__ == "__main__":
    main()
