"""The one schema of ``run.json``: what a run's record says, as frozen data that is read by its types.

``offstage.pipeline.record`` reads and writes it; ``.github/run.schema.json`` is made from it. A record
may lack sections, and has their defaults; a stage of another package may report more than is named here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from offstage.pipeline.decoding import BESIDE, CHOICES, KEY, SPARSE, WHOLE

SCHEMA_VERSION = 2
Status = Literal["running", "completed", "failed", "interrupted"]
Number = int | float
Bytes = Mapping[str, int | float | None]
"""Device → bytes; null is unlimited in a budget, and not known elsewhere."""
Metrics = Mapping[str, int | float | str | None]

_SPARSE: Mapping[str, Any] = {SPARSE: True}
_WHOLE: Mapping[str, Any] = {KEY: WHOLE}
"""Of a field that has the whole object, with what only the stage knows that wrote it."""
_BESIDE: Mapping[str, Any] = {KEY: BESIDE}


@dataclass(frozen=True, slots=True)
class RunError:
    """What ended a run: the class of the error and its text, and the stage that was at work, null before the first."""

    stage: str | None = None
    type: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class StageRun:
    """One stage of a run: how long it took, the peaks in bytes while it ran, and where its artifact lay then.

    ``peak_device_bytes`` maps an accelerator's device id to bytes; it is empty where there is none. ``inputs`` is what
    the key stands for, outlined: by it two runs of one stage can be told apart part by part. ``measured`` says whether
    metrics of an artifact that was ``cached`` were measured now.
    """

    name: str
    key: str
    cached: bool
    seconds: int | float | None
    artifact: str
    peak_host_bytes: int | float | None = None
    peak_device_bytes: Bytes = field(default_factory=dict)
    inputs: Mapping[str, Any] | None = None
    measured: bool = False


@dataclass(frozen=True, slots=True)
class RunModel:
    """What a run loaded: the model's class, how many parameters it has by dtype, and its bytes in use."""

    class_name: str = field(default="", metadata={KEY: "class", **_SPARSE})
    parameters: Mapping[str, int | float | None] = field(default_factory=dict, metadata=_SPARSE)
    bytes: int | float | None = field(default=None, metadata=_SPARSE)

    @property
    def count(self) -> Number | None:
        """How many parameters there are, null where that isn't known."""
        return sum(count or 0 for count in self.parameters.values()) or None


@dataclass(frozen=True, slots=True)
class WeightFile:
    """One file of a checkpoint: its size in bytes, and the digests of its header, its samples and all of it."""

    name: str
    size: int
    header: str | None = None
    sampled: str | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class RecordedWeights:
    """The weights that a run read: their files, the digest of the model's config, how deep was looked (``verify``).

    ``hub`` has the ``id`` and the ``revision`` of a checkpoint of the Hub.
    """

    files: tuple[WeightFile, ...]
    config: str | None = None
    verify: str | None = None
    hub: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class RunInputs:
    """The files that a run worked on, by content: beside the weights a section each for other kinds, by SHA-256."""

    weights: RecordedWeights | None = field(default=None, metadata=_SPARSE)
    whole: Mapping[str, Any] = field(default_factory=dict, metadata=_WHOLE)


@dataclass(frozen=True, slots=True)
class RunMemory:
    """Bytes by device: what was allowed, predicted and measured, and over time as pairs of seconds and bytes.

    ``simulated`` is what stands in for accelerators that aren't there. ``reserved`` is what torch's allocator had of
    each accelerator at most: what is more than was ``measured`` is rounding, what was kept for later, and fragments.
    """

    budget: Bytes = field(default_factory=dict)
    predicted: Bytes = field(default_factory=dict)
    measured: Bytes = field(default_factory=dict)
    simulated: Bytes = field(default_factory=dict, metadata=_SPARSE)
    reserved: Bytes = field(default_factory=dict, metadata=_SPARSE)
    series: Mapping[str, tuple[tuple[int | float, int | float], ...]] = field(default_factory=dict, metadata=_SPARSE)


