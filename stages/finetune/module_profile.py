"""A memory profile: what a training step takes, module by module and in all, as a table and as JSON."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offstage.stages.empty_init.module_usage import Shapes
from offstage.stages.empty_init.step_peaks import TrainingPeaks
from offstage.stages.units import format_bytes

TOLD_RATIOS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0)
"""The ratios of activation offload whose peaks are told."""
COLUMNS = ("module", "type", "parameters", "activations", "calls", "inputs", "outputs", "peak", "forward")
_FIGURES = frozenset({"parameters", "activations", "calls", "peak", "forward"})
_WIDTH = 500
"""Columns of a table that is text: as many as it needs, since lines that are broken can't be read."""


@dataclass(frozen=True, slots=True)
class ModuleProfile:
    """What the calls of one module take in the forward, with what is called inside them.

    ``name`` is dotted, the model's is empty; ``type`` is its class. ``activation_bytes`` are saved for the backward in
    its calls, each storage once; weights, and what was there before the forward, aren't among them. ``inputs`` and
    ``outputs`` are the shapes of the first call's tensors. ``peak_bytes`` is the most that a call held over what was
    there before it. ``seconds`` are those of all ``calls``, null without data.
    """

    name: str
    type: str
    parameter_bytes: int
    activation_bytes: int
    calls: int
    inputs: Shapes
    outputs: Shapes
    peak_bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """What a step of a model takes: ``modules`` in the order of their first calls, and in all.

    ``forward_peak_bytes`` and ``peak_bytes`` are the most that the forward, and the whole step with its backward, held
    over what was there before; gradients count, weights and inputs don't. ``peaks`` predict the step's peak at every
    ratio of activation offload; null where fake tensors can't trace the model, and ``unrehearsed`` says why.
    """

    modules: tuple[ModuleProfile, ...]
    parameter_bytes: int
    activation_bytes: int
    gradient_bytes: int
    forward_peak_bytes: int
    peak_bytes: int
    seconds: float | None
    peaks: TrainingPeaks | None
    unrehearsed: str | None = None

    def table(self, depth: int | None = None) -> Table:
        """Return a table for ``rich``: a row a module, those at most ``depth`` levels below the model; then totals.

        A module's figures are in those of the modules around it, so columns don't add up to the totals.
        """
        table = Table(box=None, pad_edge=False, header_style="dim", show_footer=True)
        table.caption, table.caption_justify = self._caption(), "left"
        totals = self.parameter_bytes, self.activation_bytes, self.forward_peak_bytes
        in_all = [format_bytes(count) for count in totals]
        footers = ["in all", "", *in_all[:2], "", "", "", in_all[2], _milliseconds(self.seconds)]
        for column, footer in zip(COLUMNS, footers, strict=True):
            table.add_column(column, footer=footer, justify="right" if column in _FIGURES else "left", no_wrap=True)
        for row in self.modules:
            if row.name and (depth is None or row.name.count(".") < depth):
                table.add_row(*_cells(row))
        return table

    def json(self) -> str:
        """Return all of it as JSON: bytes, seconds, and in ``peak_by_ratio`` the peaks predicted with offload."""
        data = asdict(self)
        del data["peaks"]
        peaks = {str(ratio): peak for ratio, peak in self.peak_by_ratio().items()}
        return json.dumps({**data, "peak_by_ratio": peaks}, indent=1)

    def peak_by_ratio(self, ratios: Iterable[float] = TOLD_RATIOS) -> dict[float, int]:
        """Return the peaks that are predicted at ``ratios`` of activation offload; none without a rehearsal."""
        return {} if self.peaks is None else {ratio: self.peaks.peak(ratio) for ratio in ratios}

    def __str__(self) -> str:
        console = Console(file=io.StringIO(), width=_WIDTH)
        with console.capture() as captured:
            console.print(self.table())
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def _caption(self) -> str:
        step = f"a step: {format_bytes(self.peak_bytes)} at its peak, {format_bytes(self.gradient_bytes)} of gradients"
        offloaded = [f"{ratio:g}: {format_bytes(peak)}" for ratio, peak in self.peak_by_ratio().items() if ratio]
        return f"{step}\nwith activation offload {', '.join(offloaded)}" if offloaded else step


def _cells(row: ModuleProfile) -> list[str]:
    return [
        escape(row.name),
        escape(row.type),
        format_bytes(row.parameter_bytes),
        format_bytes(row.activation_bytes),
        str(row.calls),
        _told(row.inputs),
        _told(row.outputs),
        format_bytes(row.peak_bytes),
        _milliseconds(row.seconds),
    ]


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1000:.2f} ms"


def _told(shapes: Shapes) -> str:
    return ", ".join("x".join(map(str, shape)) or "scalar" for shape in shapes)
