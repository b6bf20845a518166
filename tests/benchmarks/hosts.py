"""A model over several hosts beside one: ``python -m tests.benchmarks.hosts 7b --cap 8GiB --hosts 2 --rounds 3``.

In turn, each from a cold page cache: one host under a hard memory cap, which streams what doesn't fit; as many hosts as
are asked for, each under a cap of its own, started by torchrun as on as many machines; and the plain model of
transformers under a cap as large as all of theirs. With ``--network 1gbit`` each host is in a network namespace of its
own, behind a link of that rate (tc's token bucket), and ``--latency 0.0002`` has each message be under way for so many
seconds (by a relay beside the kernel: ``tests.benchmarks.networks``). All share this machine's cores, of which one host
computes at a time. Needs root. Prints seconds a token, measured and predicted, the bytes of tensors between hosts, and
peaks.

    python -m tests.benchmarks.hosts 0.4b --prompts 8 --rounds 3
    python -m tests.benchmarks.hosts 0.4b --prompts 8 --rounds 3 --option max_memory.cpu=300MB

has so many prompts answered, and each host has one core of this machine and no cap: one host beside several, whose
throughput is at best as many times as large as they are many.

    python -m tests.benchmarks.hosts 0.4b --prompts 8 --a-host --rounds 3 --option max_memory.cpu=300MB

gives each host so many prompts: two have sixteen where one has eight, so that what streams is shared by as many.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from offstage.stages.units import format_bytes, parse_size
from tests.benchmarks.caps import cap
from tests.benchmarks.networks import Links, network
from tests.benchmarks.offload import rounds_parser, run_rounds, say
from tests.benchmarks.sides import PROMPT, Setting, Side, accelerate_side, offstage_side

ONE, PLAIN = "one host", "plain model"
_PORT = 29611
_ONE_COMPUTES = {"GOMP_SPINCOUNT": "10000"}
"""Has the threads of a host that waits let the other have the cores, which on machines of their own they needn't."""


def hosts_side(
    setting: Setting, hosts: int, links: Links, options: Sequence[str], *, prompts: int = 1, one_core: bool = False
) -> Side:
    """Run offstage on so many hosts, each capped; return what the first one's record says, and all their peaks.

    They answer so many ``prompts``, the next one longer by a token. With ``one_core`` each host has one, and no cap.
    """
    shutil.rmtree(setting.work / "outputs", ignore_errors=True)
    tokens = [f"generate.max_new_tokens={setting.tokens}", f"generate.min_new_tokens={setting.tokens}"]
    given = [[*PROMPT, *range(20, 20 + more)] for more in range(prompts)]
    asked = [f"model.path={setting.checkpoint}", f"generate.prompts={given}", *tokens, "max_memory={}", *options]
    asked += links.options if hosts > 1 else []
    with ExitStack() as stack:
        inside = stack.enter_context(network(hosts, links))
        started = []
        for host in range(hosts):
            launch = ["--nnodes", str(hosts), "--node-rank", str(host), "--nproc-per-node", "1"]
            launch += ["--master-addr", links.address_of(0), "--master-port", str(_PORT), "--no-python"]
            command = [sys.executable, "-m", "offstage", *asked]
            if not one_core:  # of what runs the model, and not of its launcher
                command = stack.enter_context(cap(setting.cap)).entering(command)
            launch += command
            core = ["taskset", "-c", str(host)] if one_core else []
            command = [*core, *inside[host], sys.executable, "-m", "torch.distributed.run", *launch]
            environment = {**os.environ, **({"OMP_NUM_THREADS": "1"} if one_core else _ONE_COMPUTES)}
            pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
            started.append(subprocess.Popen(command, cwd=setting.work, env=environment, **pipes))
        said = [process.communicate(timeout=setting.timeout_seconds)[1] for process in started]
    if any(process.returncode for process in started):
        own = [line for text in said for line in text.splitlines() if line.startswith("offstage: ")]
        return {"seconds": None, "failed": " ".join(own)[:400] or " ".join(said)[:400]}
    return _side_of(setting.work)


