"""Device ids and byte sizes: how they are written, and how they are printed.

A device id is an accelerator's index (an int), ``"cpu"`` or ``"disk"``. That order (accelerators, cpu, disk) is the
order of the tiers. GB is 10**9 bytes and GiB is 2**30, as in the SI and IEC standards. A position is when something
comes in a pass of a model.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping

DeviceId = int | str
CPU: DeviceId = "cpu"
DISK: DeviceId = "disk"

Position = tuple[int, ...]
"""The number of a module in the order of a pass; then, of what comes inside its call, numbers in the order of that."""

DEVICE_ALIGNMENT = 512
"""Where a tensor begins on an accelerator, as in torch's own memory there: kernels are chosen by the alignment too."""

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[KMGTkmgt]?B|[KMGTkmgt][iI][bB]|%)", re.ASCII)
ACCEPTED_SIZES = (
    "a whole number of bytes, or a number with B, kB, MB, GB, TB (powers of 10), KiB, MiB, GiB, TiB (of 2) or %"
)

DTYPE_BYTES: Mapping[str, float] = {
    "bool": 1, "uint8": 1, "int8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "int64": 8, "uint64": 8,
    "float8_e4m3fn": 1, "float8_e5m2": 1, "float8_e4m3fnuz": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "fp8": 1, "int4": 0.5, "uint4": 0.5, "int2": 0.25,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16,
}  # fmt: skip


def tensor_bytes(shape: Iterable[int], dtype: str) -> int:
    """Return the size of a tensor of ``shape`` and ``dtype`` in bytes."""
    return int(math.prod(shape) * DTYPE_BYTES[dtype])


def parse_size(value: int | str, *, of: int | None = None) -> int:
    """Return ``value`` in bytes.

    ``value`` is an int, or a string of digits alone (bytes), or a decimal number with a unit, as ``format_bytes`` and
    the field's tools print them; ``"80%"`` is a share of ``of`` bytes. Anything else raises a ``ValueError`` that says
    what is accepted. ``"10gb"`` is refused: the field takes a small b for bits, and few who write it mean them.
    """
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = value.strip() if isinstance(value, str) else ""
    if text.isascii() and text.isdigit():
        return int(text)
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"{value!r} is not a size; accepted: {ACCEPTED_SIZES}")
    number, unit = float(match["number"]), match["unit"]
    if unit != "%":
        return round(number * _UNITS[unit.upper()])
    if number > 100:
        raise ValueError(f"{value!r} is more than the whole device; accepted: {ACCEPTED_SIZES}")
    if of is None:
        raise ValueError(f"{value!r} is a share, and the size of the device is not known; give bytes")
    return int(of * number / 100)


def parse_device(value: object) -> DeviceId:
    """Return the device id that ``value`` names: ``0``, ``"0"``, ``"cuda:0"``, ``"cpu"`` or ``"disk"``."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    text = str(value).strip().lower() if isinstance(value, str) else ""
    if text in ("cpu", "disk"):
        return text
    index = text.removeprefix("cuda:")
    if index.isascii() and index.isdigit():
        return int(index)
    raise ValueError(f"{value!r} is not a device; accepted: 0, 1, …, 'cuda:0', 'cpu', 'disk'")


def tier(device: DeviceId) -> tuple[int, int]:
    """Return a sort key that puts devices in the order of the tiers: accelerators by index, cpu, disk."""
    if isinstance(device, int):
        return (0, device)
    return (1 if device == CPU else 2, 0)


def in_tier_order(devices: Iterable[DeviceId]) -> list[DeviceId]:
    """Return ``devices`` without repeats, in the order of the tiers."""
    return sorted(set(devices), key=tier)


def format_bytes(count: float) -> str:
    """Return ``count`` bytes for people to read, in powers of ten: ``1.24 GB``."""
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if abs(count) >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count:.0f} B"
