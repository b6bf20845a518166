"""Weights that rest packed, beside the same that don't, under a hard memory cap and with storage of several speeds.

    python -m tests.benchmarks.codec 1.1b lossless --rounds 3 --plot lossless.png
    python -m tests.benchmarks.codec 1.1b fp8 --rounds 3
    python -m tests.benchmarks.codec 1.1b mxfp4 --rounds 3
    python -m tests.benchmarks.codec 1.1b gguf --rounds 3
    python -m tests.benchmarks.codec 1.1b lossless --json /tmp/offstage-bench/results-codec-lossless-1.1b.json

Needs root (memory and block-io cgroups, dropped caches), the extra ``bench``, and room in ``--folder``: for a
checkpoint of bfloat16, the packed one beside it, and the unpacked twin of a quantised one, which transformers' own
unpacking made.

``lossless`` runs one checkpoint with ``storage.codec`` none and zstd, with the storage limited to each of ``--rates``
in turn, ``full`` as it is (``tests/benchmarks/throttle.py``). At each rate the first run with zstd packs, and is told
apart: what it takes longer than later ones, and after how many tokens that is made good. Other kinds run the packed
checkpoint, its twin, and transformers + accelerate with the packed one and the same cap, which unpacks it as a whole.

Each round runs every side once, cold, the first one another each time, between two measurements of raw direct reads
at the same limit. In the end a table: the medians of seconds a token, bytes streamed for one and the peak, each beside
what was predicted; how many times as fast as unpacked; where packing stops to pay, as predicted and as measured, and as
plans have it for storage of rates that this machine hasn't; how fast weights are packed and unpacked by themselves. The
rounds stay in ``--folder`` as JSON; with ``--json`` they are read from there and nothing runs.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from offstage.stages.units import DTYPE_BYTES, parse_size
from tests.benchmarks.caps import drop_page_cache
from tests.benchmarks.checkpoints import make
from tests.benchmarks.codec_speeds import forecasts, speeds
from tests.benchmarks.codec_table import BASE, FULL, LOSSLESS, PACKED, THEIRS, lines, points
from tests.benchmarks.offload import keep, rounds_parser, run_round, say
from tests.benchmarks.packed_checkpoints import KINDS as PACKED_KINDS, make_pair
from tests.benchmarks.sides import Setting, Side, accelerate_side, offstage_side
from tests.benchmarks.throttle import throttled

Sides = Mapping[str, Callable[[], Side]]
KINDS = (LOSSLESS, *PACKED_KINDS)
CAPS = {LOSSLESS: "2GiB"}
USUAL_CAP = "1GiB"
RATES = {LOSSLESS: ["200MB", "500MB", "1GB", FULL]}
BUDGETS = ["200MB", "300MB", "400MB"]
"""Accelerate's host budgets: the process itself and a layer on its way need the rest of the cap."""
RAW_SECONDS = 2
_RAW = "import sys; from pathlib import Path; from tests.benchmarks.storage import direct_read_bandwidth as raw; "
_RAW += "print(raw(Path(sys.argv[1]), most_bytes=int(sys.argv[2])))"
_MOST_RAW = 3 * 10**9


def main() -> None:
    """Run the rounds at each rate, or read those of an earlier time, and print the table."""
    arguments = _arguments()
    by_rate = json.loads(arguments.json.read_text())["rounds"] if arguments.json else measure(arguments)
    for line in lines(by_rate, arguments.kind):
        say(line)
    if arguments.plot:
        from tests.benchmarks.codec_plot import draw

        draw(points(by_rate), arguments.plot)