def _side_of(work: Path) -> Side:
    first = json.loads(next(work.glob("outputs/runs/*/*/run.json")).read_text())
    if first.get("hosts"):
        first = json.loads(Path(first["hosts"][0]["record"]).read_text())
    metrics, hosts = first["metrics"], first.get("hosts") or [first]
    peaks = [(host["memory"]["measured"]["cpu"], host["memory"]["predicted"]["cpu"]) for host in hosts]
    return {
        "seconds": metrics["decode_seconds_per_token"],
        "predicted": metrics["predicted_seconds_per_token"],
        "tokens": [token for output in first["outputs"] for token in output["token_ids"]],
        "streamed": sum(host["metrics"]["streamed_bytes_per_token"] for host in hosts),
        "sent": sum(host["metrics"].get("sent_bytes", 0) for host in hosts),
        "peaks": ", ".join(f"{format_bytes(peak)} of {format_bytes(predicted)}" for peak, predicted in peaks),
    }


def prepare(setting: Setting, arguments: argparse.Namespace) -> dict[str, Callable[[], Side]]:
    """Return what runs each side, by the side's name."""
    hosts, links = arguments.hosts, Links(arguments.network, arguments.latency)
    if arguments.prompts > 1:
        several = arguments.prompts * (hosts if arguments.a_host else 1)
        sides = ((ONE, 1, Links(), arguments.prompts), (f"{hosts} hosts", hosts, links, several))
        return {
            name: partial(hosts_side, setting, count, joined, arguments.option, prompts=prompts, one_core=True)
            for name, count, joined, prompts in sides
        }
    whole = Setting(setting.checkpoint, setting.work, setting.cap * hosts, setting.tokens, setting.timeout_seconds)
    return {
        ONE: partial(offstage_side, setting, arguments.option),
        f"{hosts} hosts": partial(hosts_side, setting, hosts, links, arguments.option),
        PLAIN: partial(accelerate_side, whole, setting.cap * hosts),
    }


def summarise(rounds: list[dict[str, Any]]) -> None:
    """Print medians and their ratios, and whether all said the same."""
    medians: dict[str, float] = {}
    for name in rounds[0]["sides"]:
        lived = [one["sides"][name]["seconds"] for one in rounds if one["sides"][name]["seconds"]]
        if lived:
            medians[name] = statistics.median(lived)
        foreseen = _foreseen([one["sides"][name] for one in rounds if one["sides"][name]["seconds"]])
        median = f"{medians.get(name, float('nan')):.4f} s a token"
        say(f"median  {name:14} {median}{foreseen}, survived {len(lived)} of {len(rounds)}")
    several = next(name for name in medians if name.endswith(" hosts"))
    for name in (ONE, PLAIN):
        if name in medians:
            share = medians[several] / medians[name]
            say(f"{several} take {share:.3f} of the time of the {name}: {1 / share:.2f} times the throughput")
    answers = [side["tokens"] for one in rounds for side in one["sides"].values() if side["seconds"]]
    said = {tuple(answer[: min(map(len, answers))]) for answer in answers}  # with --a-host one has more prompts
    say("all gave the same tokens" if len(said) == 1 else f"THE SIDES GAVE {len(said)} DIFFERENT ANSWERS")


def _foreseen(sides: list[Side]) -> str:
    """Return in words what was predicted of ``sides``, and by how much that is less than what they took."""
    predicted = [side["predicted"] for side in sides if "predicted" in side]
    if not predicted:
        return ""
    median = statistics.median(predicted)
    less = 1 - median / statistics.median(side["seconds"] for side in sides)
    return f", {median:.4f} predicted ({abs(less):.0%} too {'low' if less > 0 else 'high'})"


def main() -> None:
    """Run the rounds and print the medians."""
    parser = rounds_parser(str(__doc__), tokens=8)
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--prompts", type=int, default=1, help="answer so many, each host on one core")
    parser.add_argument("--a-host", action="store_true", help="so many --prompts for each host")
    parser.add_argument("--network", metavar="RATE", help="the rate of each host's link, as tc takes it: 1gbit, 10gbit")
    parser.add_argument("--latency", type=float, help="how many seconds each message between hosts is under way")
    parser.add_argument("--option", action="append", default=[], help="an override for offstage")
    arguments = parser.parse_args()
    say(f"{arguments.hosts} hosts of {format_bytes(parse_size(arguments.cap or '2GiB'))}")
    run_rounds(arguments, prepare=prepare, summarise=summarise, results="hosts")


if __name__ == "__main__":
    main()
