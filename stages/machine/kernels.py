"""What the host's kernels take beside their operands and results: measured once, and kept beside the cache.

A product in half precision is summed in float32 in a matrix of its own by some processors' kernels and in registers by
others'; a batch whose matrices don't lie in order is copied first by some and read where it lies by others. No table
of processors knows it: it hangs on the version of torch and on the environment too. What was found so far, as bytes
beside for each byte of the result: 2 for products in bfloat16 where oneDNN knows AVX-512 without its bfloat16
instructions or with AMX's, 0 with those of AVX-512, 0 wherever torch's own loops compute.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from hashlib import sha256
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from offstage.pipeline.environment import allowed_cores
from offstage.stages.machine.kept_figures import kept_figure
from offstage.stages.machine.own_process import measure_apart

if TYPE_CHECKING:
    import torch  # where it is measured: what was is read without

FILE_NAME = "kernel_factors.json"
Kernels = Mapping[str, tuple[float, ...]]
"""Bytes beside, for each byte of the left operand, the right one and the result, by operator and dtype.

``mm bfloat16`` is a product of two matrices. ``bmm bfloat16`` is a batch of them, by the bytes of one of the batch,
since each thread computes one at a time. ``strided bmm bfloat16`` is a batch of which an operand is neither contiguous
nor plainly transposed, by the bytes of such operands. ``grouped_mm`` is a mixture's experts, ``convolution`` any. One
that isn't listed takes nothing.
"""

NOMINAL: Kernels = {
    "mm bfloat16": (0, 0, 2),
    "bmm bfloat16": (0, 0, 4),
    "strided bmm bfloat16": (1, 1, 0),
    "grouped_mm bfloat16": (0, 0, 1),
    "convolution bfloat16": (0, 0, 1),
    "convolution float32": (0, 0, 1),
}
"""What a machine takes that can't be asked: the most that was found on any, which is a server's with AMX."""

_THREADS = "OMP_NUM_THREADS"
_CHOOSERS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    _THREADS,
)
"""The variables of the environment by which the libraries choose their kernels, and how many threads run them."""

_ROUNDS = 3
_STEPS = 2
"""Factors are kept in halves: what is measured twice is nearly the same, and a plan's key exactly."""
_DTYPES = ("float32", "bfloat16", "float16")


def local_kernels(folder: Path) -> Kernels:
    """Return what this machine's kernels take: as kept in ``folder``, or measured now, with torch, and kept there.

    Where the system doesn't tell a process its peak they are ``NOMINAL``.
    """
    apart = partial(measure_apart, "machine.kernels", here=measure)
    measured = kept_figure(folder, FILE_NAME, identity(), apart, nominal=NOMINAL, of_user=True)
    return {kernel: tuple(factors) for kernel, factors in measured.items()}


def identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return all that the kernels are chosen by: torch's version, the processor, the cores, and the environment."""
    chosen = (f"{name}={value}" for name, value in choosers(environment).items())
    return "; ".join(
        [f"torch {metadata.version('torch')}", processor_features(), f"{len(allowed_cores())} cores", *chosen]
    )


def choosers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the environment that choose kernels, and so the last bits of what is computed."""
    return {name: environment[name] for name in _CHOOSERS if name in environment}


def capabilities() -> dict[str, str]:
    """Return what the last bits of what is computed here hang on, by what it is: between machines that are alike in it
    the same operands have the same product, to the bit.

    The number of threads is part of it, by which some products are divided. Our own loops hang on the processor alone:
    on whether it adds up products of pairs or tiles of bfloat16.
    """
    import torch

    return {
        "torch's kernels": torch.backends.cpu.get_cpu_capability(),
        "processor": processor_features(),
        "threads": str(torch.get_num_threads()),
        **{name: value for name, value in choosers().items() if name != _THREADS},
    }


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's family, model and name, and a hash of its features: a hypervisor may hide some."""
    first = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.is_file() else ""
    fields = re.findall(r"^(?:vendor_id|cpu family|model|model name|flags|Features)\s*: *(.*)$", first, re.MULTILINE)
    named, features = " ".join(fields[:-1]), sha256(" ".join(fields[-1:]).encode()).hexdigest()[:8]
    return f"{platform.machine()} {named} {features}"


def has_tiles(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Return whether the processor multiplies tiles of bfloat16 (AMX)."""
    return cpuinfo.is_file() and " amx_bf16" in cpuinfo.read_text().partition("\n\n")[0]


Call = Callable[[], "torch.Tensor"]
Probe = tuple[str, int, int, Call, Call | None]
"""A kernel's name, the operand whose bytes it is measured by (0 left, 1 right, 2 result), these bytes, and a call.

Where there is another call, these bytes are what the first has more than it: what both take alike (blocks of a fixed
size for each thread, as AMX's kernels have) is no matter of the operand's.
"""


def measure(process: Path = Path("/proc/self")) -> dict[str, list[float]] | None:
    """Return the factors of ``Kernels``; null where ``process`` doesn't tell its peak.

    Matrices have some MB: half a second in all. Only oneDNN's kernels are measured. What it has none for is computed by
    MKL or by torch's own loops: these take nothing beside, but MKL keeps buffers for good, and torch's loops are slow.
    """
    import torch

    by_kernel: dict[str, list[float]] = {}
    try:
        with PeakMeter(process) as meter, torch.no_grad():
            for kernel, operand, count, call, smaller in chain.from_iterable(map(_probes, _DTYPES)):
                factors = by_kernel.setdefault(kernel, [0.0, 0.0, 0.0])
                beside = meter.beside(call) - (meter.beside(smaller) if smaller is not None else 0)
                factors[operand] = round(max(0, beside) / count * _STEPS) / _STEPS
    except OSError:
        return None
    return {kernel: factors for kernel, factors in by_kernel.items() if any(factors)}


def _probes(name: str) -> Iterator[Probe]:
    """Yield the probes of a dtype: in each, one of the operands is by far the largest, or the only one copied."""
    import torch

    dtype: torch.dtype = getattr(torch, name)
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
    import torch

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

    The kernel keeps the peak of a process's resident memory and resets it when asked (``/proc/self/clear_refs``,
    proc(5)). Nothing else sees what oneDNN allocates. What one product took must not hide in what another left: what is
    free in the heap is given back to the system before each.

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
        from offstage.pipeline.kept_memory import return_heap

        return_heap()
        os.write(self._reset, b"5")
        before = self._read()
        result = call()
        return self._read() - before - result.nbytes

    def _read(self) -> int:
        match = re.search(rb"^VmHWM:\s*(\d+) kB$", os.pread(self._status, 8192, 0), re.MULTILINE)
        if match is None:
            raise OSError(f"no VmHWM in {self._process}/status")
        return int(match[1]) * 1024
