"""The picture of packing: seconds a token against the storage's rate, packed and not, and where they meet."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.axes import Axes

from tests.benchmarks.plot_style import COLOURS, dress, in_unit, measure_linear, picture

if TYPE_CHECKING:
    from tests.benchmarks.codec_table import StoragePoint

NAMES = {"unpacked": "as the checkpoint has them", "packed": "packed, zstd"}


def draw(points: Sequence[StoragePoint], path: Path) -> None:
    """Draw the ``points`` into the PNG ``path``."""
    with picture(path) as figure:
        axes = figure.subplots()
        rates = [point.rate for point in points]
        times = [value for point in points for each in (point.seconds, point.predicted) for value in each.values()]
        unit = measure_linear(axes, "x", rates, "bytes")
        time_unit = measure_linear(axes, "y", times, "seconds")
        dress(axes, x_label=f"storage, {unit} a second", y_label=in_unit("time a token", time_unit))
        for number, side in enumerate(NAMES):
            _paint_side(axes, points, side, colour=COLOURS[f"s{number}"])
        _paint_break_evens(axes, points)
        axes.legend(frameon=False, labelcolor=COLOURS["ink"], loc="upper right")


def _paint_side(axes: Axes, points: Sequence[StoragePoint], side: str, *, colour: str) -> None:
    """Draw the medians of a side, and what was predicted."""
    rates = [point.rate for point in points]
    axes.plot(
        rates, [point.seconds[side] for point in points], "o-", color=colour, linewidth=1.6, markersize=9,
        markerfacecolor=COLOURS["page"], markeredgewidth=2, clip_on=False, zorder=3, label=NAMES[side],
    )  # fmt: skip
    predicted = [point.predicted[side] for point in points]
    axes.plot(rates, predicted, "--", color=colour, linewidth=1.4, label="as predicted")


def _paint_break_evens(axes: Axes, points: Sequence[StoragePoint]) -> None:
    from tests.benchmarks.codec_table import break_even, gains_of

    for gains, style, word, level in zip(
        gains_of(points), ("--", "-"), ("predicted", "measured"), (0.02, 0.08), strict=True
    ):
        place = break_even(gains)
        if place is not None:
            axes.axvline(place, color=COLOURS["muted"], linestyle=style, linewidth=1.2, zorder=1)
            axes.annotate(
                f"{word} break-even: {place / 1e6:,.0f} MB/s", (place, level), (-6, 0), ha="right",
                xycoords=axes.get_xaxis_transform(), textcoords="offset points", color=COLOURS["muted"],
            )  # fmt: skip
