"""Products with packed weights beside products with what they are unpacked to, of one checkpoint, in turn.

    python -m tests.benchmarks.products 1.1b --rounds 3
    python -m tests.benchmarks.products 1.1b --rounds 5 --budgets all 3GB 1GB
    python -m tests.benchmarks.products 1.1b --format fp8
    python -m tests.benchmarks.products 1.1b --format fp8-mixture --budgets 300MB 500MB 800MB
    python -m tests.benchmarks.products 1.1b --format mxfp4 --budgets 300MB 500MB 800MB

Needs the extra ``bench`` and room in ``--folder`` for a checkpoint of bfloat16 and what is made of it: a file of Q8_0,
FP8 by blocks of 128 by 128, the same of a Qwen3-MoE of 2 GB, or a mixture in the shape of gpt-oss with experts in
MXFP4. Each round runs every side once, the first one another each time: the checkpoint in bfloat16, and
``quantized.products`` exact and fused, with each of ``--budgets`` for weights; ``all`` has them in memory. In the end a
table of medians: seconds a token, measured and predicted, bytes streamed for one, the share of a mixture's experts that
were in slots, the peak beside what was predicted. Beside it the least that the bytes of the file allow: what reading
them once from memory takes, by the rate at which torch adds up a large tensor here. The rounds stay in ``--folder`` as
JSON.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offstage.stages.units import format_bytes
from tests.benchmarks.checkpoints import SHAPES, make
from tests.benchmarks.gguf_checkpoints import make_gguf
from tests.benchmarks.mixture import make_mixture, mixture_config
from tests.benchmarks.offload import keep, say
from tests.benchmarks.packed_checkpoints import make_fp8, make_pair
from tests.benchmarks.sides import in_turn, offstage_record

ALL = "all"
PRODUCTS = ("exact", "fused")
MIXTURE = "fp8-mixture"
FORMATS = ("q8_0", "fp8", MIXTURE, "mxfp4")
_MIXTURE_BYTES = 2.2e9
"""With which experts are as wide as blocks of FP8 take."""
PLAIN = "plain"
"""The side of the checkpoint in bfloat16 that the other was made of."""
_ELEMENTS = 2**27
_READS = 5

Round = Mapping[str, Mapping[str, Any]]


def main() -> None:
    """Run the rounds and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SHAPES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=17)
    parser.add_argument("--budgets", nargs="*", default=[ALL], help=f"what weights may take, or {ALL}")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0])
    parser.add_argument("--folder", type=Path, default=Path("/tmp/offstage-bench"))
    arguments = parser.parse_args()
    folder = arguments.folder.resolve()
    path, plain = checkpoints(arguments.format, arguments.size, folder)
    rounds: list[Round] = []
    for number in range(arguments.rounds):
        rounds.append(_round({PLAIN: plain, **dict.fromkeys(PRODUCTS, path)}, folder / "products", arguments, number))
        keep(folder / f"results-products-{arguments.size}.json", arguments, rounds)
    rate = memory_rate()
    files = [path] if path.is_file() else list(path.glob("*.safetensors"))
    for line in (*lines(rounds), limit(sum(file.stat().st_size for file in files), rate)):
        say(line)


def checkpoints(kind: str, size: str, folder: Path) -> tuple[Path, Path]:
    """Return the quantised checkpoint of this ``kind`` in ``folder``, and the one in bfloat16 beside it."""
    if kind == MIXTURE:
        source = make_mixture(mixture_config(_MIXTURE_BYTES), folder / "mixture-2.2gb")
        return make_fp8(source, folder / "mixture-2.2gb-fp8"), source
    if kind == "mxfp4":
        return make_pair(kind, size, folder)
    source = make(size, folder / size)
    path = make_fp8(source, folder / f"{size}-fp8") if kind == "fp8" else make_gguf(source, folder / f"{size}-gguf")
    return path, source


def _round(paths: Mapping[str, Path], work: Path, arguments: argparse.Namespace, number: int) -> Round:
    """Run every side once and return what each has told."""
    names = [f"{products} {budget}" for budget in arguments.budgets for products in paths]
    sides = {}
    for name in in_turn(names, number):
        products, budget = name.split()
        options = [f"quantized.products={products}"] if products != PLAIN else []
        options += ["device_map=cpu"] if budget == ALL else [f"max_memory={{cpu: {budget}}}"]
        record = offstage_record(paths[products], work, tokens=arguments.tokens, options=options)
        metrics = record["metrics"]
        sides[name] = {
            "seconds": metrics["decode_seconds_per_token"],
            "expected": metrics["predicted_seconds_per_token"],
            "streamed": metrics["streamed_bytes_per_token"],
            "hits": metrics.get("expert_hit_rate", math.nan),
            "load": metrics["load_seconds"],
            "peak": metrics["peak_host_bytes"],
            "predicted_peak": record["memory"]["predicted"]["cpu"],
            "tokens": record["outputs"][0]["token_ids"],
        }
        say(f"round {number + 1}  {name:12} {sides[name]['seconds']:.3f} s a token")
    return {name: sides[name] for name in names}


def lines(rounds: Sequence[Round]) -> list[str]:
    """Return the lines of the table: medians, and whether tokens are the same for products in any round and budget."""
    rows = [
        "products and budget  s a token  predicted  load s  streamed a token  in slots       peak  predicted  tokens"
    ]
    first = {name.split()[0]: side["tokens"] for name, side in reversed(rounds[0].items())}
    for name in rounds[0]:
        each = [one[name] for one in rounds]
        median = {what: statistics.median(side[what] for side in each) for what in each[0] if what != "tokens"}
        sizes = [format_bytes(int(median[what])) for what in ("streamed", "peak", "predicted_peak")]
        same = all(side["tokens"] == first[name.split()[0]] for side in each)
        rows.append(
            f"{name:19}  {median['seconds']:9.3f}  {median['expected']:9.3f}  {median['load']:6.1f}  {sizes[0]:>16}  "
            f"{median['hits']:8.2f}  {sizes[1]:>9}  {sizes[2]:>9}  {'the same' if same else 'others'}"
        )
    return rows


def limit(file_bytes: int, rate: float) -> str:
    """Return what reading the file's bytes once from memory takes, in words."""
    reading = f"{format_bytes(file_bytes)} at {rate / 1e9:.1f} GB/s from memory"
    return f"{reading}: {file_bytes / rate:.3f} s a token at the least"


def memory_rate() -> float:
    """Return how many bytes a second torch adds up, by all of its threads, of a tensor that no cache holds."""
    values, seconds = torch.ones(_ELEMENTS), []
    for _ in range(_READS):
        begin = time.perf_counter()
        values.sum()
        seconds.append(time.perf_counter() - begin)
    return values.nbytes / min(seconds)


if __name__ == "__main__":
    main()
