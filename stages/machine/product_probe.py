"""Measuring how fast the host's products read weights that lie in its memory, for each shape of weight.

Decoding multiplies one row by each weight, which no cache holds until the next token. How many bytes a second it reads
hangs on the weight's shape: a product takes a while to begin, and kernels have ways of their own for many columns, some
of them half as fast. No rule says where; so the shapes that a model has are measured, all in one process that isn't the
run's, and each is kept: most models have five or six.

Weights begin where those of most safetensors files do, at a multiple of eight bytes and no larger one: from there
products read them up to a fifth slower than from a cache line's beginning, where dequantised ones begin.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median, quantiles
from typing import TYPE_CHECKING

from offstage.stages.machine.kernels import identity
from offstage.stages.units import DTYPE_BYTES

if TYPE_CHECKING:
    import torch

Shape = tuple[int, int]
"""A weight's rows and columns."""

_OFFSET = 8
_LEAST_BYTES, _CACHES = 320 * 2**20, 2
"""The least memory that weights lie in which are measured, and how many times the last cache it is."""
_LAST_CACHE = Path("/sys/devices/system/cpu/cpu0/cache/index3/size")
MOST_ROUNDS, _MOST_SECONDS = 24, 0.25
"""How often a shape is measured, at the most, and for how long."""
_LEAST_ROUNDS, _CACHE_LINE = 4, 64
_DISTURBED = 1.5
"""By how much something takes longer than half of its kind only where something else had the processor."""
_STEADY, _STEADY_ROUNDS = 0.05, 8
"""What the middle half of some rounds lie within, as a share of their median, where more would tell the same."""


@dataclass(frozen=True, slots=True)
class HostWeights:
    """The weights that a host's products read: their ``dtype``, and whether they are ``aligned``, as dequantised ones
    are.
    """

    dtype: str = "bfloat16"
    aligned: bool = False

    @property
    def offset(self) -> int:
        """How far after a cache line's beginning they begin, in bytes."""
        return 0 if self.aligned else _OFFSET

    @property
    def name(self) -> str:
        """What figures of them are kept under."""
        return f"{self.dtype}{', aligned' if self.aligned else ''}"


OF_FILES = HostWeights()
"""Those of most safetensors files."""


def kept_as(shape: Shape, weights: HostWeights) -> str:
    """Return what the rate of such ``weights`` of that ``shape`` is kept under."""
    return f"product of {named(shape)} of {weights.name}; {identity()}"


def question(weights: HostWeights, shapes: Collection[Shape]) -> tuple[str, ...]:
    """Return what a process of its own is asked for the rates of ``shapes``; it answers as ``measure`` does."""
    return "machine.product_probe", weights.dtype, str(weights.offset), *map(named, shapes)


def named(shape: Shape) -> str:
    """Return the ``shape`` as it is written."""
    return "x".join(map(str, shape))


def measure(dtype: str, offset: str, *shapes: str) -> dict[str, int]:
    """Return the bytes a second that a product of one row reads of a weight of each of ``shapes``, by it."""
    rows_and_columns = [(int(rows), int(columns)) for rows, columns in (shape.split("x") for shape in shapes)]
    seconds = product_seconds(dtype, int(offset), rows_and_columns)
    width = DTYPE_BYTES[dtype]
    return {named(shape): round(shape[0] * shape[1] * width / taken) for shape, taken in seconds.items()}


def product_seconds(dtype: str, offset: int, shapes: Collection[Shape]) -> dict[Shape, float]:
    """Return how long a product of one row takes with a weight of each of ``shapes``.

    Of one that is larger than the memory which is taken for it as many rows are measured as that holds. Each lies where
    nothing was read for the longest.
    """
    import torch

    from offstage.stages.machine.aligned_memory import room_for

    kind: torch.dtype = getattr(torch, dtype)
    room = room_for((memory_bytes() // kind.itemsize,), kind, offset=offset)
    memory = room.tensor.fill_(0.01)  # the system has one page for all memory never written to
    begin, line, seconds = 0, _CACHE_LINE // kind.itemsize, dict[Shape, float]()

    def runs(rows: int, columns: int) -> Iterator[float]:
        nonlocal begin
        while True:
            begin = 0 if begin + rows * columns > len(memory) else begin
            yield seconds_with(memory[begin : begin + rows * columns].view(rows, columns))
            begin += -(-rows * columns // line) * line

    for shape in shapes:
        rows = min(shape[0], len(memory) // shape[1])
        seconds[shape] = steady_seconds(runs(rows, shape[1])) * shape[0] / rows
    return seconds


def steady_seconds(runs: Iterator[float]) -> float:
    """Return how long one of ``runs`` typically takes, the first aside: as few are asked as tell it."""
    taken = [next(runs) for _ in range(_LEAST_ROUNDS)]
    while len(taken) <= MOST_ROUNDS and sum(taken) < _MOST_SECONDS and not are_steady(taken[1:]):
        taken.append(next(runs))
    return typical(taken[1:])


def seconds_with(weight: torch.Tensor) -> float:
    """Return how long the product of one row and ``weight`` takes now."""
    import torch
    from torch.nn import functional

    row = torch.ones(1, 1, weight.shape[1], dtype=weight.dtype)
    with torch.inference_mode():
        begun = time.perf_counter()
        functional.linear(row, weight)
        return time.perf_counter() - begun


def typical(taken: Sequence[float]) -> float:
    """Return the mean of what was ``taken``, but for what took much longer than half of it."""
    most = _DISTURBED * median(taken)
    return mean([seconds for seconds in taken if seconds <= most])


def are_steady(taken: Sequence[float]) -> bool:
    """Return whether what was ``taken`` by some rounds differs so little that more of them needn't be asked."""
    if len(taken) < _STEADY_ROUNDS:
        return False
    least, middle, most = quantiles(taken, n=4)
    return most - least <= _STEADY * middle


def memory_bytes() -> int:
    """Return what weights lie in that are measured: more than caches hold of one once the others were read.

    The last cache has some MB, or some hundred.
    """
    with suppress(OSError, ValueError):
        return max(_LEAST_BYTES, _CACHES * int(_LAST_CACHE.read_text().strip().removesuffix("K")) * 2**10)
    return _LEAST_BYTES
