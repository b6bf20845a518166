"""The report on the terminal: the table of jobs, what failed, and what changed between two runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offstage.pipeline.report.comparison import RunComparison, Section
from offstage.pipeline.report.quantities import listed, shorten
from offstage.pipeline.report.summary import Summary
from offstage.pipeline.report.table import Column
from offstage.pipeline.terminal import COLOURS, plain_table

MOST_ROWS = 60
"""So many jobs are listed: more of them run off a screen."""
_WIDEST = 28
"""So many characters of a cell are shown."""
_GAP = 2


def show_summary(screen: Console, summary: Summary) -> None:
    """Print the table of jobs, then the reasons of those that failed and the files that can't be read."""
    first = [
        replace(one, cells=tuple(shorten(cell, _WIDEST) for cell in one.cells[:MOST_ROWS])) for one in summary.table
    ]
    blocks = list(_blocks(first, room=screen.width))
    for columns in blocks:
        screen.print(_table(columns), end="\n" if columns is blocks[-1] else "\n\n")
    if len(summary.jobs) > MOST_ROWS:
        screen.print(f"\nThe first {MOST_ROWS} of {len(summary.jobs):,} jobs; the page has them all.")
    if summary.noise.pairs:
        screen.print(f"\n{escape(summary.noise.describe())}")
    for failure in summary.failures[:MOST_ROWS]:
        names = listed([job.name for job in failure.jobs])
        screen.print(f"\n{escape(names)} {escape(failure.status)}: {escape(failure.reason)}")
    for problem in summary.problems[:MOST_ROWS]:
        screen.print(f"\n{escape(str(problem.path))}: {escape(problem.reason)}")


def _blocks(columns: Sequence[Column], *, room: int) -> Iterator[list[Column]]:
    """Yield ``columns`` in blocks that ``room`` characters hold side by side, each with the job's name before it."""
    block: list[Column] = []
    for column in columns:
        if len(block) > 1 and sum(map(_width, [*block, column])) - _GAP > room:
            yield block
            block = block[:1]
        block.append(column)
    if block:
        yield block


def _width(column: Column) -> int:
    return max(map(cell_len, (column.title, column.unit, *column.cells))) + _GAP


def _table(columns: Sequence[Column]) -> Table:
    has_units = any(each.unit for each in columns)
    headings = [(f"{each.title}\n{each.unit}" if has_units else each.title, each.numeric) for each in columns]
    table = plain_table(headings, folded=[heading for heading, _ in headings])
    for row in zip(*(column.cells for column in columns), strict=True):
        cells = (_coloured(column, escape(cell)) for column, cell in zip(columns, row, strict=True))
        table.add_row(*cells)
    return table


def _coloured(column: Column, cell: str) -> str:
    colour = COLOURS.get(cell.partition(",")[0]) if column.title == "status" else None
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
    headings = ["", "A", "B", "B ÷ A"] if section.numeric else ["", "A", "B"]
    table = plain_table([(heading, section.numeric and heading != "") for heading in headings], folded=headings)
    for change in section.changes:
        cells = [change.key, change.before, change.after, change.ratio]
        table.add_row(*map(escape, cells[: len(headings)]))
    return table
