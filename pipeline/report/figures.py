"""matplotlib figures as SVG that belongs to the page: its type, its colours, light and dark.

Each colour is drawn as a placeholder and becomes a CSS variable in the SVG, so that one picture serves both schemes.
Text stays text. Every picture is drawn twice, for a wide screen and for a phone, because type that is scaled down to
a phone can't be read. The same numbers give the same bytes: no date, no random ids.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import (
    FixedFormatter,
    FixedLocator,
    Formatter,
    FuncFormatter,
    LogLocator,
    MaxNLocator,
    NullLocator,
)
from matplotlib.transforms import blended_transform_factory

from offstage.pipeline.report.quantities import Kind, scale_for, shorten
from offstage.pipeline.report.run_folders import Job

SERIES = ("s0", "s1", "s2", "s3", "s4", "s5", "rest")
_ACCELERATORS = ("d0", "d1", "d2", "d3")
_TOKENS = ("ink", "muted", "grid", "page", "band", "bar", *SERIES, *_ACCELERATORS, "cpu", "disk", "on-dark", "on-light")
COLOURS = {token: f"#0a{index:02x}f5" for index, token in enumerate(_TOKENS)}
"""Token → the placeholder that stands for ``var(--token)``."""

EARLIER = "outlined: measured by an earlier run"
"""What the legend says of a bar without a filling."""
_PER_INCH = 72
_BARE = {"Date": None, "Creator": None, "Format": None, "Type": None}
_RATIO_OF_LOG = 30
LOGARITHMIC = "logarithmic"
"""What the label of such an axis says in place of a unit, which each of its numbers has."""


@dataclass(frozen=True, slots=True)
class Size:
    """A size of drawing in CSS pixels; ``narrow`` pictures are for a phone."""

    width: int
    narrow: bool

    @property
    def text(self) -> float:
        """The size of type."""
        return 11.5 if self.narrow else 12.5


WIDE, NARROW = Size(1080, narrow=False), Size(358, narrow=True)


@dataclass(frozen=True, slots=True)
class Key:
    """One entry of a legend: a CSS colour variable, the ``mark`` that is drawn in it, and what it means."""

    colour: str
    mark: str
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """One plot as the page shows it: an id, what it is called and says, its legend and its two drawings."""

    name: str
    title: str
    caption: str
    keys: tuple[Key, ...]
    wide: str
    narrow: str


Paint = Callable[[Figure, Size], None]


def picture(
    name: str,
    paint: Paint,
    *,
    title: str,
    caption: str,
    keys: Sequence[Key] = (),
    height: Callable[[Size], float],
) -> Picture:
    """Return what ``paint`` draws, in both sizes; ``height`` gives the pixels that each takes."""
    wide, narrow = (_svg(f"{name}-{size.width}", paint, size, height(size)) for size in (WIDE, NARROW))
    return Picture(name, title, caption, tuple(keys), wide, narrow)


def _svg(name: str, paint: Paint, size: Size, height: float) -> str:
    settings: Any = {
        "svg.hashsalt": name, "svg.fonttype": "none", "text.parse_math": False, "font.size": size.text,
        "axes.unicode_minus": False, "hatch.linewidth": 1.0, "path.simplify": False,
    }  # fmt: skip
    with matplotlib.rc_context(settings):
        figure = Figure(figsize=(size.width / _PER_INCH, height / _PER_INCH), dpi=_PER_INCH, layout="constrained")
        FigureCanvasSVG(figure)
        paint(figure, size)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=_BARE)
    return _adapt(file.getvalue(), name)


def _adapt(svg: str, name: str) -> str:
    """Return the ``svg`` element alone, its colours as variables, its ids its own, its size the page's.

    Links go where matplotlib was told, in the page's own window; who goes by keys has the table for them.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", svg)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(
        r'(<svg[^>]*?) height="[^"]*"',
        rf'\1 role="img" aria-labelledby="{name.rpartition("-")[0]}-title"',
        svg,
        count=1,
    )
    svg = re.sub(r'<a xlink:href="([^"]*)" target="_blank">', r'<a href="\1" tabindex="-1">', svg)
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    for token, placeholder in COLOURS.items():
        svg = svg.replace(placeholder, f"var(--{token})")
    return svg


def device_colour(device: str) -> str:
    """Return the colour token of a device; past the last accelerator's colour they begin again, and cells say which."""
    return (
        _ACCELERATORS[int(device) % len(_ACCELERATORS)] if device.isdecimal() else "cpu" if device == "cpu" else "disk"
    )


def ink_on(token: str) -> str:
    """Return the placeholder of the type that can be read on the colour ``token``."""
    return COLOURS["on-dark" if token in ("d0", "d2") else "on-light"]


