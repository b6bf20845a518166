"""Runs to give away: one archive of their records, their report and all that reproduces them but the weights.

Its bytes follow from the runs alone: names in order, no times, no owners. Whoever unpacks it has records that a
stranger wrote: a replay asks for what it needs to be trusted with.
"""

from __future__ import annotations

import gzip
import io
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from offstage.pipeline.atomic_files import mendable, write_whole
from offstage.pipeline.config import named_paths
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.plain_data import scalars
from offstage.pipeline.record import RECORD, RunRecord
from offstage.pipeline.regular_files import read_regular
from offstage.pipeline.replay_config import INPUTS
from offstage.pipeline.run_schema import Run
from offstage.pipeline.stage import TENSORS

SUFFIX = ".tar.gz"
_OWN = "offstage-pipeline"
LOCK, README, RECORDS = "requirements.lock.txt", "README.md", "records"
_TOP = "bundle"
_BESIDE = (RECORD, TENSORS, "run.log", ".hydra/config.yaml", ".hydra/overrides.yaml")
"""What of a run's folder is given away: not what other tools may have left there, nor Hydra's own settings, among which
the environment of jobs is."""
_LARGEST_DATA = 10_000_000
"""Bytes of a file of data that goes along; of a larger one the README says what it must be."""


@dataclass(frozen=True, slots=True)
class _BundledRun:
    """One run: the ``name`` of its folder in the archive, its record, and which files of data are too large."""

    name: str
    record: RunRecord
    files: Mapping[str, bytes]
    left_out: Mapping[str, Path]


def bundle(records: Sequence[Path], report: Mapping[str, str], target: Path) -> int:
    """Write the archive ``target`` of the runs whose records these are, and of the ``report``'s files by name.

    Returns how many files it has. Raises a ``ConfigError`` for runs that were made with different versions: one list of
    packages can't reproduce both.
    """
    if not target.name.endswith(SUFFIX):
        raise ConfigError(f"--output {str(target)!r}: a bundle is a file whose name ends with {SUFFIX}")
    names = _names([path.parent for path in records])
    runs = [_read(name, path) for name, path in zip(names, records, strict=True)]
    files: dict[str, bytes] = {}
    for run in runs:
        files |= {f"{RECORDS}/{run.name}/{name}": data for name, data in run.files.items()}
    files |= {f"report/{name}": text.encode("utf-8", "replace") for name, text in report.items()}
    files[LOCK] = _lock(runs).encode()
    files[README] = _readme(runs).encode()
    secrets = {secret for run in runs for secret in _secrets(run.record.data)}
    for secret in sorted(secrets, key=len, reverse=True):
        files = {name: data.replace(secret, b"") for name, data in files.items()}
    with mendable(target.parent):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_whole(target, _archive(files))
    return len(files)


def _names(folders: Sequence[Path]) -> list[str]:
    """Return a name of each run's folder that is its own: as much of its path as tells it from the others."""
    parts = [folder.absolute().parts for folder in folders]
    for depth in range(1, max(map(len, parts)) + 1):
        names = ["-".join(part[-depth:]).replace("/", "") for part in parts]
        if len(set(names)) == len(names):
            return names
    raise ConfigError("a run is given twice; give each once")


def _read(name: str, path: Path) -> _BundledRun:
    record, folder = RunRecord.load(path), path.parent
    if record.run.status != "completed":
        raise ConfigError(f"{path}: the run is {record.run.status}; a bundle is of runs that completed")
    files = {str(file.relative_to(folder)): read_regular(file) for file in _files(folder)}
    left_out: dict[str, Path] = {}
    data = _data(record.run)
    for key, place in named_paths(record.config) if record.is_own else ():  # a stranger's may name any file of mine
        file = Path(place)
        if key not in data or not file.is_file():
            continue
        if file.stat().st_size > _LARGEST_DATA:
            left_out[key] = file
        else:
            files[f"{INPUTS}/{key}/{file.name}"] = read_regular(file)
    return _BundledRun(name, record, files, left_out)


def _files(folder: Path) -> Iterator[Path]:
    """Yield the files of a run's folder that are given away, in order; what is no regular file stays."""
    given = sorted((folder / INPUTS).rglob("*"))  # those of a bundle that this run came in
    for file in (*(folder / name for name in _BESIDE), *given):
        if file.is_file() and not file.is_symlink():
            yield file


def _lock(runs: Sequence[_BundledRun]) -> str:
    """Return the versions that the runs were made with, as pip reads them."""
    lists = {run.name: dict(run.record.run.packages or {}) for run in runs}
    versions_of = {
        name: versions for name, versions in lists.items() if versions
    }  # a run from the cache imported nothing
    merged: dict[str, str] = {}
    for name, versions in versions_of.items():
        for package, version in versions.items():
            if merged.setdefault(package, version) != version:
                raise ConfigError(
                    f"run {name}: was made with {package} {version}, another with {merged[package]}; "
                    "make a bundle of each"
                )
    if not merged:
        raise ConfigError(
            "every result of these runs was cached, so none imported the packages that it was made with; "
            "give the run that computed it"
        )
    return "".join(_pinned(package, merged[package]) for package in sorted(merged, key=str.lower) if package != _OWN)