@dataclass(frozen=True, slots=True)
class Output:
    """What one prompt, text, row or step gave: ``token_ids`` are the new tokens alone, null where it is no tokens.

    ``prompt`` and ``text`` are texts, or tokens and what else was given for one; ``prompt_tokens`` is the prompt's
    length. Outputs that are no tokens have a ``name``, and what else the stage says.
    """

    prompt: Any = None
    name: str | None = None
    text: Any = None
    token_ids: tuple[int, ...] | None = None
    prompt_tokens: int | None = None
    batch: int | None = None
    whole: Mapping[str, Any] = field(default_factory=dict, metadata=_WHOLE)

    @property
    def title(self) -> str:
        """What it is called: its prompt, or its name."""
        return _plain(self.whole.get("prompt", self.name or ""))

    @property
    def description(self) -> str:
        """Its text, or where it is no tokens all else that is known of it."""
        if "token_ids" in self.whole:
            return str(self.text or "")
        return ", ".join(f"{key} {_plain(one)}" for key, one in self.whole.items() if key not in ("prompt", "name"))

    @property
    def result(self) -> object:
        """What two runs are compared by: the tokens, or without any all that is told."""
        return self.token_ids or self.description


@dataclass(frozen=True, slots=True)
class Repeat:
    """One time that a run's work was ``measured``, in ISO 8601, and the metrics of it.

    The run's own are made of those that count (``counts``); an ``earlier`` one was taken by another run. ``processor``
    says what was used of it meanwhile, and whether others kept it ``contended``.
    """

    metrics: Metrics = field(default_factory=dict)
    counts: bool = False
    earlier: bool = False
    measured: str | None = None
    processor: Mapping[str, Any] | None = None

    @property
    def is_contended(self) -> bool:
        """Whether others used the processor meanwhile."""
        return (self.processor or {}).get("contended") is True

    def metric(self, name: str) -> Number | None:
        """Return the metric ``name``, null where it isn't known."""
        return _number(self.metrics.get(name))


@dataclass(frozen=True, slots=True)
class RunStep:
    """One step of a training: its loss, the norm of its gradient, its seconds and the bytes that were held then."""

    loss: int | float | None = None
    whole: Mapping[str, Any] = field(default_factory=dict, metadata=_WHOLE)


@dataclass(frozen=True, slots=True)
class Enforcement:
    """Whether the run's memory was capped, at how many bytes, and how or why not."""

    enforced: bool = False
    bytes: int | float | None = None
    how: str = ""


@dataclass(frozen=True, slots=True)
class PlacedLayers:
    """So many layers that are executed one after another and lie alike, from ``first`` to ``last``, on ``devices``."""

    devices: tuple[str, ...]
    count: int
    first: str
    last: str


