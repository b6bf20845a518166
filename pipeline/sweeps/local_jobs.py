"""Jobs on this machine: one after another, each in a process of its own that the sweep waits for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.core.utils import configure_log
from omegaconf import DictConfig

from offstage.pipeline.sweeps.job_run import SCREEN, JobEnd, is_debugging, run_job
from offstage.pipeline.sweeps.jobs import ComposedJob
from offstage.pipeline.sweeps.preparation import MachinePreparation
from offstage.pipeline.sweeps.progress import SweepProgress


class LocalJobs:
    """Runs the jobs of the sweep with this ``config``; ``show_all`` has tracebacks shown."""

    def __init__(self, config: DictConfig, *, show_all: bool) -> None:
        self._hydra, self._show_all = config.hydra, show_all
        self._preparation = MachinePreparation()

    def run(
        self, jobs: Sequence[ComposedJob], progress: SweepProgress, ended: Callable[[ComposedJob, JobEnd], None]
    ) -> None:
        """Run ``jobs``, and say of each how it ended; what all go by is measured of the idle machine before."""
        self._preparation.prepare([job.prepared.config for job in jobs])
        meanwhile = progress.refresh if sys.stderr.isatty() else None
        for job in jobs:
            progress.begin([job.known.number])
            job.write_files()
            screen = Path(job.prepared.folder, SCREEN)
            debug = is_debugging()
            how = run_job(job.prepared, show_all=self._show_all, debug=debug, output=screen, meanwhile=meanwhile)
            configure_log(self._hydra.hydra_logging, self._hydra.verbose)  # the job's has gone to its folder
            ended(job, how)
