"""What a run shows on the screen."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from pipeline.command_exit import discard_output
from pipeline.measurements import measurements
from pipeline.stage import Report

_WIDTH_OF_FILES = 200
"""Characters a line where the output is no terminal, so that nothing is folded that somebody may search for."""


class Screen(Console):
    """The terminal, or the file that takes its place; a pipe that nobody reads any more ends no run."""

    def __init__(self, *, soft_wrap: bool = False) -> None:
        width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
        super().__init__(highlight=False, soft_wrap=soft_wrap, width=width)

    def on_broken_pipe(self) -> None:
        """Go on without an output: what is asked for is the run, and its record."""
        self.quiet = True
        discard_output()


def announce(stage: str) -> None:
    """Say on a terminal which stage is at work, on a line that the next one, or a progress bar, writes over."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{stage and stage + ' …'}")
        sys.stderr.flush()


def show(console: Console, record: Mapping[str, Any], reports: Mapping[str, Report]) -> None:
    """Print what ran as a table, then what the stages have to show, and what was measured."""
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("stage", no_wrap=True)
    table.add_column("seconds", justify="right", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("host peak", justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    for stage in record["stages"]:
        made = "[green]cached[/]" if stage["cached"] else "made"
        peak = decimal(stage["peak_host_bytes"] or 0)
        summary = escape(reports[stage["name"]].summary)
        table.add_row(stage["name"], f"{stage['seconds']:.2f}", made, peak, summary)
    console.print(table)
    for report in reports.values():
        if report.screen:
            console.print(f"\n{escape(report.screen)}")
    for figures in measurements(record):
        console.print()
        console.print(figures)


def shorten(folder: Path) -> str:
    """Return ``folder`` relative to the current folder where it lies below it."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
