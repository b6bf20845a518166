"""What products with packed weights take here by format, beside torch's, both of bfloat16; and those of float32.

    python -m tests.benchmarks.product_speeds
    python -m tests.benchmarks.product_speeds gptq4 awq4 --threads 2
    python -m tests.benchmarks.product_speeds q8_0 --tiles
    python -m tests.benchmarks.product_speeds float32

Prints nanoseconds a value of the weight for one row given, for eight and for 64, the least of ``--rounds``: those of
the product, and those of torch's, which reads a weight that was unpacked before. Weights are made up, of two million
values or a few more.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs import gguf, grouped_integers, loops, scaled_codes
from offstage.stages.checkpoints.codecs.packed_matrices import (
    PackedMatrix,
    PlainMatrix,
    as_text,
    packed_matrix,
    parts_of,
)
from offstage.stages.checkpoints.codecs.products import multiply_packed
from offstage.stages.checkpoints.packed import PackedTensor
from tests.benchmarks.offload import say

COUNTS = (1, 8, 64)
SAMPLES: dict[str, Callable[[str], tuple[PackedTensor, object, Sequence[object]]]] = {
    **dict.fromkeys(loops.FORMATS_OF_LOOPS, gguf.sample),
    **dict.fromkeys(scaled_codes.NAMES, scaled_codes.sample),
    **dict.fromkeys(grouped_integers.NAMES, grouped_integers.sample),
}


PLAIN, PLAIN_SHAPE = "float32", (512, 4096)


def main() -> None:
    """Print a line a format."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=[*SAMPLES, PLAIN])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tiles", action="store_true", help="in tiles, on processors that have them (AMX)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    loops.build()
    say(f"{'':8}" + "".join(f"  {count:3} rows    torch" for count in COUNTS) + "   ns a value")
    for name in arguments.formats:
        times = speeds(name, arguments.rounds, tiles=arguments.tiles)
        say(f"{name:8}" + "".join(f"  {ours:8.3f} {theirs:8.3f}" for ours, theirs in times))


def speeds(name: str, rounds: int, *, tiles: bool = False) -> list[tuple[float, float]]:
    """Return for each count of rows the nanoseconds a value that a product with format ``name`` takes, and torch's."""
    matrix, parts = weight(name)
    matrix_text, dtype = as_text(matrix), torch.float32 if name == PLAIN else torch.bfloat16
    plain = matrix.values(parts, 0, matrix.rows).to(dtype)
    nanoseconds = []
    for count in COUNTS:
        given = torch.randn(count, matrix.columns, generator=torch.Generator().manual_seed(0)).to(dtype)
        ours = _least(lambda given=given: multiply_packed(given, parts, matrix_text, tiles=tiles), rounds)
        theirs = _least(lambda given=given: torch.nn.functional.linear(given, plain), rounds)
        nanoseconds.append((ours / plain.numel() * 1e9, theirs / plain.numel() * 1e9))
    return nanoseconds


def weight(name: str) -> tuple[PackedMatrix, list[Tensor]]:
    """Return a weight in the format ``name``, and what it rests in."""
    if name == PLAIN:
        return PlainMatrix(*PLAIN_SHAPE), [torch.randn(PLAIN_SHAPE, generator=torch.Generator().manual_seed(1))]
    tensor, _, data = SAMPLES[name](name)
    matrix = packed_matrix(tensor)
    assert matrix is not None
    return matrix, parts_of(tensor, data)


def _least(call: Callable[[], Tensor], rounds: int) -> float:
    """Return the fewest seconds that ``call`` took."""
    seconds = []
    for _ in range(rounds):
        begin = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


if __name__ == "__main__":
    main()