@dataclass(frozen=True, slots=True)
class HostRun:
    """What one of several hosts came to that a run was divided among: ``record`` is where its own record lies.

    That is null before the run has ended, and of hosts that were planned for alone: they have what is predicted.
    ``kernels`` is what the last bits hang on of what the host computes, by what it is.
    """

    record: str | None = None
    platform: str | None = None
    cpu: str | None = None
    kernels: Mapping[str, str] = field(default_factory=dict, metadata=_SPARSE)
    memory: RunMemory = RunMemory()
    metrics: Metrics = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Provenance:
    """``repeats`` make the metrics: ``earlier`` of them are of runs before, ``contended`` while others computed."""

    repeats: int
    earlier: int
    contended: int = 0

    @property
    def is_cached(self) -> bool:
        """Whether this run measured nothing itself."""
        return self.earlier == self.repeats > 0

    def describe(self) -> str:
        """Return in words when it was measured, and how often: ``measured, median of 5, 3 earlier``."""
        words = ["measured earlier" if self.is_cached else "measured"]
        words += [f"median of {self.repeats}"] * (self.repeats > 1)
        words += [f"{self.earlier} earlier"] * (0 < self.earlier < self.repeats)
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Run:
    """One recorded run, completed or not: what ran, with what, where, how long, and what came out.

    ``started`` and ``finished`` are in ISO 8601. ``config`` is resolved and whole. By its ``signature`` a record of
    this user is known, with the ``places`` that it notes: the folders that the run lay in and was started in.
    ``packages`` are the versions of all that was imported, ``allocator`` the settings that torch's allocator of
    accelerators had, if any. ``metric_table`` says what each of the ``metrics`` is; one
    that the run didn't come to is null. ``experts`` has, layer by layer, what those of a mixture came to that wait,
    ``steps`` those of a training, ``device_map`` where each module went, ``layers`` where each layer lay, in the order
    of execution, ``compared`` what a replay found of the files.
    """

    status: str = field(metadata={CHOICES: get_args(Status)})
    overrides: tuple[str, ...]
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    stages: tuple[StageRun, ...]
    metrics: Metrics
    outputs: tuple[Output, ...]
    schema_version: int = SCHEMA_VERSION
    error: RunError | None = None
    started: str | None = None
    finished: str | None = None
    signature: str | None = None
    packages: Mapping[str, str] | None = field(default_factory=dict)
    allocator: str | None = field(default=None, metadata=_SPARSE)
    places: Mapping[str, str] | None = None
    model: RunModel = RunModel()
    inputs: RunInputs | None = RunInputs()
    memory: RunMemory = RunMemory()
    metric_table: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    experts: Mapping[str, Mapping[str, int | float | None]] = field(default_factory=dict)
    repeats: tuple[Repeat, ...] = ()
    steps: tuple[RunStep, ...] = ()
    device_map: Mapping[str, Any] | None = None
    layers: tuple[PlacedLayers, ...] = field(default=(), metadata=_SPARSE)
    enforcement: Enforcement | None = None
    compared: tuple[str, ...] = field(default=(), metadata=_SPARSE)
    hosts: tuple[HostRun, ...] = field(default=(), metadata=_SPARSE)
    folder: Path = field(default=Path(), metadata=_BESIDE)
    """Where the record lies."""
    written: str = field(default="", metadata=_BESIDE)
    """When it was last written, to the minute."""

    @property
    def counting(self) -> tuple[Repeat, ...]:
        """The repeats that the run's metrics are made of."""
        return tuple(repeat for repeat in self.repeats if repeat.counts)

    @property
    def provenance(self) -> Provenance:
        """Where the metrics come from: this run, or earlier ones whose artifact was served.

        Whoever shows a metric says so. A stage that takes no repeats has one by another name: its artifact.
        """
        counting, last = self.counting, self.stages[-1:]
        if not counting:
            return Provenance(len(last), sum(stage.cached for stage in last))
        contended = sum(one.is_contended for one in counting)
        return Provenance(len(counting), sum(one.earlier for one in counting), contended)

    @property
    def reason(self) -> str:
        """What the record says of why the run isn't completed; of one without an end how far it came."""
        if self.status == "running":
            written = f"last written {self.written}, " if self.written else ""
            progress = f"after {self.stages[-1].name}" if self.stages else "before the first stage ended"
            return f"still at work or killed: {written}{progress}"
        return self.error.message if self.error else ""

    @property
    def failure(self) -> str:
        """Why the run isn't completed, in one line; empty where it is."""
        if self.status == "completed":
            return ""
        error = self.error or RunError()
        where = f"{error.stage}: " if error.stage else ""
        return where + ("; ".join(self.reason.splitlines()) or error.type or "the record gives no reason")

    @property
    def untested(self) -> str:
        """Why no memory cap was tested that was asked for, in one line; empty where none was, or it was."""
        noted = self.enforcement
        return "" if noted is None or noted.enforced else f"no memory cap was tested: {noted.how}"

    def metric(self, name: str) -> Number | None:
        """Return the metric ``name``, null where it isn't known, or is a word."""
        return _number(self.metrics.get(name))

    def stage(self, name: str) -> StageRun | None:
        """Return the stage ``name``, null where the run didn't come that far."""
        return next((stage for stage in self.stages if stage.name == name), None)


def _number(value: float | str | None) -> Number | None:
    return None if isinstance(value, str) else value


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
