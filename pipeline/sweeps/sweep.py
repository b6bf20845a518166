"""A sweep at work in its folder: which jobs it has, and which of them are done.

Two processes that go on with one sweep would run its jobs twice: who has the lock of ``sweep.json`` may.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.cache.locks import Grant, locked
from offstage.pipeline.errors import StorageError
from offstage.pipeline.job_folder import completed
from offstage.pipeline.record import RECORD
from offstage.pipeline.sweeps.record import SWEEP, SweepJob, SweepRecord


class Sweep:
    """The sweep ``record`` in ``folder``: a new one, or what is left to do of the one that lies there (``resumed``).

    Raises:
        ConfigError: another sweep lies there; the error has the first difference.
        StorageError: another process is at it, runs lie there that no sweep tells of, or the folder can't be used.
    """

    def __init__(self, folder: Path, record: SweepRecord) -> None:
        self.folder = folder
        self._refuse_stray_runs(record)
        with mendable(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as holding:
            grant = holding.enter_context(locked(folder / SWEEP, work="runs this sweep", wait=False))
            if grant is Grant.BUSY:
                raise StorageError(
                    f"{folder}: another process is at this sweep; wait for it to end, or interrupt it, and resume then"
                )
            self.resumed = folder.joinpath(SWEEP).exists()
            self._record = SweepRecord.load(folder) if self.resumed else record
            if self.resumed:
                self._record.refuse_other(folder, record)
            else:
                self._record.create(folder)
            self._held = holding.pop_all()

    @property
    def jobs(self) -> Sequence[SweepJob]:
        """The jobs that are known: all of them, where they don't follow from each other."""
        return self._record.jobs

    @property
    def record(self) -> SweepRecord:
        """What the folder has of the sweep."""
        return self._record

    def job(self, number: int) -> SweepJob | None:
        """Return the job of that number, null where it isn't known."""
        return next((job for job in self.jobs if job.number == number), None)

    def expect(self, job: SweepJob) -> None:
        """Add a job that could not be foreseen, before it begins.

        Raises:
            ConfigError: the sweep that is resumed has another job of that number.
        """
        if self.job(job.number) is None:
            self._record = self._record.extended(self.folder, job)
        else:
            self._record.refuse_job(self.folder, job)

    def has_completed(self, number: int) -> bool:
        """Whether the job is done, so that there is nothing to run."""
        job = self.job(number)
        return job is not None and completed(self.folder / job.folder, job.overrides)

    def close(self) -> None:
        """Let others go on with the sweep."""
        self._held.close()

    def _refuse_stray_runs(self, record: SweepRecord) -> None:
        if self.folder.joinpath(SWEEP).exists():
            return
        for job in record.jobs:
            if self.folder.joinpath(job.folder, RECORD).exists():
                raise StorageError(
                    f"{self.folder / job.folder}: a run lies here, and no {SWEEP} in {self.folder} says of which "
                    "sweep; choose another folder with hydra.sweep.dir"
                )
