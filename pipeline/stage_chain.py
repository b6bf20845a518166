"""The chain of stages that a run, or a model loaded from Python, goes through: what each depends on, its two halves.

It is the ``Context`` that the stages work in. A stage's inputs are gathered once, its artifact is found in the cache or
built, and its live half is made when a later stage, or whoever holds the chain, asks for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import psutil

from offstage.pipeline.cache.fingerprint import fingerprint, outline
from offstage.pipeline.cache.sealed_files import move_aside
from offstage.pipeline.cache.store import Store
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.peers import are_together, peers
from offstage.pipeline.stage import Artifact, Config, Report, SourceFiles, Stage, keyed, model_name

Charge = Callable[[str], AbstractContextManager[Any]]
"""Makes a context for the work of a stage, to which what happens inside is charged."""


class StageChain:
    """The ``stages`` in order, under one ``config`` and with one ``cache``.

    ``charge`` surrounds all work on a stage; ``host_peak`` tells the peak of the host's memory so far; ``show_text``
    takes what a stage shows while it is at work.
    """

    def __init__(
        self,
        stages: Sequence[Stage[Any]],
        config: Config,
        *,
        cache: Path,
        charge: Charge = nullcontext,
        host_peak: Callable[[], int] = lambda: int(psutil.Process().memory_info().rss),
        show_text: Callable[[str], object] | None = None,
    ) -> None:
        self.stages = {stage.name: stage for stage in stages}
        self.artifacts: dict[str, Artifact] = {}
        """The artifacts that were found or built so far, by stage."""
        self.outlines: dict[str, dict[str, object]] = {}
        """What the key of each stage stands for, by stage."""
        self.config, self.cache, self.host_peak, self.show_text = config, cache, host_peak, show_text
        self._charge = charge
        self._store = Store(cache, model=model_name(config))
        self._inputs: dict[str, Any] = {}
        self._keys: dict[str, str] = {}
        self._live: dict[str, Any] = {}

    def artifact(self, stage: str) -> Artifact:
        """Return the artifact of the earlier stage ``stage``."""
        if stage not in self.artifacts:
            raise ConfigError(f"stages: {stage!r} must stand before the stage that needs it; see stages=generate")
        return self.artifacts[stage]

    def live(self, stage: str) -> Any:
        """Return the live half of the earlier stage ``stage``, made now if it isn't there."""
        if stage not in self._live:
            self.artifact(stage)
            with self._charge(stage):
                self._live[stage] = self.stages[stage].revive(self._inputs[stage], self)
        return self._live[stage]

    def key(self, name: str) -> str:
        """Return the key of ``name``. Its inputs are gathered the first time, and kept for the work."""
        if name not in self._keys:
            stage = self.stages[name]
            self._inputs[name] = stage.gather(self)
            parts = keyed(self._inputs[name])
            self._keys[name] = fingerprint({"stage": name, "version": stage.version, "inputs": parts})
            self.outlines[name] = {"version": stage.version, **{part: outline(value) for part, value in parts.items()}}
        return self._keys[name]

    def sources(self, name: str) -> SourceFiles:
        """Return which files ``name``, whose inputs are gathered, works on."""
        sources_of = getattr(self.stages[name], "sources", None)
        files: SourceFiles = SourceFiles() if sources_of is None else sources_of(self._inputs[name], self)
        return files

    def find(self, name: str) -> Artifact | None:
        """Return the artifact of ``name`` if the cache has it.

        Hosts that run together go on as one: what one of them lacks is made anew on all that would have to be called.
        """
        artifact = self._store.find(name, self.key(name))
        if are_together(self.config) and not peers().agree(artifact is not None):
            if artifact is not None and getattr(self.stages[name], "measures", False):
                move_aside(artifact.folder, "another host of the run lacks it")
            artifact = None
        if artifact is not None:
            self.artifacts[name] = artifact
        return artifact

    def obtain(self, name: str) -> bool:
        """Have the artifact of ``name``, built now if the cache lacks it; return whether it was there."""
        stage, key = self.stages[name], self.key(name)
        artifact, live, cached = self._store.obtain(
            name,
            key,
            lambda folder: stage.build(self._inputs[name], self, folder),
            resumes=getattr(stage, "resumes", ()),
        )
        self.artifacts[name] = artifact
        if live is not None:
            self._live[name] = live
        return cached

    def begin_measuring(self, name: str) -> None:
        """Have the stage ``name``, which will work, begin what it measures beside other work."""
        begin = getattr(self.stages[name], "begin_measuring", None)
        if begin is not None:
            begin(self.config, self.cache)

    def lacks_metrics(self, name: str) -> bool:
        """Return whether the run asks for metrics of ``name`` that the cache, which has its artifact, hasn't."""
        stage = self.stages[name]
        return getattr(stage, "measures", False) and stage.lacks_metrics(self)

    def report(self, name: str, *, is_new: bool) -> Report:
        """Return what ``name``, whose artifact is there, adds to the record; metrics that are lacking are measured."""
        stage = self.stages[name]
        report = stage.report(self.artifacts[name])
        if not getattr(stage, "measures", False):
            return report
        return stage.measure(self._inputs[name], self, report, is_new=is_new)

    def let_go(self, remaining: Sequence[str]) -> None:
        """Let go of every live half that none of the ``remaining`` stages will ask for."""
        wanted: set[str] = set()
        frontier = {need for name in remaining for need in self.stages[name].needs}
        while frontier:
            wanted |= frontier
            unmade = [name for name in frontier if name not in self._live and name in self.stages]
            frontier = {need for name in unmade for need in self.stages[name].needs} - wanted
        self._live = {name: live for name, live in self._live.items() if name in wanted}

    def release(self) -> None:
        """End the chain's use of the cache: its artifacts may be pruned."""
        self._store.release()

    def sweep(self) -> None:
        """Remove what killed processes left in the cache."""
        self._store.sweep()
