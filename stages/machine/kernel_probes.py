"""Measuring what the host's kernels take beside operands and results, with matrices of some MB: half a second in all.

The kernel keeps the peak of a process's resident memory and resets it when asked (``/proc/self/clear_refs``,
proc(5)). Nothing else sees what oneDNN allocates. What one product took must not hide in what another left: what is
free in the heap is given back to the system before each.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, starmap
from pathlib import Path

import torch

from offstage.pipeline.malloc import return_heap

_ROUNDS = 3
_STEPS = 2
"""Factors are kept in halves: what is measured twice is nearly the same, and a plan's key exactly."""
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Call = Callable[[], torch.Tensor]
Probe = tuple[str, int, int, Call, Call | None]
"""A kernel's name, the operand whose bytes it is measured by (0 left, 1 right, 2 result), these bytes, and a call.

Where there is another call, these bytes are what the first has more than it: what both take alike (blocks of a fixed
size for each thread, as AMX's kernels have) is no matter of the operand's.
"""


def be_measured() -> None:
    """Be the process that is measured: print the factors."""
    sys.stdout.write(json.dumps(measure_kernels()))


def measure_kernels(process: Path = Path("/proc/self")) -> dict[str, list[float]] | None:
    """Return the factors of ``offstage.stages.machine.kernels.Kernels``; null where ``process`` doesn't tell its peak.

    Only oneDNN's kernels are measured. What it has none for is computed by MKL or by torch's own loops: these take
    nothing beside, but MKL keeps buffers for good, and torch's loops are slow.
    """
    found: dict[str, list[float]] = {}
    try:
        with PeakMeter(process) as meter, torch.no_grad():
            for kernel, operand, count, call, smaller in chain.from_iterable(starmap(_probes, _DTYPES.items())):
                factors = found.setdefault(kernel, [0.0, 0.0, 0.0])
                beside = meter.beside(call) - (meter.beside(smaller) if smaller is not None else 0)
                factors[operand] = round(max(0, beside) / count * _STEPS) / _STEPS
    except OSError:
        return None
    return {kernel: factors for kernel, factors in found.items() if any(factors)}


def _probes(name: str, dtype: torch.dtype) -> Iterator[Probe]:
    """Yield the probes of ``dtype``: in each, one of the operands is by far the largest, or the only one copied."""
    halves = {
        torch.bfloat16: torch.ops.mkldnn._is_mkldnn_bf16_supported,
        torch.float16: torch.ops.mkldnn._is_mkldnn_fp16_supported,
    }
    if dtype in halves and not halves[dtype]():
        return
    if dtype in halves or not torch.backends.mkl.is_available():  # type: ignore[no-untyped-call]
        yield from _products(name, dtype)
    signal, taps = torch.zeros(1, 1024, 1024, dtype=dtype), torch.zeros(1024, 1, 4, dtype=dtype)
    convolve = partial(torch.conv1d, signal, taps, groups=1024, padding=3)
    yield f"convolution {name}", 2, signal.nbytes, convolve, None


def _products(name: str, dtype: torch.dtype) -> Iterator[Probe]:
    def zeros(*shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=dtype)

    for operand, (rows, inner, columns) in enumerate(((2048, 1024, 16), (16, 1024, 2048))):
        left, right = zeros(rows, inner), zeros(columns, inner)
        yield f"mm {name}", operand, (left, right)[operand].nbytes, partial(torch.mm, left, right.t()), None
    left, right = zeros(1536, 512), zeros(2048, 512).t()
    more = 1024 * 2048 * dtype.itemsize
    yield f"mm {name}", 2, more, partial(torch.mm, left, right), partial(torch.mm, left[:512], right)
    left, right = zeros(8, 512, 64), zeros(8, 64, 512)
    yield f"bmm {name}", 2, 512 * 512 * dtype.itemsize, partial(torch.bmm, left, right), None
    row, turned, column = zeros(4, 1, 1024), zeros(512, 1024).t().expand(4, 1024, 512), zeros(4, 512, 1)
    yield f"strided bmm {name}", 1, turned.nbytes, partial(torch.bmm, row, turned), None
    yield f"strided bmm {name}", 0, turned.nbytes, partial(torch.bmm, turned, column), None
    rows_of, experts = zeros(1024, 256), zeros(2, 1024, 256).mT
    ends = torch.tensor([512, 1024], dtype=torch.int32)
    grouped = 1024 * 1024 * dtype.itemsize
    yield f"grouped_mm {name}", 2, grouped, partial(torch._grouped_mm, rows_of, experts, ends), None


class PeakMeter:
    """What a call takes of memory at its peak. ``process`` is this process's folder of the kernel's.

    Entering it raises ``OSError`` where there is no such folder, or where it may not be written to.
    """

    def __init__(self, process: Path) -> None:
        self._process = process

    def __enter__(self) -> PeakMeter:
        self._status = os.open(self._process / "status", os.O_RDONLY)
        try:
            self._reset = os.open(self._process / "clear_refs", os.O_WRONLY)
        except OSError:
            os.close(self._status)
            raise
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._status)
        os.close(self._reset)

    def beside(self, call: Callable[[], torch.Tensor]) -> int:
        """Return the bytes that ``call`` takes at its peak beside its result, the median of a few rounds."""
        call()  # the first call makes threads and kernels, which stay
        return sorted(self._once(call) for _ in range(_ROUNDS))[_ROUNDS // 2]

    def _once(self, call: Callable[[], torch.Tensor]) -> int:
        return_heap()
        os.write(self._reset, b"5")
        before = self._read()
        result = call()
        return self._read() - before - result.nbytes

    def _read(self) -> int:
        found = re.search(rb"^VmHWM:\s*(\d+) kB$", os.pread(self._status, 8192, 0), re.MULTILINE)
        if found is None:
            raise OSError(f"no VmHWM in {self._process}/status")
        return int(found[1]) * 1024
