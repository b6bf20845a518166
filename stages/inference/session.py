"""The placed model and what it is asked: what generating, scoring and calling a model have in common.

A session answers all that is asked in one pass, is timed at it, and can do so again: only what a task's answer is
differs. What a pass came to is written to the artifact in one form.
"""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

import torch
from safetensors.torch import save_file

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import named
from offstage.pipeline.memory_monitor import held_bytes
from offstage.pipeline.peers import peers
from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.dispatch.stage import Dispatched
from offstage.stages.dispatch.transfer.trace import FILE_NAME as TRACE_NAME
from offstage.stages.inference.cost import Metrics, expert_uses, run_metrics
from offstage.stages.inference.inputs import InferenceInputs
from offstage.stages.inference.progress import Progress, Row, say_earlier
from offstage.stages.inference.repeats import RESERVED, Outputs, Pass, TimedRepeat
from offstage.stages.machine.probes import read_speed
from offstage.stages.machine.processor import ProcessorMeter
from offstage.stages.plan import plan as plans
from offstage.stages.units import DISK, DeviceId

Given = TypeVar("Given", bound=InferenceInputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class PassResult:
    """What one pass came to: its ``outputs`` as a record has them, and its ``metrics``.

    ``first_token_seconds`` and ``token_seconds`` are as in ``TimedRepeat``. ``content`` is what the artifact has of it,
    with ``files`` of tensors by their names; ``sums`` are the metrics that tell what came out, and not how long it
    took.
    """

    outputs: Outputs
    metrics: Metrics
    content: Mapping[str, Any]
    files: Mapping[str, Mapping[str, torch.Tensor]] = field(default_factory=dict)
    sums: Metrics = field(default_factory=dict)
    first_token_seconds: Sequence[float] = ()
    token_seconds: Sequence[float] = ()


Answering = Callable[[Progress, str], PassResult]
"""Answers all that ``Progress`` has no results of, under a title for the bar."""


class ModelSession(ABC, Generic[Given]):
    """The model placed by the stage dispatch, and what ``inputs`` ask of it as often as is wanted.

    ``passes`` counts how often it was. ``storage_rate`` is told beside repeats: see ``measure_storage``.
    ``results_file`` is the file that grows by a line for each of its ``units``; null where an answer is one piece.
    """

    task: ClassVar[str]
    units: ClassVar[str] = ""
    results_file: ClassVar[str | None] = None

    def __init__(self, inputs: Given, context: Context) -> None:
        self.inputs, self.context, self.passes = inputs, context, 0
        self.plan = context.artifact("plan").read(plans.Plan, plans.FILE_NAME)
        self.storage_rate: int | None = None

    @cached_property
    def dispatched(self) -> Dispatched:
        """The placed model; its weights are loaded when it is asked for first."""
        dispatched: Dispatched = self.context.live("dispatch")
        return dispatched

    @property
    @abstractmethod
    def count(self) -> int:
        """How many units there are."""

    @abstractmethod
    def answer(self, progress: Progress, title: str) -> PassResult:
        """Answer all that ``progress`` has no results of, under ``title``."""

    @contextmanager
    def answering(self) -> Iterator[Answering]:
        """Yield what answers, as often as it is called: what a task needs beside the model is there inside."""
        yield self.answer

    @contextmanager
    def repeating(self) -> Iterator[Pass]:
        """Yield what does all of it again."""
        with self.answering() as answer:

            def again(title: str) -> tuple[TimedRepeat, Outputs]:
                result, repeat = self._timed(answer, Progress(), title)
                return repeat, result.outputs

            yield again

    def ask(self, file: Path | None = None) -> tuple[PassResult, list[Row]]:
        """Return what all that is asked comes to, and its results one by one: nothing is timed.

        They are kept in ``file`` as they come, if there is one, and those that are there are taken. A ``ConfigError``
        where it is of something else.
        """
        progress = Progress(file, asked=None if file is None else fingerprint(self.inputs.wherever_it_lies()))
        self._agree(progress)
        say_earlier(progress.earlier, self.count, self.units)
        with self.answering() as answer:
            result = answer(progress, self.task)
        return result, progress.settle()

    def perform(self, file: Path) -> None:
        """Answer all that is asked, and write what came of it to ``file``.

        Results are kept beside it as they come; those that are there already, of a run that was killed, are taken.
        """
        progress = Progress(file.with_name(self.results_file) if self.results_file else None)
        self._agree(progress)
        earlier = say_earlier(progress.earlier, self.count, self.units)
        with self.answering() as answer:
            result, repeat = self._timed(answer, progress, self.task)
        for name, tensors in result.files.items():
            with named(file.with_name(name)):
                save_file(dict(tensors), file.with_name(name))
        sent = {} if self.plan.partition is None else {"sent_bytes": peers().sent_bytes}
        metrics = run_metrics(self.dispatched, {**result.sums, **result.metrics, **earlier, **sent})
        content = {**result.content, "repeat": repeat.stored()}
        save_result(file, self.dispatched, metrics=metrics, measured=repeat.peaks, content=content)

    def _agree(self, progress: Progress) -> None:
        """Have all hosts of the run, if it has several, do the same work: what none of them has done yet.

        Raises ``HostError`` where one is asked something else, or reads text otherwise. Kernels were compared before.
        """
        if self.plan.partition is None:
            return
        asked = replace(self.inputs.wherever_it_lies(), skeleton="", weights="", kernels={}, model={})
        peers().require_same({"what is asked (prompts, options, the tokenizer's files)": fingerprint(asked)[:16]})
        progress.keep(set.intersection(*map(set, peers().exchange(sorted(progress.done)))))

    def _timed(self, answer: Answering, progress: Progress, title: str) -> tuple[PassResult, TimedRepeat]:
        """Return the answer, and how its time went: when it began, who had the processor, how the machine was."""
        dispatched, passes, is_whole = self.dispatched, self.passes, not progress.done
        began, load, meter = datetime.now(UTC), os.getloadavg(), ProcessorMeter()
        result = answer(progress, title)
        self.passes += 1
        use = meter.use()
        return result, TimedRepeat(
            measured=began.isoformat(timespec="milliseconds"),
            passes_before=passes,
            is_whole=is_whole,
            metrics={
                "load_seconds": dispatched.load_seconds,
                "base_host_bytes": dispatched.base_bytes,
                **result.metrics,
            },
            first_token_seconds=result.first_token_seconds,
            token_seconds=result.token_seconds,
            processor=use.as_record(),
            machine={
                "load_average": list(load),
                "threads": torch.get_num_threads(),
                "interop_threads": torch.get_num_interop_threads(),
                "storage_bytes_per_second": self.storage_rate,
            },
            peaks=measured_peaks(self.context, dispatched),
        )


def measure_storage(context: Context) -> int | None:
    """Return the bytes a second at which the storage gives weights now; null where none are read from it.

    It is asked before there is a session, whose weights take the memory that is planned.
    """
    plan = context.artifact("plan").read(plans.Plan, plans.FILE_NAME)
    stored = any(line.home == DISK for line in plan.tensors.values())
    files = ModelSource.of(context.config["model"]).local_weights if stored else []
    return read_speed(max(files, key=lambda path: path.stat().st_size)) if files else None


def save_result(
    file: Path,
    dispatched: Dispatched,
    *,
    metrics: Metrics,
    measured: Mapping[str, int],
    content: Mapping[str, Any] | None = None,
) -> None:
    """Write ``file``: ``content``, the ``metrics`` of the run, what devices held at most and what experts came to.

    If there is a trace, ``trace.json`` is written beside it.
    """
    ends = {"metrics": metrics, "measured": dict(measured), "experts": expert_uses(dispatched)}
    reserved = _of_accelerators(torch.cuda.max_memory_reserved, dispatched.devices.reserved)
    ends |= {RESERVED: reserved} if reserved else {}
    write_text(file, json.dumps({**(content or {}), **ends}, allow_nan=False) + "\n")
    if dispatched.streamer.trace is not None:
        dispatched.streamer.trace.save(file.with_name(TRACE_NAME))


def measured_peaks(context: Context, dispatched: Dispatched) -> dict[str, int]:
    """Return the peaks so far in bytes: of the host's anonymous memory, and of every accelerator in use, by device."""
    return {"cpu": context.host_peak()} | _of_accelerators(torch.cuda.max_memory_allocated, dispatched.devices.peaks)


def held_now(dispatched: Dispatched) -> dict[str, int]:
    """Return what is held at this moment in bytes, by device: as ``measured_peaks``, of a system that tells."""
    host = held_bytes()
    amounts = {} if host is None else {"cpu": host}
    return amounts | _of_accelerators(torch.cuda.memory_allocated, dispatched.devices.allocated)


def _of_accelerators(ask: Callable[[int], int], simulated: Mapping[DeviceId, int]) -> dict[str, int]:
    """Return the bytes of each accelerator that is here, of which torch's allocator is to be asked, and of each that is
    ``simulated``.
    """
    here = {str(index): ask(index) for index in range(torch.cuda.device_count())}
    return here | {str(device): count for device, count in simulated.items()}