def dress(axes: Axes, *, x_label: str = "", y_label: str = "") -> None:
    """Give ``axes`` the page's look: no box, a faint grid, and labels that say what and in which unit."""
    axes.set_facecolor("none")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(COLOURS["grid"])
    axes.tick_params(which="both", colors=COLOURS["muted"], length=0, pad=6)
    axes.grid(visible=True, color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.set_xlabel(x_label, color=COLOURS["muted"], labelpad=6)
    if y_label:  # above the axis and level, where it can be read
        axes.set_title(y_label, color=COLOURS["muted"], loc="left", fontsize=axes.xaxis.label.get_fontsize(), pad=8)


def measure(axes: Axes, which: str, values: Sequence[float], kind: Kind, *, size: Size) -> str:
    """Scale one axis for ``values``: linear from zero, or logarithmic where they span too much.

    Return what its label must say of it: the unit of its numbers, or that it is logarithmic.
    """
    axis, positive = getattr(axes, f"{which}axis"), [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > _RATIO_OF_LOG:
        getattr(axes, f"set_{which}scale")("log")
        axis.set_major_locator(LogLocator(subs=_steps(max(positive) / min(positive)), numticks=12))
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(_with_units(kind))
        return LOGARITHMIC
    return measure_linear(axes, which, values, kind, size=size)


def measure_linear(axes: Axes, which: str, values: Sequence[float], kind: Kind, *, size: Size) -> str:
    """Scale one axis from zero to the largest of ``values``, as lengths must be. Return its unit."""
    axis, scale = getattr(axes, f"{which}axis"), scale_for(values, kind)
    largest = max(values, default=0.0)
    getattr(axes, f"set_{which}lim")(0, largest * 1.08 or 1)
    axis.set_major_locator(MaxNLocator(4 if size.narrow or which == "y" else 7, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value / scale.size:,.6g}"))
    return scale.unit


def measure_counts(axes: Axes, counts: Sequence[float]) -> str:
    """Scale the x axis for ``counts``, of which each has a tick, and the double always lies as far away.

    Return what its label must say of it.
    """
    places = sorted(set(counts))
    axes.set_xscale("log", base=2)
    axes.set_xlim(places[0] / 1.15, places[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator(places))
    axes.xaxis.set_major_formatter(FixedFormatter([f"{place:,g}" for place in places]))
    axes.xaxis.set_minor_locator(NullLocator())
    return LOGARITHMIC


def _steps(ratio: float) -> tuple[int, ...]:
    """Return which multiples of the powers of ten to name on a logarithmic axis that spans ``ratio``."""
    return (1, 2, 5) if ratio < 300 else (1, 3) if ratio < 10_000 else (1,)


def _with_units(kind: Kind) -> Formatter:
    return FuncFormatter(lambda value, _place: f"{value / (scale := scale_for([value], kind)).size:.3g} {scale.unit}")


def in_unit(text: str, unit: str) -> str:
    """Return the label ``text`` with its unit, or whatever else ``measure`` returns of an axis."""
    return f"{text}, {unit}" if unit else text


@dataclass(frozen=True, slots=True)
class RowName:
    """What the row of a job is called, and the URL of the job's folder; empty where there is none."""

    text: str
    link: str = ""


def row_names(jobs: Sequence[Job], labels: Mapping[str, str]) -> list[RowName]:
    """Return the names of the rows of ``jobs``."""
    return [RowName(labels[job.name], job.link) for job in jobs]


def name_rows(axes: Axes, names: Sequence[RowName], *, size: Size) -> None:
    """Name the rows of ``axes`` from top to bottom; on a phone the names stand above their rows."""
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(visible=False, axis="y")
    if not size.narrow:
        axes.set_yticks(range(len(names)), [shorten(name.text, 40) for name in names], color=COLOURS["ink"])
        for tick, name in zip(axes.yaxis.get_major_ticks(), names, strict=True):
            tick.label1.set_url(name.link or None)
        return
    axes.set_yticks([])
    level = blended_transform_factory(axes.transAxes, axes.transData)
    for row, name in enumerate(names):
        axes.text(
            0, row - 0.2, shorten(name.text, 52), transform=level, color=COLOURS["ink"], va="center",
            url=name.link or None,
        )  # fmt: skip


def row_height(size: Size) -> float:
    """Return the pixels that one row takes."""
    return 44 if size.narrow else 27


def bar_place(size: Size) -> tuple[float, float]:
    """Return a bar's offset from its row's middle and its height, in rows."""
    return (0.24, 0.38) if size.narrow else (0.0, 0.62)


def told_first(shown: int, count: int) -> str:
    """Return the sentence of a picture that has the first ``shown`` of ``count`` jobs, empty where it has all."""
    return f" The first {shown} of {count:,} jobs." if count > shown else ""
