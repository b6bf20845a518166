"""The runner: stages in order, through the cache.

It first finds the artifacts that are already there, which needs no model code. Only then are the remaining stages
asked whether the config is one that they can carry out, and only then does any work begin. Live halves are made when a
stage asks for one, and let go when no stage that remains will.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.cache.fingerprint import fingerprint
from pipeline.cache.outline import outline
from pipeline.cache.store import Store
from pipeline.config import check, made_sound
from pipeline.errors import ConfigError, Fault, raise_faults
from pipeline.installed_stages import installed_stages, stage_class
from pipeline.memory_monitor import MemoryMonitor
from pipeline.record import RunRecord, StageRecord
from pipeline.stage import Artifact, Config, Report, Stage, keyed
from pipeline.stage_usage import Meter

DEVICE_MAP = "device_map.json"
"""The file of an artifact that says which module goes where; the record keeps what it holds."""

_log = logging.getLogger("offstage")


class Observer:
    """What a run tells while it goes on. Override what you want to hear; an error raised there ends the run."""

    def keyed(self, stage: str, inputs: object) -> None:
        """The key of ``stage`` is known; ``inputs`` outlines what it stands for."""

    def begins(self, stage: str) -> None:
        """The stage begins its work; what the stages before it report is in the record."""


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
    faults += [fault for stage in stages for fault in stage.check(sound)]
    if faults:
        faults += [fault for stage in stages for fault in stage.examine(sound)]
    raise_faults(list({fault.key: fault for fault in reversed(faults)}.values())[::-1])  # two stages may see one fault
    return stages


class Runner:
    """One pass of the pipeline. It is the ``Context`` that the stages work in."""

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
        self._stages = {stage.name: stage for stage in stages}
        self._config = config
        self._record = record
        self._monitor = monitor
        self._observer = observer or Observer()
        self._cache = cache or Path(config["outputs"]) / "cache"
        self._meter = Meter(monitor)
        self._store = Store(self.cache)
        self._artifacts: dict[str, Artifact] = {}
        self._cached: dict[str, bool] = {}
        self._inputs: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self._outlines: dict[str, object] = {}
        self._live: dict[str, Any] = {}
        self._reports: dict[str, Report] = {}
        self.at_work: str | None = None
        """The stage whose turn it is: the one to name where something fails."""

    @property
    def config(self) -> Config:
        """The run's resolved config."""
        return self._config

    @property
    def cache(self) -> Path:
        """The cache's root."""
        return self._cache

    @property
    def host_peak(self) -> Callable[[], int]:
        """Returns the peak of anonymous host memory since the run began, in bytes."""
        return lambda: self._monitor.peak_host_bytes

    def artifact(self, stage: str) -> Artifact:
        """Return the artifact of the earlier stage ``stage``."""
        if stage not in self._artifacts:
            raise ConfigError(f"stages: {stage!r} must stand before the stage that needs it; see stages=generate")
        return self._artifacts[stage]

    def live(self, stage: str) -> Any:
        """Return the live half of the earlier stage ``stage``, made now if it isn't there."""
        if stage not in self._live:
            self.artifact(stage)
            with self._meter.charge(stage):
                self._live[stage] = self._stages[stage].revive(self._inputs[stage], self)
        return self._live[stage]

    def run(self) -> Mapping[str, Report]:
        """Run every stage, and return what each reports. Raises what a stage raises."""
        try:
            self._find_cached()
            self._work()
        finally:
            self._store.release()
        self._store.sweep()
        return self._reports

    def _work(self) -> None:
        """Run the stages that aren't cached."""
        remaining = [name for name in self._stages if name not in self._artifacts]
        raise_faults([fault for name in remaining for fault in self._examine(name)])
        self._write_record()
        for name in remaining:
            self.at_work = name
            self._observer.begins(name)
            _log.info("%s: begins", name)
            with self._meter.charge(name):
                self._obtain(name)
            self._release(remaining[remaining.index(name) + 1 :])
            self._write_record()
            _log.info("%s: ends after %.3f s; %s", name, self._meter.usage(name).seconds, self._reports[name].summary)

    def _examine(self, name: str) -> Sequence[Fault]:
        with self._meter.charge(name):
            return list(self._stages[name].examine(self._config))

    def _find_cached(self) -> None:
        """Find the artifacts of the leading stages, up to the first that isn't there: later keys depend on it."""
        for name in self._stages:
            self.at_work = name
            with self._meter.charge(name):
                found = self._store.find(name, self._key(name))
            if found is None:
                return
            _log.info("%s: cached, %s", name, found.folder)
            self._artifacts[name], self._cached[name] = found, True

    def _key(self, name: str) -> str:
        """Return the key of ``name``. Its inputs are gathered the first time, and kept for the work."""
        if name not in self._keys:
            stage = self._stages[name]
            self._inputs[name] = stage.gather(self)
            parts = keyed(self._inputs[name])
            self._keys[name] = fingerprint({"stage": name, "version": stage.version, "inputs": parts})
            self._outlines[name] = outline({"version": stage.version, **parts})
            self._observer.keyed(name, self._outlines[name])
        return self._keys[name]

    def _obtain(self, name: str) -> None:
        stage, key = self._stages[name], self._key(name)
        artifact, live, cached = self._store.obtain(
            name, key, lambda folder: stage.build(self._inputs[name], self, folder)
        )
        self._artifacts[name], self._cached[name] = artifact, cached
        if live is not None:
            self._live[name] = live

    def _release(self, remaining: Sequence[str]) -> None:
        """Let go of every live half that none of the ``remaining`` stages will ask for."""
        wanted: set[str] = set()
        frontier = {need for name in remaining for need in self._stages[name].needs}
        while frontier:
            wanted |= frontier
            unmade = [name for name in frontier if name not in self._live and name in self._stages]
            frontier = {need for name in unmade for need in self._stages[name].needs} - wanted
        self._live = {name: live for name, live in self._live.items() if name in wanted}

    def _write_record(self) -> None:
        """Bring the record up to date: what an earlier stage used may have grown since it was last written."""
        for name, artifact in self._artifacts.items():
            usage = self._meter.usage(name)
            self._record.add_stage(
                StageRecord(
                    name=name,
                    key=artifact.key,
                    cached=self._cached[name],
                    seconds=usage.seconds,
                    artifact=str(artifact.folder),
                    peak_host_bytes=usage.peak_host_bytes,
                    peak_device_bytes={str(device): count for device, count in usage.peak_device_bytes.items()},
                    inputs=self._outlines[name],
                )
            )
            if name not in self._reports:
                self._reports[name] = self._stages[name].report(artifact)
                self._record.merge(self._reports[name])
                if DEVICE_MAP in artifact.files:
                    self._record.note_device_map(artifact.json(DEVICE_MAP))
