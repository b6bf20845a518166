"""What Hydra calls for a run: a composed config in; a run folder with a record out. A sweep has a sweeper."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.command_exit import last_resort
from offstage.pipeline.config import resolve
from offstage.pipeline.environment import environment
from offstage.pipeline.hydra_messages import composing
from offstage.pipeline.job import perform
from offstage.pipeline.objective import require_numbers
from offstage.pipeline.record import RunRecord, never_left_running
from offstage.pipeline.tracking.options import usable_tracker

if TYPE_CHECKING:
    from offstage.pipeline.sweeps.record import SweepRecord


@dataclass(slots=True)
class Task:
    """A command: what Hydra calls with a run's config, or hands to the sweeper.

    ``command`` are the arguments that it was given, those of the sweep that is ``resumed`` if one is; ``files`` are the
    config files that it is made of, by their digests; ``code`` is the exit code so far.
    """

    started: float
    command: Sequence[str] = ()
    resumed: SweepRecord | None = None
    files: dict[str, str] = field(default_factory=dict)
    code: int = 0

    def __call__(self, config: DictConfig) -> None:
        """Carry out a run. What a user can mend is printed, not raised."""
        self.code = last_resort(lambda: self._run(config))

    def refuse_changed(self) -> None:
        """Raise a ``ConfigError`` where a config file that was read isn't what it was for the sweep that is resumed."""
        if self.resumed is not None:
            self.resumed.refuse_changed(self.files)

    def _run(self, config: DictConfig) -> int:
        with composing():
            record = _start_record(config)
        with tracked(record):
            if record.config["enforce_memory"] is True:
                from offstage.pipeline.job_process import supervise

                logged = json.dumps(OmegaConf.to_container(HydraConfig.get().job_logging, resolve=True))
                code = supervise(record, capped=True, options=["--logging", logged])
            else:
                code = perform(record, started=self.started)
        if code == 0:
            require_numbers(RunRecord.load(record.path).run)
        return code


def _start_record(config: DictConfig) -> RunRecord:
    """Return the record of a run that begins now, in Hydra's folder for it, its config resolved.

    Raises what is wrong with the config, after the record says so.
    """
    hydra = HydraConfig.get()
    record = RunRecord.start(
        Path(hydra.runtime.output_dir),
        overrides=[str(override) for override in hydra.overrides.task],
        config={},
        environment=environment(),
    )
    # with hydra.job.chdir the current folder is the run's; paths aren't meant so
    with never_left_running(record), mendable(), chdir(hydra.runtime.cwd):
        record.config = resolve(config)
    return record


@contextmanager
def tracked(record: RunRecord, *, sweep: Path | None = None) -> Iterator[None]:
    """Carry out the run of ``record`` in the block; whatever that comes to, the record says it.

    The run is logged to the tracker that its config names, if any, below its ``sweep`` if it has one.
    """
    with never_left_running(record):
        tracker = usable_tracker(record.config)
        if tracker is None:
            yield
            return
        from offstage.pipeline.tracking.trackers import require_tracker, track

        if tracker.uri and sweep is None:  # a sweep's was asked before: one that is away for a while costs no job
            require_tracker(tracker)
        try:
            yield
        finally:
            track(tracker, record.path.parent, sweep=sweep)
