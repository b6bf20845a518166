"""Numbers with units, for people: a column shares one unit, so that its digits line up and compare. And devices in the
order of the tiers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from offstage.pipeline.metrics import A_SECOND, MetricTable, Unit
from offstage.pipeline.run_schema import Number

MISSING = "\N{EN DASH}"

_UNITS: dict[Unit, tuple[tuple[float, str], ...]] = {
    "bytes": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
    "seconds": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "parameters": ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"), (1e3, "thousand"), (1, "")),
    "rate": ((1, ""),),  # a number that a label says the unit of
    "share": ((0.01, "%"),),
    "number": ((1, ""),),
    "count": ((1, ""),),
    "word": ((1, ""),),
}


@dataclass(frozen=True, slots=True)
class Scale:
    """A unit that a set of numbers is written in: ``size`` of the base unit, with a fixed count of ``decimals``."""

    size: float
    unit: str
    decimals: int

    def number(self, value: Number | None) -> str:
        """Return ``value`` in this unit, without the unit."""
        if value is None:
            return MISSING
        if value == 0:
            return "0"
        text = f"{value / self.size:,.{self.decimals}f}"
        smallest = f"{10.0**-self.decimals:.{self.decimals}f}"
        return f"<{smallest}" if value > 0 and not text.strip("0.,") else text

    def text(self, value: Number | None) -> str:
        """Return ``value`` with its unit."""
        return self.number(value) if value is None or not self.unit else f"{self.number(value)} {self.unit}"


def scale_for(values: Iterable[Number | None], kind: Unit) -> Scale:
    """Return the unit in which the largest of ``values``, which are in the unit ``kind``, reads best."""
    if kind.endswith(A_SECOND):
        base = kind.removesuffix(A_SECOND)
        has_unit = base in _UNITS
        scale = scale_for(values, base if has_unit else "rate")
        return replace(scale, unit=f"{scale.unit}{A_SECOND}" if has_unit else kind)
    largest = max((abs(value) for value in values if value is not None), default=0)
    units = _UNITS[kind]
    size, unit = next(((size, unit) for size, unit in units if largest >= size), units[-1])
    if not largest:
        size, unit = 1, "s" if kind == "seconds" else unit
    if kind == "number":  # runs are told apart by its last digits
        return Scale(size, unit, 4)
    if kind == "count":
        return Scale(size, unit, 0)
    if unit in ("B", "%"):
        return Scale(size, unit, 0 if unit == "B" else 1)
    return Scale(size, unit, 3 if unit == "s" and largest < 10 else 2 if largest / size < 100 else 1)


def tell(value: Number | None, kind: Unit) -> str:
    """Return one number in the unit that suits it."""
    return scale_for([value], kind).text(value)


def listed(names: Sequence[str], *, most: int = 8) -> str:
    """Return ``names`` in one line, of a long list its beginning and how many there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 2])}, … {len(names):,} in all"


def shorten(text: str, most: int) -> str:
    """Return ``text``, cut where it is longer than ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def tier(device: str) -> tuple[int, int]:
    """Return a sort key that puts devices in the order of the tiers: accelerators by index, cpu, disk."""
    return (0, int(device)) if device.isdecimal() else (1 if device == "cpu" else 2, 0)


def in_tier_order(devices: Iterable[str]) -> list[str]:
    """Return ``devices`` without repeats, in the order of the tiers."""
    return sorted(set(devices), key=lambda device: (*tier(device), device))


def linked_devices(table: MetricTable, metrics: Iterable[str]) -> list[str]:
    """Return the devices that ``metrics``, by their names, tell links of, in the order of the tiers; none where one is.

    What the only link carries is all that is streamed.
    """
    linked = {metric.name for metric in table.links()}
    parts = (name.partition(".") for name in metrics)
    devices = in_tier_order(device for metric, _, device in parts if device and metric in linked)
    return devices if len(devices) > 1 else []


def device_title(device: str) -> str:
    """Return what a device is called in a legend."""
    return f"accelerator {device}" if device.isdecimal() else device
