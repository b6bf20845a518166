"""What a sweep is: ``sweep.json`` in its folder, written before the first job begins.

It has the command, and every job with its overrides and its folder. By it a sweep that was interrupted is shown whole,
jobs that never began too; and whoever goes on with it has the same jobs, or is told the first that differs.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import create_file, mendable, replace_file
from offstage.pipeline.cache.fingerprint import changes
from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import ConfigError, StorageError
from offstage.pipeline.regular_files import parse_json, read_regular
from offstage.pipeline.signatures import is_signed, sign

SWEEP = "sweep.json"
_VERSION = 2


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
        difference = self._difference(other)
        if difference:
            raise _other_sweep(folder, difference)

    def refuse_job(self, folder: Path, job: SweepJob) -> None:
        """Raise a ``ConfigError`` where this sweep, that of ``folder``, has another job of the number of ``job``."""
        difference = next((_difference(known, job) for known in self.jobs if known.number == job.number), "")
        if difference:
            raise _other_sweep(folder, difference)

    def _difference(self, other: SweepRecord) -> str:
        """Return the first thing in which two sweeps differ, empty where nothing does: what was typed comes first."""
        pairs = list(zip(self.jobs, other.jobs, strict=False))
        typed = (_differing_overrides(then, now) for then, now in pairs)
        change = next(changes(self.base, other.base), None)
        found = [
            f"hydra.sweeper is {self.sweeper} there, {other.sweeper} here" if self.sweeper != other.sweeper else "",
            f"{len(self.jobs)} jobs there, {len(other.jobs)} here" if self._has_others(other) else "",
            next(filter(None, typed), ""),
            f"{change.place} is {change.then!r} there, {change.now!r} here" if change is not None else "",
            f"its command ran in {self.cwd}, this one runs in {other.cwd}" if self._ran_elsewhere(other) else "",
            next(filter(None, (_difference(then, now) for then, now in pairs)), ""),
        ]
        return next(filter(None, found), "")

    def _has_others(self, other: SweepRecord) -> bool:
        return self.foreseen and len(self.jobs) != len(other.jobs)

    def _ran_elsewhere(self, other: SweepRecord) -> bool:
        """Whether relative paths mean others; of a sweep that was moved with its project they mean the same."""
        return self.cwd != other.cwd and Path(self.cwd).is_dir()

    def _text(self) -> str:
        return json.dumps({"schema_version": _VERSION, **asdict(self)}, indent=1) + "\n"


def _other_sweep(folder: Path, difference: str) -> ConfigError:
    return ConfigError(
        f"hydra.sweep.dir: {folder} holds another sweep: {difference}; choose another folder, or go on with that one: "
        f"offstage-sweep resume {folder}"
    )


def _difference(then: SweepJob, now: SweepJob) -> str:
    """Return the first thing in which two jobs of one number differ, empty where nothing does."""
    found = _differing_overrides(then, now)
    if not found and then.config != now.config:
        return f"job {then.number} has another config, from files that changed since"
    if not found and then.folder != now.folder:
        return f"job {then.number} lies in {then.folder} there, in {now.folder} here"
    return found


def _differing_overrides(then: SweepJob, now: SweepJob) -> str:
    for old, new in zip_longest(then.overrides, now.overrides):
        if old is None or new is None:
            return f"job {then.number} has {new or old} {'there' if new is None else 'here'} alone"
        if old != new:
            return f"job {then.number} has {old} there, {new} here"
    return ""


def own_overrides(jobs: Sequence[SweepJob]) -> dict[int, str]:
    """Return, by the job's number, those of its overrides that not all jobs have; of a single job all."""
    common = set.intersection(*(set(job.overrides) for job in jobs)) if len(jobs) > 1 else set()
    return {job.number: " ".join(each for each in job.overrides if each not in common) for job in jobs}


def resume_command(folder: Path) -> str:
    """Return the command that does what isn't done of the sweep in ``folder``."""
    return f"offstage-sweep resume {shlex.quote(str(folder))}"