def _arguments() -> argparse.Namespace:
    parser = rounds_parser(str(__doc__), tokens=8)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("--rates", nargs="*", help=f"what the storage gives a second, or {FULL}")
    parser.add_argument("--budgets", nargs="*", default=BUDGETS, help="accelerate's host budgets")
    parser.add_argument("--option", action="append", default=[], help="an override for offstage")
    parser.add_argument("--json", type=Path, help="rounds that an earlier time has kept: nothing runs")
    parser.add_argument("--plot", type=Path, help="a .png to draw seconds a token against the storage's rate into")
    return parser.parse_args()


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the rounds at each rate and return them by it, with the first run that packed; kept as they come."""
    kind, folder = arguments.kind, arguments.folder
    work = folder / "work"
    work.mkdir(parents=True, exist_ok=True)
    packed, twin = checkpoints(kind, arguments.size, folder)
    cap = parse_size(arguments.cap or CAPS.get(kind, USUAL_CAP))
    measured: dict[str, Any] = {}
    try:
        for name in arguments.rates or RATES.get(kind, [FULL]):
            rate = None if name == FULL else parse_size(name)
            setting = Setting(packed, work, cap, arguments.tokens, arguments.timeout, rate)
            measured[name] = {"rate": rate, "rounds": []}
            sides = prepare(kind, setting, twin, arguments)
            if kind == LOSSLESS:
                measured[name]["first"] = first_run(setting, sides)
            raw = partial(raw_bandwidth, rate=rate)
            also = {} if kind == LOSSLESS else {packed: options_of(kind, setting, arguments.option)[1]}
            for number in range(arguments.rounds):
                measured[name]["rounds"].append(run_round(sides, twin, number, work, bandwidth=raw, also=also))
                keep(folder / f"results-codec-{kind}-{arguments.size}.json", arguments, measured)
            if kind == LOSSLESS and rate is None:
                both = options_of(kind, setting, arguments.option)
                measured[name] |= {"speeds": speeds(), "forecasts": forecasts(setting, *both)}
                keep(folder / f"results-codec-{kind}-{arguments.size}.json", arguments, measured)
    finally:
        shutil.rmtree(work, ignore_errors=True)
        if arguments.remove:
            for made in {packed.parent if packed.is_file() else packed, twin}:
                shutil.rmtree(made)
    return measured


def checkpoints(kind: str, size: str, folder: Path) -> tuple[Path, Path]:
    """Return the packed checkpoint of ``kind`` and its unpacked twin; what offstage packs itself is its own twin."""
    if kind == LOSSLESS:
        plain = make(size, folder / size)
        return plain, plain
    return make_pair(kind, size, folder)


def prepare(kind: str, setting: Setting, twin: Path, arguments: argparse.Namespace) -> Sides:
    """Return what runs each side, by the side's name."""
    unpacked, packed = options_of(kind, setting, arguments.option)
    sides: dict[str, Callable[[], Side]] = {
        BASE: partial(timed_side, replace(setting, checkpoint=twin), unpacked),
        PACKED: partial(timed_side, setting, packed),
    }
    for budget in () if kind == LOSSLESS else arguments.budgets:
        sides[f"{THEIRS} {budget}"] = partial(accelerate_side, setting, parse_size(budget))
    return sides


def options_of(kind: str, setting: Setting, given: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the overrides of the unpacked side and of the packed one."""
    if kind != LOSSLESS:
        return [*given, "dtype=bfloat16"], [*given, "dtype=bfloat16"]
    return [*given, "storage.codec=none"], [*given, "storage.codec=zstd", f"offload_folder={_store(setting)}"]


def first_run(setting: Setting, sides: Sides) -> Side:
    """Run the packed side with nothing packed yet, and return it: what later runs don't pay."""
    shutil.rmtree(_store(setting), ignore_errors=True)
    drop_page_cache()
    first = sides[PACKED]()
    figures = " ".join(f"{key}={value}" for key, value in first.items() if key not in ("tokens", "answers"))
    say(f"first run  {PACKED:42} {figures}")
    return first | packed_sizes(_store(setting))


def timed_side(setting: Setting, options: Sequence[str]) -> Side:
    """Run offstage, and have beside its record's figures what the whole command took."""
    began = time.perf_counter()
    side = offstage_side(setting, options)
    return side | {"wall": time.perf_counter() - began}


def raw_bandwidth(checkpoint: Path, *, rate: int | None) -> float:
    """Return bytes a second of direct reads of the checkpoint's files with the storage limited to ``rate``."""
    most = _MOST_RAW if rate is None else RAW_SECONDS * rate
    with throttled(checkpoint, rate) as enter:
        command = enter([sys.executable, "-c", _RAW, str(checkpoint), str(most)])
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


def _store(setting: Setting) -> Path:
    return setting.work / "packed"


def packed_sizes(store: Path) -> dict[str, int]:
    """Return the bytes of the packed copies in an offload ``store``, and of the tensors that they are of."""
    sizes = {"rested": 0, "packed": 0}
    for index in store.rglob("index.json"):
        for name, entry in json.loads(index.read_text()).items():
            if entry.get("codec", "none") != "none":
                sizes["rested"] += math.prod(entry["shape"]) * int(DTYPE_BYTES[entry["dtype"]])
                sizes["packed"] += index.with_name(f"{name}.dat").stat().st_size
    return sizes


if __name__ == "__main__":
    main()
