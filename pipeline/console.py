"""One job of the command: a composed config in; a run folder, a record and a summary on the screen out."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from rich.console import Console
from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from pipeline.config import resolve
from pipeline.environment import environment
from pipeline.memory import MemoryMonitor
from pipeline.record import RunRecord
from pipeline.runner import Runner, check_config
from pipeline.stage import Report

WIDTH_OF_FILES = 200
"""Characters a line where the output is no terminal, so that nothing is folded that somebody may search for."""


def run_job(config: DictConfig, *, started: float) -> int:
    """Run the pipeline once and return 0; raises what went wrong, after the record says so.

    ``started`` is when the command began, in seconds of ``time.perf_counter``.
    """
    hydra = HydraConfig.get()
    folder = Path(hydra.runtime.output_dir)
    record = RunRecord.start(
        folder,
        overrides=[str(override) for override in hydra.overrides.task],
        config={},
        environment=environment(),
    )
    console = Console(highlight=False, soft_wrap=True, width=None if sys.stdout.isatty() else WIDTH_OF_FILES)
    with MemoryMonitor() as monitor, _Ending(record, monitor) as ending:
        record.config = resolve(config)
        stages = check_config(record.config)
        runner = ending.runner = Runner(stages, record.config, record=record, monitor=monitor, announce=announce)
        reports = runner.run()
    announce("")
    show(console, record.data, reports)
    console.print(f"\n{len(stages)} stages in {time.perf_counter() - started:.2f} s, {shorten(folder)}")
    return 0


def announce(stage: str) -> None:
    """Say on a terminal which stage is at work, on a line that the next one, or a progress bar, writes over."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{stage and stage + ' …'}")
        sys.stderr.flush()


class _Ending:
    """Closes a record with the status that fits how the context is left, and with the peaks of the run."""

    def __init__(self, record: RunRecord, monitor: MemoryMonitor) -> None:
        self.runner: Runner | None = None
        self._record, self._monitor = record, monitor

    def __enter__(self) -> _Ending:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _trace: Any) -> None:
        peaks = {
            "peak_host_bytes": self._monitor.peak_host_bytes,
            "peak_host_rss_bytes": self._monitor.peak_host_rss_bytes,
        }
        self._record.merge(Report(metrics=peaks))
        if error is None:
            self._record.finish("completed")
            return
        stage = self.runner.at_work if self.runner else None
        self._record.finish("interrupted" if kind is KeyboardInterrupt else "failed", error=error, stage=stage)


def show(console: Console, record: Mapping[str, Any], reports: Mapping[str, Report]) -> None:
    """Print what ran as a table, then what the stages have to show."""
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


def shorten(folder: Path) -> str:
    """Return ``folder`` relative to the current folder where it lies below it."""
    here = Path.cwd()
    return str(folder.relative_to(here) if folder.is_relative_to(here) else folder)
