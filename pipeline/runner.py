"""The runner: stages in order, through the cache.

It first finds the artifacts that are already there, which needs no model code. Only then are the remaining stages
asked whether the config is one that they can carry out, and only then does any work begin. Live halves are made when a
stage asks for one, and let go when no stage that remains will.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from offstage.pipeline.config import check, made_sound
from offstage.pipeline.errors import Fault, raise_faults
from offstage.pipeline.installed_stages import any_measures, installed_stages, stage_class
from offstage.pipeline.interpreter import uncollected
from offstage.pipeline.measure import refuse_unmeasured
from offstage.pipeline.memory_monitor import MemoryMonitor, Meter
from offstage.pipeline.record import RunRecord
from offstage.pipeline.run_schema import StageRun
from offstage.pipeline.stage import Config, Report, SourceFiles, Stage
from offstage.pipeline.stage_chain import StageChain

DEVICE_MAP = "device_map.json"
"""The file of an artifact that says which module goes where; the record keeps what it holds."""

_log = logging.getLogger("offstage")


class Observer:
    """What a run tells while it goes on. Override what you want to hear; an error raised there ends the run."""

    sees_text = False
    """Whether stages are to show text while they make it."""

    def keyed(self, stage: str, sources: SourceFiles) -> None:
        """The key of ``stage`` is known, and which files it works on."""

    def begins(self, stage: str) -> None:
        """The stage begins its work; what the stages before it report is in the record."""

    def shows(self, stage: str, text: str, reports: Mapping[str, Report]) -> None:
        """The stage at work shows ``text``; the record has what the stages before it took, and they their reports."""


def load_stages(config: Config) -> list[Stage[Any]]:
    """Return the stages that ``config`` lists, up to ``stop_after``, one new instance each."""
    names = list(config["stages"])
    if config["stop_after"] is not None:
        names = names[: names.index(config["stop_after"]) + 1]
    return [stage_class(name)() for name in names]


def check_config(config: Config) -> list[Stage[Any]]:
    """Return the stages to run, or raise every fault of ``config`` that can be seen, as one error.

    What needs model code to be seen is looked at here only where the config is faulty anyway: a sound config may be
    served from the cache, without any.
    """
    faults = list(check(config, list(installed_stages())))
    if any(fault.key in ("stages", "stop_after") for fault in faults):
        raise_faults(faults)
    stages, sound = load_stages(config), made_sound(config, faults)
    if not any_measures(config["stages"]):
        faults += refuse_unmeasured(sound, config["stages"])
    for stage in stages:
        faults += _untold(stage.check(sound), faults)
    for stage in stages if faults else ():
        faults += _untold(stage.examine(sound), faults)
    raise_faults(faults)
    return stages


def _untold(others: Iterable[Fault], faults: Sequence[Fault]) -> list[Fault]:
    """Return the ``others`` of keys without ``faults`` so far: two stages may see one, and say it differently."""
    keys = {fault.key for fault in faults}
    return [fault for fault in others if fault.key not in keys]


class Runner:
    """One pass of the pipeline: its chain of stages, measured and recorded."""

    def __init__(
        self,
        stages: Sequence[Stage[Any]],
        config: Config,
        *,
        record: RunRecord,
        monitor: MemoryMonitor,
        observer: Observer | None = None,
        cache: Path | None = None,
    ) -> None:
        self._record = record
        self._observer = observer or Observer()
        self._meter = Meter(monitor)
        self.chain = StageChain(
            stages,
            config,
            cache=cache or Path(config["outputs"]) / "cache",
            charge=self._meter.charge,
            host_peak=lambda: monitor.peak_host_bytes,
            show_text=self._show if self._observer.sees_text else None,
        )
        self._cached: dict[str, bool] = {}
        self._reports: dict[str, Report] = {}
        self._merged: set[str] = set()
        self._lacking: set[str] = set()
        self.at_work: str | None = None
        """The stage whose turn it is: the one to name where something fails."""
        self._showing: str | None = None

    def run(self) -> Mapping[str, Report]:
        """Run every stage, and return what each reports. Raises what a stage raises."""
        try:
            self._find_cached()
            self._work()
        finally:
            self.chain.release()
        self.chain.sweep()
        return self._reports

    def _work(self) -> None:
        """Run the stages that aren't cached, and those of which metrics are lacking."""
        cached = list(self.chain.artifacts)
        self._lacking = {name for name in cached if self.chain.lacks_metrics(name)}
        remaining = [name for name in self.chain.stages if name not in cached or name in self._lacking]
        fresh = [name for name in remaining if name not in cached]
        for name in fresh:
            self.chain.begin_measuring(name)
        raise_faults([fault for name in fresh for fault in self._examine(name)])
        self._write_record()
        for name in remaining:
            self.at_work = name
            self._observer.begins(name)
            _log.info("%s: begins", name)
            with self._meter.charge(name):
                self._gather(name)
                if name not in cached:
                    self._cached[name] = self.chain.obtain(name)
                self._reports[name] = self.chain.report(name, is_new=not self._cached[name])
            self.chain.let_go(remaining[remaining.index(name) + 1 :])
            self._write_record()
            _log.info("%s: ends after %.3f s; %s", name, self._meter.usage(name).seconds, self._reports[name].summary)

    def _show(self, text: str) -> None:
        """Tell the observer of ``text``; before the first of a stage, the record is brought up to date."""
        assert self.at_work is not None
        if self._showing != self.at_work:
            self._write_record()
            self._showing = self.at_work
        self._observer.shows(self.at_work, text, dict(self._reports))

    def _examine(self, name: str) -> Sequence[Fault]:
        with self._meter.charge(name), uncollected():  # it imports what the model's code needs
            return list(self.chain.stages[name].examine(self.chain.config))

    def _find_cached(self) -> None:
        """Find the artifacts of the leading stages, up to the first that isn't there: later keys depend on it."""
        for name in self.chain.stages:
            self.at_work = name
            with self._meter.charge(name):
                self._gather(name)
                artifact = self.chain.find(name)
            if artifact is None:
                return
            _log.info("%s: cached, %s", name, artifact.folder)
            self._cached[name] = True

    def _gather(self, name: str) -> None:
        """Gather what ``name`` depends on, if that isn't done, and tell the observer."""
        if name not in self.chain.outlines:
            self.chain.key(name)
            sources = self.chain.sources(name)
            self._record.note_sources(sources)
            self._observer.keyed(name, sources)

    def _write_record(self) -> None:
        """Bring the record up to date: what an earlier stage used may have grown since it was last written."""
        with self._record.written_once():
            self._note_stages()

    def _note_stages(self) -> None:
        for name, artifact in self.chain.artifacts.items():
            if name in self._lacking and name not in self._reports:
                continue
            usage = self._meter.usage(name)
            self._record.add_stage(
                StageRun(
                    name=name,
                    key=artifact.key,
                    cached=self._cached[name],
                    measured=name in self._lacking,
                    seconds=usage.seconds,
                    artifact=str(artifact.folder),
                    peak_host_bytes=usage.peak_host_bytes,
                    peak_device_bytes={str(device): count for device, count in usage.peak_device_bytes.items()},
                    inputs=self.chain.outlines[name],
                )
            )
            if name not in self._reports:
                self._reports[name] = self.chain.report(name, is_new=False)
            if name not in self._merged:
                self._merged.add(name)
                self._record.merge(self._reports[name], stage=name)
                if DEVICE_MAP in artifact.files:
                    self._record.note(device_map=artifact.json(DEVICE_MAP))
