"""What the staging memory buys: the share of the time that forwards wait for weights, against its size.

    python -m tests.benchmarks.reserves 1.1b --rounds 3

Where the host computes, staging is what the plan leaves of ``max_memory.cpu`` beside the resident weights, and at least
the reserve. So with an explicit device map the streamed tensors stay the same while the budget grows by what staging is
to grow. Two such maps, each with about half of the decoder's bytes on disk: in ``last`` they are the last half of the
layers, as a sequential map has it, so that the storage idles while the first half computes unless there is memory to
read ahead into; in ``spread`` they are the gate and up projections of every layer. Staging grows from the reserve to a
whole pass, beyond which there is nothing to read ahead.

Reads are direct, no cap is set, and the settings run in turn, each round beginning with another. The table has medians.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offstage.stages.units import format_bytes, parse_size
from tests.benchmarks.caps import drop_page_cache
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.offload import say
from tests.benchmarks.sides import artifact, offstage_plan, offstage_record

SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
SECONDS, STALLED = "decode_seconds_per_token", "stall_seconds_per_token"
STREAMED, SPEED = "streamed_bytes_per_token", "streamed_bytes_per_second"
STAGING = "staging_bytes"

DeviceMap = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Case:
    """One setting: the ``layout`` of the streamed tensors, its device map in a file, budget and staging in bytes."""

    layout: str
    device_map: Path
    budget: int
    staging: int

    @property
    def options(self) -> list[str]:
        """The overrides that make it so."""
        return [f"device_map={self.device_map}", f"max_memory={{cpu: {self.budget}}}", "storage.io=direct"]


def layouts(layers: int) -> dict[str, DeviceMap]:
    """Return the device maps by name, for a Llama of ``layers`` layers."""
    resident = {"": "cpu"}
    last = {f"model.layers.{number}": "disk" for number in range(layers // 2, layers)}
    spread = {f"model.layers.{number}.mlp.{name}_proj": "disk" for number in range(layers) for name in ("gate", "up")}
    return {"last": resident | last, "spread": resident | spread}


def cases(checkpoint: Path, work: Path, layout: str, *, device_map: DeviceMap, sizes: Sequence[int]) -> list[Case]:
    """Return the settings of one layout: staging of ``sizes`` bytes, or from its reserve to a whole pass."""
    path = work / f"{layout}.json"
    path.write_text(json.dumps(device_map))
    plan = offstage_plan(checkpoint, work / "plan", [f"device_map={path}", "max_memory={cpu: 1TB}"])
    resident, reserve = plan["devices"]["cpu"]["weights"], plan["devices"]["cpu"]["reserve"]
    streamed = plan["devices"]["disk"]["weights"]
    chosen = sizes or sorted({max(reserve, round(share * streamed)) for share in SHARES})
    return [Case(layout, path, resident + size, size) for size in chosen]


def measure(case: Case, checkpoint: Path, work: Path, tokens: int) -> dict[str, Any]:
    """Return the figures of one run, and the staging bytes that it was given."""
    drop_page_cache()
    record = offstage_record(checkpoint, work / "run", tokens=tokens, options=case.options)
    figures = {name: record["metrics"][name] for name in (SECONDS, STALLED, STREAMED, SPEED)}
    return figures | {STAGING: artifact(record, "dispatch", "dispatch.json")[STAGING]}


def run_rounds(settings: Sequence[Case], checkpoint: Path, work: Path, *, rounds: int, tokens: int) -> list[list[Any]]:
    """Return the figures of each setting, a list a setting."""
    runs_by_setting: list[list[Any]] = [[] for _ in settings]
    for number in range(rounds):
        first = number * len(settings) // rounds
        for index in [*range(first, len(settings)), *range(first)]:
            runs_by_setting[index].append(measure(settings[index], checkpoint, work, tokens))
            seconds = runs_by_setting[index][-1][SECONDS]
            staging = format_bytes(settings[index].staging)
            say(f"round {number + 1}  {settings[index].layout:7} {staging:>10} {seconds:.3f} s a token")
    return runs_by_setting


def table(settings: Sequence[Case], runs_by_setting: Sequence[Sequence[Any]]) -> list[str]:
    """Return the lines of the table of medians."""
    lines = ["layout      staging  streamed a token  s a token  stalled s a token  stall share  GB/s"]
    for case, runs in zip(settings, runs_by_setting, strict=True):
        median = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        share = statistics.median(run[STALLED] / run[SECONDS] for run in runs)
        lines.append(
            f"{case.layout:7} {format_bytes(int(median[STAGING])):>11}  {format_bytes(int(median[STREAMED])):>16}  "
            f"{median[SECONDS]:9.3f}  {median[STALLED]:17.3f}  {share:11.0%}  {median[SPEED] / 1e9:4.2f}"
        )
    return lines


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=9)
    parser.add_argument("--staging", nargs="*", default=[], help="its sizes; else from the reserve to a whole pass")
    parser.add_argument("--layouts", nargs="+", default=["last", "spread"], choices=["last", "spread"])
    parser.add_argument("--checkpoint", type=Path, help="a folder with the checkpoint; made in --folder if not given")
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    arguments = parser.parse_args()
    checkpoint = arguments.checkpoint or make(arguments.size, arguments.folder / arguments.size)
    work = (arguments.folder / "reserves").resolve()
    work.mkdir(parents=True, exist_ok=True)
    maps = layouts(SHAPES[arguments.size]["num_hidden_layers"])
    sizes = [parse_size(size) for size in arguments.staging]
    settings = [
        case
        for layout in arguments.layouts
        for case in cases(checkpoint.resolve(), work, layout, device_map=maps[layout], sizes=sizes)
    ]
    runs_by_setting = run_rounds(settings, checkpoint.resolve(), work, rounds=arguments.rounds, tokens=arguments.tokens)
    shutil.rmtree(work)
    for line in table(settings, runs_by_setting):
        say(line)


if __name__ == "__main__":
    main()
