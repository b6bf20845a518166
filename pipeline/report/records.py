"""One ``run.json`` as frozen data, with everything taken out of it that a page or a terminal could trip over.

A record may be of a run that failed, was interrupted, is at work or was killed: any value may be missing, and is None
then. A file that is no record at all, or whose sections have another shape, is refused with the reason.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.metrics import MetricTable
from offstage.pipeline.printable_text import printable
from offstage.pipeline.provenance import Provenance, provenance
from offstage.pipeline.record import SCHEMA_VERSION
from offstage.pipeline.regular_files import read_json

Number = int | float
Bytes = Mapping[str, int | float | None]
"""Device → bytes; None is unlimited in a budget, and not known elsewhere."""

_LARGEST = 2**63
_Kind = TypeVar("_Kind", dict[str, Any], list[Any])


class RecordError(ValueError):
    """A file that should be a run record and can't be read as one; the message is the reason."""


@dataclass(frozen=True, slots=True)
class StageTime:
    """One stage of a run. ``artifact`` is where its stored half lay when the record was written."""

    name: str
    key: str
    cached: bool
    seconds: Number | None
    peak_host_bytes: Number | None
    artifact: Path


@dataclass(frozen=True, slots=True)
class Answer:
    """What one prompt gave: ``token_ids`` are the new tokens only.

    An output that is no tokens is named by ``prompt``, and ``text`` has all else that the record has of it.
    ``prompt_tokens`` is the length of the prompt, None where that isn't known.
    """

    prompt: str
    text: str
    token_ids: tuple[int, ...]
    prompt_tokens: int | None = None

    @property
    def result(self) -> object:
        """What two runs are compared by: the tokens, or without any all that is told."""
        return self.token_ids or self.text


@dataclass(frozen=True, slots=True)
class RunModel:
    """What a run loaded: the model's class, how many parameters it has by dtype, and its bytes in use.

    All is empty where the record doesn't say, as older ones don't.
    """

    class_name: str = ""
    parameters: Mapping[str, Number | None] = field(default_factory=dict)
    bytes: Number | None = None

    @property
    def count(self) -> Number | None:
        """How many parameters there are, None where that isn't known."""
        return sum(count or 0 for count in self.parameters.values()) or None


@dataclass(frozen=True, slots=True)
class RunSample:
    """One time that a run's work was measured: seconds to the first token, and for each after that.

    ``counts`` says whether the run's figures are made of it; another run took one that is ``earlier``, and others used
    the processor while it was taken where it is ``busy``.
    """

    first_token_seconds: Number | None
    token_seconds: Number | None
    counts: bool
    earlier: bool
    busy: bool


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run.

    ``metrics`` are those that are numbers, ``words`` the others; ``table`` says what each is.
    ``series`` has, where the record holds it, memory over time: device → (seconds, bytes). ``cap_bytes`` is the
    cgroup's limit that the process ran under, None where there was none. ``experts`` has the layers of a mixture whose
    experts wait: layer → counts by name. ``losses`` are those of a training, step by step. ``samples`` are all that are
    known, ``cap_untested`` why no cap was tested that was asked for. ``started`` is the moment in ISO 8601. By its
    ``signature`` a record of this user is known, with the ``places`` that it notes. ``record`` is the whole file, its
    text printable.
    """

    folder: Path
    status: str
    reason: str
    failed_stage: str
    error_type: str
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    stages: tuple[StageTime, ...]
    budget: Bytes
    predicted: Bytes
    measured: Bytes
    series: Mapping[str, tuple[tuple[Number, Number], ...]]
    metrics: Mapping[str, Number | None]
    answers: tuple[Answer, ...]
    device_map: Mapping[str, Any]
    cap_bytes: Number | None
    words: Mapping[str, str | None] = field(default_factory=dict)
    table: MetricTable = field(default_factory=lambda: MetricTable({}))
    experts: Mapping[str, Mapping[str, Number | None]] = field(default_factory=dict)
    samples: tuple[RunSample, ...] = ()
    losses: tuple[Number | None, ...] = ()
    cap_untested: str = ""
    model: RunModel = RunModel()
    started: str = ""
    signature: str = ""
    places: object = None
    record: Mapping[str, Any] = field(default_factory=dict)

    @property
    def counting(self) -> tuple[RunSample, ...]:
        """The samples that the run's figures are made of."""
        return tuple(sample for sample in self.samples if sample.counts)

    @property
    def provenance(self) -> Provenance:
        """Where the figures come from: this run, or earlier ones."""
        return provenance(self.record)

    @property
    def memory(self) -> Mapping[str, Bytes]:
        """Budget, prediction and measurement under the names that the record has for them."""
        return {"budget": self.budget, "predicted": self.predicted, "measured": self.measured}

    @property
    def failure(self) -> str:
        """Why the run isn't completed, in one line; empty where it is."""
        if self.status == "completed":
            return ""
        where = f"{self.failed_stage}: " if self.failed_stage else ""
        return where + (" ".join(self.reason.split()) or self.error_type or "the record gives no reason")

    def metric(self, name: str) -> Number | None:
        """Return the metric ``name``, None where it isn't known."""
        return self.metrics.get(name)

    def stage(self, name: str) -> StageTime | None:
        """Return the stage ``name``, None where the run didn't come that far."""
        return next((stage for stage in self.stages if stage.name == name), None)


