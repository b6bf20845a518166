"""What the report's pictures share: plotly figures in the page's look, their axes, and what the page needs of each.

A colour is the name of one of the page's CSS variables. The page's script puts its value in, so that one figure serves
the light scheme and the dark. All text of a record is escaped: plotly takes some HTML.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from markupsafe import escape

from offstage.pipeline.metrics import Unit
from offstage.pipeline.report.quantities import shorten
from offstage.pipeline.report.run_folders import Job
from offstage.pipeline.run_schema import Number

EARLIER = "measured by an earlier run"
_RATIO_OF_LOG = 30
_LONGEST_NAME = 40
_GAP = 0.22
"""How much of a panel is left for the words between it and the next."""
_UNITS: Mapping[Unit, str] = {"bytes": "B", "seconds": "s"}


def colour(token: str) -> str:
    """Return the colour ``token`` of the page's style."""
    return f"var(--{token})"


SERIES = tuple(colour(f"s{index}") for index in range(6))
_AXIS = {"gridcolor": colour("grid"), "linecolor": colour("grid"), "zeroline": False, "automargin": True}
_TEMPLATE = go.layout.Template(
    layout={
        "font": {"color": colour("muted"), "size": 13},
        "paper_bgcolor": colour("page"),
        "plot_bgcolor": colour("page"),
        "xaxis": _AXIS,
        "yaxis": _AXIS,
        "margin": {"l": 8, "r": 16, "t": 48, "b": 8},
        "legend": {
            "orientation": "h",
            "x": 0,
            "y": 0,
            "yref": "container",
            "yanchor": "bottom",
            "traceorder": "normal",
            "font": {"color": colour("ink")},
        },
        "hovermode": "closest",
        "hoverlabel": {"bgcolor": colour("band"), "bordercolor": colour("rest"), "font": {"color": colour("ink")}},
        "modebar": {"bgcolor": colour("page"), "color": colour("muted"), "activecolor": colour("ink")},
    }
)


@dataclass(frozen=True, slots=True)
class Picture:
    """One plot as the page shows it: an id, what it is called and says, and the ``figure``."""

    name: str
    title: str
    caption: str
    figure: go.Figure


def figure(traces: Iterable[Any], *, rows: int = 0, panels: int = 1, **layout: Any) -> go.Figure:
    """Return a figure of ``traces`` in the page's look, whose height is that of ``panels`` of so many ``rows``."""
    return go.Figure(list(traces), {"template": _TEMPLATE, "meta": {"rows": rows, "panels": panels}, **layout})


def stacked(axes: Sequence[tuple[Mapping[str, Any], Mapping[str, Any]]]) -> dict[str, Any]:
    """Return the x and y ``axes`` of panels below one another, the first on top."""
    layout: dict[str, Any] = {}
    for place, (x, y) in enumerate(axes):
        number = str(place + 1) if place else ""
        low = 1 - (place + 1) / len(axes)
        layout[f"xaxis{number}"] = {**x, "anchor": f"y{number}"}
        gap = _GAP / len(axes) if place + 1 < len(axes) else 0
        layout[f"yaxis{number}"] = {**y, "domain": [low + gap, low + 1 / len(axes)]}
    return layout


def on_panel(place: int) -> dict[str, str]:
    """Return what puts a trace onto the panel ``place`` of those that are ``stacked``."""
    number = str(place + 1) if place else ""
    return {"xaxis": f"x{number}", "yaxis": f"y{number}"}


def scale(title: str, kind: Unit, values: Iterable[Number], *, linear: bool = False) -> dict[str, Any]:
    """Return an axis for ``values``: from zero, or logarithmic where they span too much, which its title says then."""
    positive = [value for value in values if value > 0]
    logarithmic = bool(positive) and not linear and max(positive) / min(positive) > _RATIO_OF_LOG
    axis: dict[str, Any] = {"title": {"text": f"{title}, logarithmic" if logarithmic else title}}
    axis |= {"type": "log", "dtick": "D2"} if logarithmic else {"type": "linear", "rangemode": "tozero"}
    prefixed = kind == "bytes" or (kind == "seconds" and max(positive, default=0) < 1000)
    return {**axis, "tickformat": "~s" if prefixed else "", "ticksuffix": _UNITS.get(kind, "")}


def named_rows(jobs: Sequence[Job], labels: Mapping[str, str]) -> dict[str, Any]:
    """Return the axis of rows, from top to bottom, each called by its job's label, which leads to its folder."""
    return rows_called([(labels[job.name], job.link) for job in jobs])


def rows_called(names: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Return the axis of rows with these ``names`` and links."""
    words = [linked(shorten(name, _LONGEST_NAME), link) for name, link in names]
    ends = [len(words) - 0.5, -0.5]
    return {
        "tickvals": list(range(len(words))),
        "ticktext": words,
        "range": ends,
        "showgrid": False,
        "tickfont": {"color": colour("ink")},
        "ticklabelstandoff": 8,
    }


def linked(text: str, link: str) -> str:
    """Return ``text`` as plotly and the table take it, leading to ``link`` where there is one."""
    return f'<a href="{escape(link)}" target="_self">{escape(text)}</a>' if link else str(escape(text))


def hover_text(*lines: str) -> str:
    """Return what is shown beside the pointer, those of ``lines`` that say something."""
    return "<br>".join(str(escape(shorten(line, 90))) for line in lines if line)


def named(text: str) -> str:
    """Return ``text`` as the legend has it."""
    return str(escape(shorten(text, _LONGEST_NAME)))


def shown(texts: Iterable[str], links: Iterable[str]) -> dict[str, Any]:
    """Return what a trace needs to show a text beside the pointer, and to lead to the job's folder at a click."""
    return {"hovertext": list(texts), "hoverinfo": "text", "customdata": list(links)}


def told_first(count: int, every: int) -> str:
    """Return the sentence of a picture that has the first ``count`` of ``every`` job, empty where it has all."""
    return f" The first {count} of {every:,} jobs." if every > count else ""


def device_colour(device: str) -> str:
    """Return the colour of a device; past the last accelerator's colour they begin again, and names say which."""
    colour_names = {"cpu": "cpu", "disk": "disk"}
    return colour(f"d{int(device) % 4}" if device.isdecimal() else colour_names.get(device, "disk"))