def _pinned(package: str, version: str) -> str:
    """Return the line for one package; what an index calls a version has no local part (``+cpu``)."""
    public, local, _ = version.partition("+")
    return f"{package}=={public}" + (f"  # was {version}" if local else "") + "\n"


def _readme(runs: Sequence[_BundledRun]) -> str:
    """Return how to reproduce the runs, and on which files."""
    python = next((str(run.record.run.environment.get("python")) for run in runs), "3")
    lines = [
        "# Runs of offstage",
        "",
        f"{len(runs)} run{'s' * (len(runs) != 1)}, with what {'each' if len(runs) > 1 else 'it'} came to. "
        f"The weights aren't in it. With Python {python}, in this folder:",
        "",
        "```",
        f"python3 -m venv .venv && .venv/bin/pip install -r {LOCK} 'OFFSTAGE[report]'",
        _replay(runs[0]),
        f".venv/bin/offstage-report {RECORDS} --output again",
        "```",
        "",
        "The first makes the environment of then; OFFSTAGE is a checkout of offstage, or its wheel, of the commit",
        "below. The second, once for each run, runs it again and says whether it came out the same; FOLDER is",
        "where you have the weights, and PATH where you have a file that isn't in here. The third shows the tables",
        "and writes the page anew; `report` has it as it was.",
        "",
    ]
    for run in runs:
        lines += [f"## {RECORDS}/{run.name}", "", *_told(run), ""]
    return "\n".join(lines)


def _replay(run: _BundledRun) -> str:
    model = run.record.config.get("model") or {}
    is_embedded = _is_embedded(run.record, str(model.get("path") or ""))
    options = ["" if is_embedded else " --model-path FOLDER", *(f" --set {key}=PATH" for key in run.left_out)]
    return f".venv/bin/offstage-replay {RECORDS}/{run.name}{''.join(options)}"


def _is_embedded(record: RunRecord, path: str) -> bool:
    conf = (record.run.places or {}).get("conf")
    return conf is not None and Path(path).is_relative_to(conf)


def _data(run: Run) -> Mapping[str, Any]:
    """Return the SHA-256 of each file of data that ``run`` worked on, by the key that names it."""
    return (run.inputs.whole.get("data") if run.inputs is not None else None) or {}


def _told(run: _BundledRun) -> Iterator[str]:
    """Yield the lines about one run: its command, its commit, its weights by their digests, and its data."""
    record = run.record.run
    yield f"`{_replay(run)}`"
    yield ""
    environment = record.environment
    yield f"- started {record.started}; offstage {environment.get('offstage')}, {_commit(environment)}"
    if record.overrides:
        yield f"- `offstage {' '.join(record.overrides)}`"
    weights = record.inputs.weights if record.inputs is not None else None
    if weights is not None and weights.hub:
        yield f"- weights: {weights.hub.get('id')} at {weights.hub.get('revision')} of the Hub"
    for file in weights.files if weights is not None else ():
        kinds = {"SHA-256": file.sha256, "header": file.header, "samples": file.sampled}
        digests = "; ".join(f"{kind} {digest}" for kind, digest in kinds.items() if digest)
        yield f"- {file.name}, {file.size} bytes; {digests}"
    for key, left in run.left_out.items():
        yield f"- {key}: {left.name}, not in here, SHA-256 {_data(record).get(key)}"


def _commit(environment: Mapping[str, Any]) -> str:
    commit = environment.get("git_commit")
    if commit is None:
        return "of no known commit"
    return f"commit {commit}" + (", with changes of its own" if environment.get("git_dirty") else "")


def _secrets(record: Mapping[str, Any]) -> Iterator[bytes]:
    """Yield what of the addresses in a record is a name and a password."""
    texts = (leaf for leaf in scalars(record) if isinstance(leaf, str) and "@" in leaf)
    for word in (word for text in texts for word in text.split("=")):
        with suppress(ValueError):  # no address
            credentials, at, _ = urlsplit(word).netloc.rpartition("@")
            yield from [f"{credentials}@".encode()] if at and credentials else []


def _archive(files: Mapping[str, bytes]) -> bytes:
    """Return a compressed archive of ``files``, the same bytes for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive:
        for name in sorted(files):
            entry = tarfile.TarInfo(f"{_TOP}/{name}")
            entry.size, entry.mode = len(files[name]), 0o644
            archive.addfile(entry, io.BytesIO(files[name]))
    return gzip.compress(packed.getvalue(), mtime=0)
