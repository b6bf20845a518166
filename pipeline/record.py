"""The run record: ``run.json``, from which a run can be read, compared and replayed.

It is written when the run starts, after each stage and at the end, each time whole. A run that was killed
leaves a record that says ``running`` and tells how far it came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import create_file, mendable, replace_file
from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.pipeline.decoding import Reading, decode, encode
from offstage.pipeline.errors import ConfigError, StorageError, is_interrupt
from offstage.pipeline.metrics import MetricTable
from offstage.pipeline.peers import own_rank
from offstage.pipeline.plain_data import as_json, printable_data
from offstage.pipeline.regular_files import parse_json, read_regular
from offstage.pipeline.run_schema import SCHEMA_VERSION, Enforcement, HostRun, Run, RunError, StageRun, Status
from offstage.pipeline.signatures import is_signed, places_in, sign
from offstage.pipeline.stage import TENSORS, Config, Report, SourceFiles

RECORD, HOSTS = "run.json", ".hosts"
"""A run's record in its folder, and where the other hosts have their folders that run a sweep's job with it."""
_ROWS = ("outputs", "repeats", "steps", "hosts", "layers")
"""The sections that have rows, maybe millions: those of the last stage that reports any."""
_LISTED = 8
"""How many jobs of a sweep an error names."""


class RecordError(StorageError):
    """A file that should be a run's record, and isn't one that can be read: ``reason`` says why, without the file."""

    def __init__(self, path: Path, reason: str) -> None:
        super().__init__(f"{path}: {reason}; restore the file, or give the folder of another run")
        self.reason = reason


def read_run(path: Path) -> Run:
    """Return the run that the file ``path`` records, as far as it can be read, with its text printable.

    It may have failed, be at work or have been killed, and its record may come from anywhere: a value that isn't of its
    type is as good as none. Raises ``RecordError`` where the file is no record, or one of its sections no section.
    """
    try:
        text, when = read_regular(path), path.stat().st_mtime
    except OSError as error:
        raise RecordError(path, error.strerror or str(error)) from error
    run = _decoded(path, printable_data(_parsed(path, text)), "lenient")
    return replace(run, written=datetime.fromtimestamp(when).isoformat(" ", "minutes"))


def _parsed(path: Path, text: bytes) -> dict[str, Any]:
    """Return the object that ``text`` is in JSON; a ``RecordError`` where it is no record of this schema."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise RecordError(path, f"no JSON that can be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("status"), str):
        raise RecordError(path, "JSON, but no run record: it has no status")
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise RecordError(path, f"schema_version {version!r}; this offstage reads {SCHEMA_VERSION}")
    return content


def _decoded(path: Path, content: Mapping[str, Any], reading: Reading) -> Run:
    try:
        return replace(decode(Run, content, reading), folder=path.parent)
    except ValueError as error:
        raise RecordError(path, f"damaged: {str(error).removeprefix('.')}") from error


