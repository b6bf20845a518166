"""What a sweep is: ``sweep.json`` in its folder, written before the first job begins.

It has the command, and every job with its overrides and its folder. By it a sweep that was interrupted is shown whole,
jobs that never began too; and whoever goes on with it has the same jobs, or is told the first that differs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import create_file, mendable, replace_file
from offstage.pipeline.cache.fingerprint import changes
from offstage.pipeline.cache.locks import Grant, locked
from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import ConfigError, StorageError
from offstage.pipeline.job_folder import completed
from offstage.pipeline.record import RECORD
from offstage.pipeline.regular_files import parse_json, read_regular
from offstage.pipeline.signatures import is_signed, sign

SWEEP = "sweep.json"
_VERSION = 2
_SHORT = 12
"""So many characters of a fingerprint tell it from others."""


@dataclass(frozen=True, slots=True)
class SweepJob:
    """One job of a sweep. ``folder`` is relative to the sweep's.

    ``config`` is the fingerprint of its composed config: a file of an experiment may have changed since.
    """

    number: int
    overrides: tuple[str, ...]
    folder: str
    config: str


@dataclass(frozen=True, slots=True)
class SweepRecord:
    """A sweep: the arguments of its command and the folder that ran in, the config below all jobs, the jobs.

    ``sweeper`` names the class that decides on the jobs; only Hydra's own has all of them before the first
    (``foreseen``). ``files`` are the digests of the user's config files that it is composed of, by their names. By its
    ``signature`` the user's own command is known, and what it meant.
    """

    command: tuple[str, ...]
    cwd: str
    sweeper: str
    foreseen: bool
    base: Mapping[str, Any]
    jobs: tuple[SweepJob, ...]
    files: Mapping[str, str] = field(default_factory=dict, compare=False)
    signature: str | None = field(default=None, compare=False)

    def signed(self) -> SweepRecord:
        """Return the record as one of this user's."""
        return replace(self, signature=sign(SWEEP, self._given))

    @property
    def is_own(self) -> bool:
        """Whether this user gave the command, and it is as it was given."""
        return is_signed(SWEEP, self._given, self.signature)

    @property
    def _given(self) -> list[Any]:
        return [self.command, self.cwd, self.base, self.files]

    @classmethod
    def load(cls, folder: Path) -> SweepRecord:
        """Return the record in ``folder``.

        Raises:
            StorageError: there is none, or it isn't one of this release's.
        """
        path = folder / SWEEP
        with mendable(folder):
            try:
                text = read_regular(path)
            except FileNotFoundError as error:
                raise StorageError(f"{folder}: no {SWEEP} there; give the folder of a sweep") from error
        try:
            content = parse_json(text)
            if not isinstance(content, dict) or content.pop("schema_version", None) != _VERSION:
                raise ValueError(f"not of schema version {_VERSION}")
            return decode(cls, content)
        except ValueError as error:
            raise StorageError(f"{path}: no record of a sweep ({error}); give the folder of another sweep") from error

    def create(self, folder: Path) -> None:
        """Write the record, whole, to ``folder``, where none must be."""
        with mendable(folder):
            create_file(folder / SWEEP, self._text())

    def extended(self, folder: Path, job: SweepJob) -> SweepRecord:
        """Return the record with one ``job`` more, written over the one in ``folder``."""
        longer = replace(self, jobs=(*self.jobs, job))
        with mendable(folder):
            replace_file(folder / SWEEP, longer._text())
        return longer

    def refuse_changed(self, files: Mapping[str, str]) -> None:
        """Raise a ``ConfigError`` where one of the config ``files`` isn't as it was when the user began this sweep."""
        changed = [name for name, digest in files.items() if self.files.get(name) != digest]
        if changed:
            raise ConfigError(
                f"{', '.join(changed)}: this config file isn't as it was when the sweep began; restore it, or begin "
                "another sweep"
            )

    def refuse_other(self, folder: Path, other: SweepRecord) -> None:
        """Raise a ``ConfigError`` with the first thing in which ``other`` isn't this sweep, that of ``folder``."""
        if self.foreseen and len(self.jobs) != len(other.jobs):
            raise _other_sweep(folder, f"{len(self.jobs)} jobs there, {len(other.jobs)} here")
        # of a sweep that was moved with its project relative paths mean the same
        sweep = self if Path(self.cwd).is_dir() else replace(self, cwd=other.cwd)
        count = min(len(self.jobs), len(other.jobs))  # those of a search come one by one
        for first in islice(changes(sweep._compared(count), other._compared(count)), 1):
            raise _other_sweep(folder, f"{first.place} is {first.then!r} there, {first.now!r} here")

    def refuse_job(self, folder: Path, job: SweepJob) -> None:
        """Raise a ``ConfigError`` where this sweep, that of ``folder``, has another job of the number of ``job``."""
        alike = replace(self, jobs=tuple(own for own in self.jobs if own.number == job.number))
        alike.refuse_other(folder, replace(alike, jobs=(job,)))

    def _compared(self, count: int) -> dict[str, Any]:
        """Return what another sweep is held against, with the first ``count`` jobs: what was typed comes first."""
        values: dict[str, Any] = {"hydra.sweeper": self.sweeper}
        for job in self.jobs[:count]:
            values |= {f"override {place} of job {job.number}": given for place, given in enumerate(job.overrides, 1)}
        values |= {**self.base, "the folder that its command ran in": self.cwd}
        for job in self.jobs[:count]:
            composed = f"the config of job {job.number}, of files that changed since,"
            values |= {composed: job.config[:_SHORT], f"the folder of job {job.number}": job.folder}
        return values

    def _text(self) -> str:
        return json.dumps({"schema_version": _VERSION, **asdict(self)}, indent=1, default=str) + "\n"


def _other_sweep(folder: Path, difference: str) -> ConfigError:
    return ConfigError(
        f"hydra.sweep.dir: {folder} holds another sweep: {difference}; choose another folder, or go on with that one: "
        f"offstage-sweep resume {folder}"
    )


def own_overrides(jobs: Sequence[SweepJob]) -> dict[int, str]:
    """Return, by the job's number, those of its overrides that not all jobs have; of a single job all."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return {job.number: " ".join(each for each in job.overrides if each not in common) for job in jobs}


def resume_command(folder: Path) -> str:
    """Return the command that does what isn't done of the sweep in ``folder``."""
    return f"offstage-sweep resume {shlex.quote(str(folder))}"


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
