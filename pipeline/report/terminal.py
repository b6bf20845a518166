"""The report on the terminal: the table of jobs, what failed, and what changed between two runs."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.report.comparison import RunComparison, Section
from pipeline.report.summary import Summary
from pipeline.report.table import Column

_COLOURS = {"completed": "green", "failed": "red", "interrupted": "yellow", "running": "yellow"}


def show_summary(screen: Console, summary: Summary) -> None:
    """Print the table of jobs, then the reasons of those that failed and the files that can't be read."""
    columns = [column for column in summary.table if column.title != "reason"]
    if columns:
        screen.print(_table(columns))
    if summary.noise.pairs:
        screen.print(f"\n{escape(summary.noise.told())}")
    for job in summary.failures:
        screen.print(f"\n{escape(job.name)} {escape(job.run.status)}: {escape(job.run.failure)}")
    for problem in summary.problems:
        screen.print(f"\n{escape(str(problem.path))}: {escape(problem.reason)}")


def _table(columns: Sequence[Column]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        heading = (
            f"{escape(column.title)}\n{column.unit}" if any(each.unit for each in columns) else escape(column.title)
        )
        table.add_column(heading, justify="right" if column.numeric else "left", overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = (_coloured(column, escape(cell)) for column, cell in zip(columns, row, strict=True))
        table.add_row(*cells)
    return table


def _coloured(column: Column, cell: str) -> str:
    colour = _COLOURS.get(cell.partition(",")[0]) if column.title == "status" else None
    return f"[{colour}]{cell}[/]" if colour else cell


def show_comparison(screen: Console, comparison: RunComparison) -> None:
    """Print what changed between two runs, subject by subject."""
    screen.print(f"A {escape(str(comparison.before))}\nB {escape(str(comparison.after))}")
    for section in comparison.sections:
        screen.print(f"\n[bold]{section.title}[/]")
        if section.changes:
            screen.print(_changes(section))
        for note in section.notes:
            screen.print(escape(note))


def _changes(section: Section) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    headings = ["", "A", "B", "B ÷ A"] if section.numeric else ["", "A", "B"]
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if section.numeric and place else "left", overflow="fold")
    for change in section.changes:
        cells = [change.key, change.before, change.after, change.ratio]
        table.add_row(*map(escape, cells[: len(headings)]))
    return table