class RunRecord:
    """The record of one run, and the file that holds it."""

    def __init__(self, path: Path, content: dict[str, Any]) -> None:
        self._path = path
        self._content = content
        self._run: Run | None = None
        self._written = ""
        self._holds = False

    @classmethod
    def start(
        cls,
        folder: Path,
        *,
        overrides: Sequence[str],
        config: Config,
        environment: Mapping[str, Any],
    ) -> RunRecord:
        """Create ``run.json`` in ``folder``, status running; the folder is made where it is missing.

        Raises:
            StorageError: there is a record already, of another run; or the folder can't be written to.
        """
        places = {
            "run": str(folder.absolute()),
            "folder": str(Path.cwd()),
            "conf": str(resources.files("offstage.conf")),
        }
        content = Run(
            status="running",
            started=_now(),
            overrides=tuple(overrides),
            config=config,
            signature=sign(RECORD, places_in(config, places)),
            environment=environment,
            places=places,
            stages=(),
            metrics={},
            outputs=(),
        )
        record = cls(folder / RECORD, encode(content))
        record._create()
        return record

    @classmethod
    def load(cls, path: Path) -> RunRecord:
        """Return the record in ``path``, a ``run.json`` or the folder of one, to be read or carried on.

        Raises:
            StorageError: there is none, or it isn't one of this release's.
        """
        file = path / RECORD if path.is_dir() else path
        with mendable(file.parent):
            try:
                text = read_regular(file)
            except FileNotFoundError as error:
                raise StorageError(_no_record(path)) from error
        record = cls(file, _parsed(file, text))
        record._run = record.run
        return record

    @property
    def path(self) -> Path:
        """Where the record lies."""
        return self._path

    @property
    def data(self) -> Mapping[str, Any]:
        """What the file holds, as JSON has it, to be read only."""
        return self._content

    @property
    def run(self) -> Run:
        """What the file says; a ``RecordError`` names the key that isn't as a run has it."""
        if self._run is None:
            self._run = _decoded(self._path, self._content, "open")
        return self._run

    @property
    def config(self) -> Config:
        """The run's config; resolved once that is assigned, which writes it."""
        config: Config = self._content["config"]
        return config

    @config.setter
    def config(self, resolved: Config) -> None:
        signature = sign(RECORD, places_in(resolved, self._content.get("places")))
        self._content |= {"config": resolved, "signature": signature}
        self._write()

    @property
    def is_own(self) -> bool:
        """Whether a command of this user wrote the config, and it names the same places as then."""
        named = places_in(self.config, self._content.get("places"))
        return is_signed(RECORD, named, self._content.get("signature"))

    @contextmanager
    def written_once(self) -> Iterator[None]:
        """Write what is noted in the block at its end: each write is the whole file, and waits for the disk."""
        self._holds = True
        try:
            yield
        finally:
            self._holds = False
            self._write()

    def add_stage(self, stage: StageRun) -> None:
        """Add a stage, or bring the entry of that name up to date: making a live half late costs more time."""
        stages = self._content["stages"]
        names = [entry["name"] for entry in stages]
        place = names.index(stage.name) if stage.name in names else len(stages)
        stages[place : place + 1] = [encode(stage)]
        self._write()

    def note_metrics(self, table: MetricTable) -> None:
        """Keep what metrics the run may come to, each null until it is known, and how they are to be read."""
        self._content["metric_table"] = table.stored()
        self._content["metrics"] = {**table.nulls(), **self._content["metrics"]}
        self._write()

    def note_sources(self, sources: SourceFiles) -> None:
        """Keep which files a stage works on: sections that several stages have are put together.

        The record is written with what is noted next; what is known of each tensor goes into a file beside it.
        """
        for section, entries in sources.inputs.items():
            self._content.setdefault("inputs", {}).setdefault(section, {}).update(entries)
        if sources.tensors:
            with mendable(self._path.parent):
                write_sealed(self._path.with_name(TENSORS), sources.tensors)

    def note_compared(self, lines: Sequence[str]) -> None:
        """Keep what a replay has to say of the files that it found."""
        if lines:
            self._content["compared"] = [*self._content.get("compared", ()), *lines]
            self._write()

    def merge(self, report: Report, *, stage: str = "a stage") -> None:
        """Add what ``stage`` reports, over what it reported before.

        A None says that it doesn't know, and leaves a number that is there. ``outputs``, ``experts``, ``repeats``,
        ``steps``, ``hosts``, ``layers`` and ``model`` are those of the last stage that has any. Raises ``ConfigError``
        where a value isn't of the type that it has in a record: only code can mend that, and a record that nobody can
        read isn't written.
        """
        content, update = self._content, dict[str, Any]()
        seen: dict[str, list[Any]] = {section: [] for section in _ROWS}  # rows that are there were looked at already
        try:
            update["memory"] = dict(content["memory"])
            for section, devices in report.memory.items():
                update["memory"][section] = _updated(content["memory"].get(section, {}), devices)
            update["metrics"] = _updated(content["metrics"], report.metrics)
            for section in _ROWS:
                if entries := getattr(report, section):
                    update[section] = [dict(entry) for entry in entries]
            if report.experts:
                update["experts"] = {layer: dict(use) for layer, use in report.experts.items()}
            if report.model:
                update["model"] = dict(report.model)
            decode(Run, {**content, **seen, **update}, "open")
        except (ValueError, TypeError, AttributeError) as error:  # a section that isn't one has no items
            raise ConfigError(
                f"stages: {stage} reports what no record can hold, {str(error).removeprefix('.')}; mend the report "
                "that its code returns: offstage.pipeline.run_schema has the types"
            ) from error
        self._content |= update
        self._write()

    def note_series(self, device: str, points: Sequence[tuple[float, int]]) -> None:
        """Keep what ``device`` held over time: seconds since the run began, and bytes."""
        self._content["memory"]["series"] = {device: [list(point) for point in points]}
        self._write()

    def note(self, **sections: Mapping[str, Any] | Sequence[Any]) -> None:
        """Keep whole ``sections``: ``device_map``, where each module went, since the cache that holds the plan may be
        gone when somebody asks; ``packages``, the versions of all that was imported; ``allocator``, the settings that
        torch's had; ``hosts``, what each host that the run was divided among came to, in their order.
        """
        self._content |= sections
        self._write()

    def note_enforcement(self, *, bytes_allowed: int | None, how: str) -> None:
        """Keep whether the run's memory was capped, at how many bytes, and how or why not."""
        self._content["enforcement"] = encode(Enforcement(bytes_allowed is not None, bytes_allowed, how))
        self._write()

    def finish(self, status: Status, *, error: BaseException | None = None, stage: str | None = None) -> None:
        """Write how the run ended: its status, and the error that ended it with the stage it came from."""
        self._content["status"] = status
        self._content["finished"] = _now()
        if error is not None:
            self._content["error"] = encode(RunError(stage, type(error).__name__, str(error)))
        self._write()

    def fail(self, error: BaseException, *, stage: str | None = None) -> None:
        """Write that the run was ended by ``error``, which came from ``stage``: interrupted, or failed."""
        self.finish("interrupted" if is_interrupt(error) else "failed", error=error, stage=stage)

    def require(self) -> None:
        """Raise a ``StorageError`` where the record has been removed since it was begun."""
        if not self._path.exists():
            raise StorageError(
                f"{self._path}: was removed while the run was at work, what it made perhaps too; run again, "
                "and leave outputs alone until it ends"
            )

    def _create(self) -> None:
        folder, self._written = self._path.parent, self._text()
        try:
            with mendable(folder):
                folder.mkdir(parents=True, exist_ok=True)
                create_file(self._path, self._written)
        except StorageError as error:
            if not isinstance(error.__cause__, FileExistsError) or not self._path.exists():
                raise
            raise StorageError(
                f"{self._path}: another run's record lies here, and two runs never share a folder; "
                "start again, or choose another folder with hydra.run.dir"
            ) from error

    def _write(self) -> None:
        self._run = None
        if self._holds or (text := self._text()) == self._written:
            return
        try:
            with mendable(self._path.parent):
                replace_file(self._path, text)
        except StorageError:
            self.require()
            raise
        self._written = text

    def _text(self) -> str:
        return as_json(self._content)


