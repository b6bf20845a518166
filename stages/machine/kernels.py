"""What the host's kernels take beside their operands and results: measured once, and kept beside the cache.

A product in half precision is summed in float32 in a matrix of its own by some processors' kernels and in registers by
others'; a batch whose matrices don't lie in order is copied first by some and read where it lies by others. No table
of processors knows it: it hangs on the version of torch and on the environment too. What was found so far, as bytes
beside for each byte of the result: 2 for products in bfloat16 where oneDNN knows AVX-512 without its bfloat16
instructions or with AMX's, 0 with those of AVX-512, 0 wherever torch's own loops compute.
"""

from __future__ import annotations

import json
import os
import platform
import re
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from importlib import metadata
from pathlib import Path

from offstage.pipeline.environment import allowed_cores
from offstage.stages.machine import own_process
from offstage.stages.machine.kept_figures import kept_for_user

FILE_NAME = "kernel_factors.json"
_MOST = 64
"""Bytes beside for each byte: more than any kernel takes."""

Kernels = Mapping[str, tuple[float, ...]]
"""Bytes beside, for each byte of the left operand, the right one and the result, by operator and dtype.

``mm bfloat16`` is a product of two matrices. ``bmm bfloat16`` is a batch of them, by the bytes of one of the batch,
since each thread computes one at a time. ``strided bmm bfloat16`` is a batch of which an operand is neither contiguous
nor plainly transposed, by the bytes of such operands: the weight of a head that gets the last position of each sequence
is one, once for each of them. ``grouped_mm`` is a mixture's experts, ``convolution`` any. One that isn't listed takes
nothing.
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

_CHOOSERS = (
    "ATEN_CPU_CAPABILITY",
    "ONEDNN_MAX_CPU_ISA",
    "DNNL_MAX_CPU_ISA",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "MKL_ENABLE_INSTRUCTIONS",
    "MKL_CBWR",
    "OMP_NUM_THREADS",
)
"""The variables of the environment by which the libraries choose their kernels, and how many threads run them."""


def local_kernels(folder: Path) -> Kernels:
    """Return what this machine's kernels take: as kept in ``folder``, or measured now, with torch, and kept there.

    Where the system doesn't tell a process its peak they are ``NOMINAL``.
    """
    key = identity()
    kept = kept_for_user(folder / FILE_NAME, {key: _measure}, is_sound=are_factors).get(key)
    return NOMINAL if kept is None else {kernel: tuple(factors) for kernel, factors in kept.items()}


def are_factors(figures: object) -> bool:
    """Return whether ``figures`` can be what kernels take: three factors for each."""
    return isinstance(figures, dict) and all(map(_are_three, figures.values()))


def _are_three(factors: object) -> bool:
    return isinstance(factors, list) and len(factors) == 3 and all(map(_is_factor, factors))


def _is_factor(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= _MOST


def identity(environment: Mapping[str, str] = os.environ) -> str:
    """Return all that the kernels are chosen by: torch's version, the processor, the cores, and the environment."""
    chosen = (f"{name}={value}" for name, value in choosers(environment).items())
    return "; ".join(
        [f"torch {metadata.version('torch')}", processor_features(), f"{len(allowed_cores())} cores", *chosen]
    )


def choosers(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables of the environment that choose kernels, and so the last bits of what is computed."""
    return {name: environment[name] for name in _CHOOSERS if name in environment}


def processor_features(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """Return the processor's family, model and name, and a hash of its features: a hypervisor may hide some."""
    first = cpuinfo.read_text().partition("\n\n")[0] if cpuinfo.is_file() else ""
    told = re.findall(r"^(?:vendor_id|cpu family|model|model name|flags|Features)\s*: *(.*)$", first, re.MULTILINE)
    named, features = " ".join(told[:-1]), sha256(" ".join(told[-1:]).encode()).hexdigest()[:8]
    return f"{platform.machine()} {named} {features}"


def _measure() -> dict[str, list[float]] | None:
    """Measure in a process of its own, whose peak is reset and which keeps what kernels do; here where there is no room
    for a second one.
    """
    if own_process.has_room():
        with suppress(ValueError):
            return json.loads(own_process.measure_apart("kernel_probes") or b"null")  # type: ignore[no-any-return]
        return None
    from offstage.stages.machine.kernel_probes import measure_kernels

    return measure_kernels()
