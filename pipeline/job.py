"""One job: the record of a run whose config is resolved, carried to its end in this process.

Run as a process of its own (``python -P -c "from offstage.pipeline.commands import job; job()" FOLDER``) it is
what a sweep's jobs, a capped run and a replay have in common: nothing is composed again, so today's defaults have no
part in it.
"""

from __future__ import annotations

import argparse
import json
import logging
import logging.config
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.command_exit import run_command
from offstage.pipeline.environment import allocator_settings, imported_packages
from offstage.pipeline.errors import BudgetError
from offstage.pipeline.installed_stages import declared_metrics, work_of
from offstage.pipeline.kept_memory import keep_little
from offstage.pipeline.memory_cgroups import KERNEL_BYTES, CapError, MemoryGroup
from offstage.pipeline.memory_monitor import MemoryMonitor
from offstage.pipeline.peers import Peers, excuse_this, in_step
from offstage.pipeline.process_setup import die_with_parent
from offstage.pipeline.record import RunRecord, host_summary, never_left_running
from offstage.pipeline.replay_inputs import hold
from offstage.pipeline.run_screen import RunScreen
from offstage.pipeline.runner import Observer, Runner, check_config
from offstage.pipeline.stage import Report, SourceFiles
from offstage.pipeline.terminal import announce, shorten

LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"

_log = logging.getLogger("offstage")


def perform(
    record: RunRecord, *, started: float, group: MemoryGroup | None = None, expected: RunRecord | None = None,
    cache: Path | None = None,
) -> int:  # fmt: skip
    """Run the pipeline as ``record.config`` says, show what came out, and return 0.

    Raises what went wrong, after the record says so. ``started`` is when the command began, in seconds of
    ``time.perf_counter``; ``group`` caps the memory as soon as the plan is known; ``expected`` is the run that this one
    repeats: a checkpoint or adapter that isn't the same any more ends it; ``cache`` replaces the cache in ``outputs``.
    """
    keep_little()
    runner: Runner | None = None
    with RunScreen(record) as screen, MemoryMonitor() as monitor:
        try:
            with in_step(record.config, record.run.environment, record.fail) as hosts, mendable():
                stages = check_config(record.config)
                record.note_metrics(declared_metrics(record.config["stages"]))
                watch = _Watch(record, screen, group, expected)
                runner = Runner(stages, record.config, record=record, monitor=monitor, observer=watch, cache=cache)
                reports = runner.run()
                watch.ended(hosts)
        except BaseException as error:
            _close(record, monitor, error=error, stage=runner.at_work if runner else None)
            raise
        _close(record, monitor)
    seconds, folder = time.perf_counter() - started, shorten(record.path.parent)
    closing = f"{len(stages)} stage{'s' * (len(stages) != 1)} in {seconds:.2f} s, {folder}"
    screen.finish(reports, "\n".join(filter(None, [record.run.untested, closing])))
    record.require()
    return 0


def _close(
    record: RunRecord, monitor: MemoryMonitor, *, error: BaseException | None = None, stage: str | None = None
) -> None:
    """Close ``record`` with the peaks of the run and with how it ended: the ``error``, the stage that it came from."""
    with record.written_once():
        host, resident = monitor.peak_host_bytes, monitor.peak_host_rss_bytes
        record.merge(Report(metrics={"peak_host_bytes": host, "peak_host_rss_bytes": resident}))
        record.note_series("cpu", monitor.series)
        if "torch" in sys.modules:  # what is served from the cache imports none of what it was made with
            record.note(packages=imported_packages())
            if (settings := allocator_settings()) is not None:
                record.note(allocator=settings)
        if error is None:
            record.finish("completed")
            _log.info("completed")
        else:
            record.fail(error, stage=stage)
            _log.info("%s in %s: %s", record.data["status"], stage or "the config", error)


def cap_bytes(record: RunRecord) -> int | None:
    """Return the host memory that a run may hold by its plan, null before there is one.

    It is what is predicted, or the budget that the config gives if that is more; a budget that was worked out is what
    the machine can give, and no promise of the run's.
    """
    memory = record.run.memory
    predicted = memory.predicted.get("cpu")
    if predicted is None:
        return None
    given = memory.budget.get("cpu") if record.config.get("max_memory") else None
    simulated = memory.simulated.get("cpu")
    return int(max(predicted, simulated or 0, given or 0)) + KERNEL_BYTES


