"""What a run shows: its stages and what they have to show, the text that it makes, what it cost.

Where nobody looks all of it is printed in the end. On a terminal a stage may show text while it makes it. What came
before is printed then, and the rest in the end, so that both read alike and nothing stands there twice.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import TracebackType

from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from offstage.pipeline.command_exit import discard_output
from offstage.pipeline.measurements import measurements, remarks
from offstage.pipeline.plain_data import printable
from offstage.pipeline.record import RunRecord
from offstage.pipeline.stage import Report
from offstage.pipeline.terminal import Screen, announce, plain_table


class RunScreen:
    """The screen of the run that ``record`` is of; a context manager, which ends a line that was begun."""

    def __init__(self, record: RunRecord) -> None:
        self._record, self._screen = record, Screen(soft_wrap=True)
        self._shown: set[str] = set()
        self._texts: set[str] = set()
        self._line_begun = False
        self.is_live = sys.stdout.isatty()
        """Whether somebody sees text while it is made."""

    def __enter__(self) -> RunScreen:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end_line()

    def show_text(self, stage: str, text: str, reports: Mapping[str, Report]) -> None:
        """Add ``text`` to what ``stage`` shows while it is at work; ``reports`` are those of the stages before it."""
        if stage not in self._texts:
            self._end_line()
            self._show_stages(reports)
            self._texts.add(stage)
            text = f"\n{text}"
        self._write(printable(text))

    def finish(self, reports: Mapping[str, Report], closing: str) -> None:
        """Print what isn't shown yet of the stages, then what was measured, and the line ``closing``."""
        self._end_line()
        self._show_stages(reports)
        for table in measurements(self._record.run):
            self._screen.print()
            self._screen.print(table)
        of_stages = [remark for report in reports.values() for remark in report.remarks]
        for remark in (*of_stages, *remarks(self._record.run)):
            self._screen.print(f"\n{printable(remark)}", markup=False)
        self._screen.print(f"\n{closing}", markup=False)

    def _show_stages(self, reports: Mapping[str, Report]) -> None:
        """Print what ran as a table, then what the stages have to show; each stage once."""
        fresh = {name: report for name, report in reports.items() if name not in self._shown}
        if self._texts:
            self._screen.print()
        self._screen.print(self._table(fresh))
        for name, report in fresh.items():
            if report.screen and name not in self._texts:
                self._screen.print(f"\n{printable(report.screen)}", markup=False)
        self._shown |= fresh.keys()

    def _table(self, reports: Mapping[str, Report]) -> Table:
        """Return a row for each of ``reports``; the columns are as wide whichever these are."""
        table = plain_table(header=not self._shown)
        names = [str(name) for name in self._record.config.get("stages", ())]
        table.add_column("stage", no_wrap=True, min_width=max(map(len, names), default=0))
        table.add_column("seconds", justify="right", no_wrap=True, min_width=len("seconds"))
        table.add_column("", no_wrap=True, min_width=len("cached"))
        table.add_column("host peak", justify="right", no_wrap=True, min_width=len("host peak"))
        table.add_column("", overflow="fold")
        for stage in self._record.run.stages:
            if stage.name in reports:
                origin = "timed" if stage.measured else "[green]cached[/]" if stage.cached else "made"
                peak, summary = decimal(int(stage.peak_host_bytes or 0)), reports[stage.name].summary
                table.add_row(stage.name, f"{stage.seconds or 0:.2f}", origin, peak, escape(printable(summary)))
        return table

    def _end_line(self) -> None:
        """End the text's line, and the one that says which work is under way."""
        if self._line_begun:
            self._write("\n")
        announce("")

    def _write(self, text: str) -> None:
        if not text:
            return
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except OSError:  # the terminal is gone: what is asked for is the run, and its record
            discard_output()
        self._line_begun = not text.endswith("\n")