def read_run(path: Path) -> Run:
    """Return the run that the file ``path`` records. Raises ``RecordError`` with the reason."""
    try:
        content = _clean(read_json(path))
        written = datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "minutes")
    except OSError as error:
        raise RecordError(error.strerror or str(error)) from error
    except json.JSONDecodeError as error:
        raise RecordError(f"no JSON: {error}") from error
    except ValueError as error:
        raise RecordError(f"no JSON that can be read: {error}") from error
    if not isinstance(content, dict) or not isinstance(content.get("status"), str):
        raise RecordError("JSON, but no run record: it has no status")
    version = content.get("schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise RecordError(f"schema_version {version!r}; this offstage reads {SCHEMA_VERSION}")
    return _run(path.parent, content, written=written)


def _run(folder: Path, content: dict[str, Any], *, written: str) -> Run:
    error, memory = _mapping(content, "error"), _mapping(content, "memory")
    metrics, experts, model = (_mapping(content, key) for key in ("metrics", "experts", "model"))
    enforcement = _mapping(content, "enforcement")
    table = _table(json.dumps(_mapping(content, "metric_table")))
    words = {
        name: value if isinstance(value, str) else None
        for name, value in metrics.items()
        if isinstance(value, str) or table.unit(name) == "word"
    }
    stages = tuple(map(_stage, _dicts(content, "stages")))
    status = content["status"]
    reason = str(error.get("message") or "")
    if status == "running":
        progress = f"after {stages[-1].name}" if stages else "before the first stage ended"
        reason = f"still at work or killed: last written {written}, {progress}"
    return Run(
        folder=folder,
        status=status,
        reason=reason,
        failed_stage=str(error.get("stage") or ""),
        error_type=str(error.get("type") or ""),
        overrides=tuple(map(str, _list(content, "overrides"))),
        config=_mapping(content, "config"),
        environment=_mapping(content, "environment"),
        stages=stages,
        budget=_numbers(_mapping(memory, "budget")),
        predicted=_numbers(_mapping(memory, "predicted")),
        measured=_numbers(_mapping(memory, "measured")),
        series={device: _curve(points) for device, points in _mapping(memory, "series").items()},
        metrics=_numbers({name: value for name, value in metrics.items() if name not in words}),
        answers=tuple(map(_answer, _dicts(content, "outputs"))),
        device_map=_mapping(content, "device_map"),
        cap_bytes=_number(enforcement.get("bytes")),
        words=words,
        table=table,
        experts={layer: _numbers(_mapping(experts, layer)) for layer in experts},
        samples=tuple(map(_sample, _dicts(content, "samples"))),
        losses=tuple(_number(step.get("loss")) for step in _dicts(content, "steps")),
        cap_untested=str(enforcement.get("how") or "") if enforcement.get("enforced") is False else "",
        model=RunModel(
            str(model.get("class") or ""), _numbers(_mapping(model, "parameters")), _number(model.get("bytes"))
        ),
        started=str(content.get("started") or ""),
        signature=str(content.get("signature") or ""),
        places=content.get("places"),
        record=content,
    )


@lru_cache
def _table(stored: str) -> MetricTable:
    """Return the table of a record that has it as ``stored``, in JSON: the many records of a sweep have one."""
    return metric_table({"metric_table": json.loads(stored)})


def _stage(entry: dict[str, Any]) -> StageTime:
    return StageTime(
        name=str(entry.get("name", "")),
        key=str(entry.get("key", "")),
        cached=entry.get("cached") is True,
        seconds=_number(entry.get("seconds")),
        peak_host_bytes=_number(entry.get("peak_host_bytes")),
        artifact=Path(str(entry.get("artifact", ""))),
    )


def _sample(entry: dict[str, Any]) -> RunSample:
    metrics = _mapping(entry, "metrics")
    return RunSample(
        first_token_seconds=_number(metrics.get("time_to_first_token_seconds")),
        token_seconds=_number(metrics.get("decode_seconds_per_token")),
        counts=entry.get("counts") is True,
        earlier=entry.get("earlier") is True,
        busy=_mapping(entry, "processor").get("busy") is True,
    )


def _answer(entry: dict[str, Any]) -> Answer:
    prompt, ids = entry.get("prompt", entry.get("name", "")), _list(entry, "token_ids")
    told = {key: value for key, value in entry.items() if key not in ("prompt", "name")}
    length = entry.get("prompt_tokens")
    text = entry.get("text") if "token_ids" in entry else ", ".join(f"{key} {_plain(one)}" for key, one in told.items())
    return Answer(
        prompt=_plain(prompt),
        text=str(text or ""),
        token_ids=tuple(token for token in ids if isinstance(token, int)),
        prompt_tokens=length if isinstance(length, int) else None,
    )


def _plain(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _curve(points: Any) -> tuple[tuple[Number, Number], ...]:
    pairs = points if isinstance(points, list) else []
    numbers = [tuple(map(_number, pair)) for pair in pairs if isinstance(pair, list) and len(pair) == 2]
    return tuple((second, held) for second, held in numbers if second is not None and held is not None)


def _number(value: Any) -> Number | None:
    """Return ``value`` where it is a finite number that every later computation can hold, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < _LARGEST else None  # false for nan and infinity too


def _numbers(values: Mapping[str, Any]) -> dict[str, Number | None]:
    return {name: _number(value) for name, value in values.items()}


def _mapping(content: Mapping[str, Any], key: str) -> dict[str, Any]:
    return _section(content, key, dict)


def _list(content: Mapping[str, Any], key: str) -> list[Any]:
    return _section(content, key, list)


def _dicts(content: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    entries = _list(content, key)
    if not all(isinstance(entry, dict) for entry in entries):
        raise RecordError(f"{key}: an entry that is no mapping")
    return entries


def _section(content: Mapping[str, Any], key: str, kind: type[_Kind]) -> _Kind:
    """Return the section ``key``, empty where it is missing or null."""
    value = content.get(key)
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise RecordError(f"{key}: a {type(value).__name__} where a {kind.__name__} must be")
    return value


def _clean(value: Any) -> Any:
    """Return ``value`` with all text in it ``printable``. Most of a record is numbers, and nothing else is as long."""
    if isinstance(value, str):
        return value if value.isascii() and value.isprintable() else printable(value)
    if isinstance(value, list):
        return [_clean(entry) if isinstance(entry, str | list | dict) else entry for entry in value]
    if isinstance(value, dict):
        return {
            _clean(key): _clean(entry) if isinstance(entry, str | list | dict) else entry
            for key, entry in value.items()
        }
    return value