def host_summary(record: RunRecord) -> dict[str, Any]:
    """Return the ``HostRun`` that the record of a run by several hosts has of the one of this ``record``, so far."""
    run = record.run
    metrics = {name: value for name, value in run.metrics.items() if value is not None}
    platform, cpu = (run.environment.get(name) for name in ("platform", "cpu"))
    kernels = run.hosts[own_rank()].kernels if run.hosts else {}
    summary: dict[str, Any] = encode(HostRun(str(record.path), platform, cpu, kernels, run.memory, metrics))
    return summary


def _no_record(path: Path) -> str:
    """Return what to say where ``path`` leads to no record: it may be the folder of a sweep, whose jobs have one."""
    if not path.exists():
        return f"{path}: there is nothing; give the folder of a run"
    jobs = sorted((file.parent for file in path.glob(f"*/{RECORD}")), key=lambda job: (len(job.name), job.name))
    if not jobs:
        return f"{path}: no {RECORD} there; give the folder of a run"
    names = ", ".join(job.name for job in jobs[:_LISTED]) + (", …" if len(jobs) > _LISTED else "")
    return f"{path}: a sweep, with {len(jobs)} job{'s' * (len(jobs) > 1)} ({names}); give the folder of one: {jobs[0]}"


@contextmanager
def never_left_running(record: RunRecord) -> Iterator[None]:
    """Whatever ends the block, what lies at ``record.path`` then says how the run ended, if anything does."""
    try:
        yield
    except BaseException as error:
        if not record.path.exists():
            raise
        written = RunRecord.load(record.path)
        unfinished = written.run.status == "running"
        if unfinished or (written.run.status == "completed" and isinstance(error, StorageError)):
            written.fail(error)
        raise


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _updated(earlier: Mapping[str, Any], reported: Mapping[str, float | int | str | None]) -> dict[str, Any]:
    """Return ``earlier`` with what ``reported`` knows. JSON has no infinity and no nan: those count as not known."""
    updated = dict(earlier)
    for name, value in reported.items():
        if value is None or (isinstance(value, float) and not math.isfinite(value)):
            updated.setdefault(name, None)
        else:
            updated[name] = value
    return updated