class _Watch(Observer):
    """Says what is at work, caps the memory once the plan is known, and holds a replay against its original."""

    def __init__(
        self, record: RunRecord, screen: RunScreen, group: MemoryGroup | None, expected: RunRecord | None
    ) -> None:
        self._record, self._screen, self._group = record, screen, group
        self.sees_text = screen.is_live
        self._expected = expected.run if expected else None

    def keyed(self, stage: str, sources: SourceFiles) -> None:
        """Say that the stage is looked at; refuse a checkpoint, or an adapter, that isn't the recorded one."""
        announce(work_of(stage))
        if self._expected is not None:
            self._record.note_compared(hold(sources, self._expected, self._record.config))

    def begins(self, stage: str) -> None:
        """Show the stage on a terminal; set the cap before the first stage that comes after the plan."""
        announce(work_of(stage))
        allowed = cap_bytes(self._record)
        if self._group is None or allowed is None:
            return
        try:
            self._group.limit(allowed)
        except CapError as error:
            raise BudgetError(
                f"max_memory.cpu: the process holds more than the {allowed} bytes that its plan allows, before any "
                f"weight is there ({error}); set a larger max_memory.cpu, or run with enforce_memory=false"
            ) from error
        how = f"cgroup v{self._group.version}, {self._group.folder}"
        self._record.note_enforcement(bytes_allowed=allowed, how=how)
        _log.info("memory capped at %d bytes (%s)", allowed, how)
        self._group = None

    def shows(self, stage: str, text: str, reports: Mapping[str, Report]) -> None:
        """Put the text on the screen."""
        self._screen.show_text(stage, text, reports)

    def ended(self, hosts: Peers | None) -> None:
        """Say so where there was nothing to cap, and what each of the ``hosts`` came to."""
        if self._group is not None:
            last = self._record.run.stages[-1:]
            why = "served from the cache" if last and last[0].cached else "no stage came after the plan"
            self._record.note_enforcement(bytes_allowed=None, how=f"nothing was loaded: {why}")
        if hosts is not None:
            self._record.note(hosts=hosts.exchange(host_summary(self._record)))


def main() -> None:
    """Run the job whose record lies in the folder that the first argument names, then exit with its code."""
    started = time.perf_counter()
    parser = argparse.ArgumentParser(prog="offstage-job", description="Runs the job that a run folder describes.")
    parser.add_argument("folder", type=Path, help="the run's folder, with a run.json whose status is running")
    parser.add_argument("--parent", type=int, help="end with this process, which started this one")
    parser.add_argument("--group", type=Path, help="the memory group that this process is in")
    parser.add_argument("--version", type=int, choices=(1, 2), help="the version of the group's interface")
    parser.add_argument("--expected", type=Path, help="the record of the run that this one repeats")
    parser.add_argument("--cache", type=Path, help="a cache to use instead of the one in outputs")
    parser.add_argument("--logging", type=json.loads, help="what is logged, as logging.config takes it, in JSON")
    parser.add_argument("--debug", action="store_true", help="log everything")
    given = parser.parse_args()
    if given.parent is not None:
        die_with_parent(given.parent)
    run_command("offstage", lambda: _run(given, started), tell=excuse_this)


def _run(given: argparse.Namespace, started: float) -> int:
    configure_log(given.folder, chosen=given.logging, debug=given.debug)
    record = RunRecord.load(given.folder)
    group = MemoryGroup(given.group, given.version) if given.group else None
    with never_left_running(record):
        expected = RunRecord.load(given.expected) if given.expected else None
        return perform(record, started=started, group=group, expected=expected, cache=given.cache)


def configure_log(folder: Path, *, chosen: Mapping[str, Any] | None = None, debug: bool = False) -> None:
    """Log as ``chosen`` says, Hydra's job_logging; by default to ``run.log`` in ``folder``, and warnings on the screen.

    One whose root is null has nothing configured, as Hydra understands it.
    """
    if chosen is not None:
        if chosen.get("root") is not None:
            logging.config.dictConfig(dict(chosen))
        if debug:
            logging.getLogger().setLevel(logging.DEBUG)
        return
    file = logging.FileHandler(folder / "run.log", delay=True)
    screen = logging.StreamHandler(sys.stderr)
    screen.setLevel(logging.WARNING)
    level = logging.DEBUG if debug else logging.INFO
    logging.basicConfig(level=level, format=LOG_FORMAT, handlers=[file, screen], force=True)
