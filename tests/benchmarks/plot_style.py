"""The look of the benchmarks' pictures: matplotlib in the colours of the report's page, its light scheme."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from offstage.pipeline.metrics import Unit
from offstage.pipeline.report.quantities import scale_for

_STYLE = resources.files("offstage.pipeline.report").joinpath("templates", "style.css").read_text(encoding="utf-8")
COLOURS = dict(re.findall(r"--([\w-]+): (#\w+);", _STYLE.split("@media")[0]))
"""The report's colours by name."""
WIDTH, HEIGHT, PER_INCH, SHARPNESS, TEXT = 1080, 420, 72, 2, 12.5


@contextmanager
def picture(path: Path, *, height: float = HEIGHT) -> Iterator[Figure]:
    """Lend a figure in the report's look, of so many pixels, which is then saved as the PNG ``path``."""
    with matplotlib.rc_context({"font.size": TEXT, "axes.unicode_minus": False}):
        size = (WIDTH / PER_INCH, height / PER_INCH)
        figure = Figure(figsize=size, dpi=PER_INCH * SHARPNESS, layout="constrained", facecolor=COLOURS["page"])
        FigureCanvasAgg(figure)
        yield figure
        figure.savefig(path, format="png", metadata={"Software": None})


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


def measure_linear(axes: Axes, which: str, values: Sequence[float], kind: Unit) -> str:
    """Scale one axis from zero to the largest of ``values``. Return its unit."""
    axis, scale = getattr(axes, f"{which}axis"), scale_for(values, kind)
    getattr(axes, f"set_{which}lim")(0, max(values, default=0.0) * 1.08 or 1)
    axis.set_major_locator(MaxNLocator(4 if which == "y" else 7, steps=[1, 2, 2.5, 5, 10]))
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
    return "logarithmic"


def in_unit(text: str, unit: str) -> str:
    """Return the label ``text`` with its unit, or whatever else is to be said of an axis."""
    return f"{text}, {unit}" if unit else text
