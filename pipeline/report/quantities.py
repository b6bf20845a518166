"""Numbers with units, for people: a column shares one unit, so that its digits line up and compare."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from offstage.pipeline.report.records import Number

Kind = Literal["bytes", "seconds", "rate", "share", "number", "count"]
MISSING = "\N{EN DASH}"

_UNITS: dict[str, tuple[tuple[float, str], ...]] = {
    "bytes": ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B")),
    "seconds": ((1, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "rate": ((1, ""),),
    "share": ((0.01, "%"),),
    "number": ((1, ""),),
    "count": ((1, ""),),
}

_SHARES = ("_share", "_rate", "_precision", "_acceptance")
"""How the names of figures end that are parts of a whole."""


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


def scale_for(values: Iterable[Number | None], kind: Kind) -> Scale:
    """Return the unit in which the largest of ``values`` reads best."""
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


def tell(value: Number | None, kind: Kind) -> str:
    """Return one number in the unit that suits it."""
    return scale_for([value], kind).text(value)


def tell_figure(name: str, value: Number | None) -> str:
    """Return the value of the figure ``name`` of a record, in the unit that its name says, or as the number it is."""
    if value is None:
        return MISSING
    if "bytes_per_second" in name:
        return f"{tell(value, 'bytes')}/s"
    if "per_second" in name:
        return f"{value:,.2f} /s"
    if "bytes" in name:
        return tell(value, "bytes")
    if "seconds" in name:
        return tell(value, "seconds")
    if name.endswith(_SHARES):
        return tell(value, "share")
    return tell(value, "count" if isinstance(value, int) else "number")


def listed(names: Sequence[str], *, most: int = 8) -> str:
    """Return ``names`` in one line, of a long list its beginning and how many there are."""
    if len(names) <= most:
        return ", ".join(names)
    return f"{', '.join(names[: most - 2])}, … {len(names):,} in all"


def shorten(text: str, most: int) -> str:
    """Return ``text``, cut where it is longer than ``most`` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"
