"""A stage that asks something of the placed model, and can ask it again to be measured: ``measure.repeats``, ``warmup``
and ``fresh``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from offstage.pipeline.measure import read_measure
from offstage.pipeline.stage import Artifact, Context, Report, SourceFiles, Stage
from offstage.stages.inference.inputs import InferenceInputs, inference_sources
from offstage.stages.inference.repeats import (
    TimedRepeat,
    kept_repeats,
    lacking,
    measured_memory,
    take_repeats,
    with_metrics,
)

if TYPE_CHECKING:  # sessions come with torch, which a run that is served from the cache does without
    from offstage.stages.inference.session import ModelSession

Inputs = TypeVar("Inputs", bound=InferenceInputs)


class MeasuredStage(Stage[Inputs]):
    """Its live half is a ``ModelSession``, and its artifact's ``file_name`` what that writes.

    ``results`` is what its outputs are called, ``seconds`` the metric of its time.
    """

    measures = True
    file_name: ClassVar[str]
    results: ClassVar[str]
    seconds: ClassVar[str]

    @abstractmethod
    def session(self, inputs: Inputs, context: Context) -> ModelSession[Any]:
        """Return the placed model and what ``inputs`` ask of it, ready to be asked."""

    @abstractmethod
    def describe(self, outputs: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
        """Return the line of the screen: what came out, and how fast."""

    @abstractmethod
    def screen(self, data: Mapping[str, Any], artifact: Artifact) -> str:
        """Return what a terminal shows of the artifact, whose file has ``data``."""

    def remarks(self, metrics: Mapping[str, Any]) -> tuple[str, ...]:
        """Return what must be known of the ``metrics`` by who uses them."""
        return ()

    def outputs(self, data: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
        """Return what the record has of what came out."""
        outputs: Sequence[Mapping[str, Any]] = data["outputs"]
        return outputs

    def sources(self, inputs: Inputs, context: Context) -> SourceFiles:
        """Return the files of data and of the tokenizer."""
        return inference_sources(inputs, context)

    def build(self, inputs: Inputs, context: Context, folder: Path) -> Any:
        """Ask it, and write what came of it; what finishes is kept as it does."""
        session = self._measured(inputs, context)
        session.perform(folder / self.file_name)
        return session

    def revive(self, inputs: Inputs, context: Context) -> ModelSession[Any]:
        """Return the model and what it is asked, ready to be asked again."""
        return self._measured(inputs, context)

    def _measured(self, inputs: Inputs, context: Context) -> ModelSession[Any]:
        """Return the session, with how fast the storage was before its weights were there."""
        from offstage.stages.inference.session import measure_storage

        rate = measure_storage(context)
        session = self.session(inputs, context)
        session.storage_rate = rate
        return session

    def report(self, artifact: Artifact) -> Report:
        """Return what came out, metrics and measured memory, and what a terminal shows."""
        data = artifact.json(self.file_name)
        outputs = self.outputs(data)
        return Report(
            summary=self.describe(outputs, data["metrics"]),
            memory=measured_memory(data),
            metrics=data["metrics"],
            experts=data.get("experts", {}),
            outputs=tuple(outputs),
            screen=self.screen(data, artifact),
            remarks=self.remarks(data["metrics"]),
        )

    def lacks_metrics(self, context: Context) -> bool:
        """Return whether fewer repeats are kept than the keys ``measure`` ask for."""
        return lacking(self._repeats(context, is_new=False), read_measure(context.config)) > 0

    def measure(self, inputs: Inputs, context: Context, report: Report, *, is_new: bool) -> Report:
        """Return ``report`` with the median of all repeats that are asked for, and with each of them."""
        wanted, repeats = read_measure(context.config), self._repeats(context, is_new=is_new)
        if lacking(repeats, wanted):
            repeats = take_repeats(
                context.live(self.name),
                context.artifact(self.name),
                repeats,
                wanted,
                cache=context.cache,
                expected=report.outputs,
                results=self.results,
            )
        return with_metrics(report, repeats, wanted, seconds=self.seconds, describe=self.describe)

    def _repeats(self, context: Context, *, is_new: bool) -> list[TimedRepeat]:
        """Return the repeats that are kept of the run's artifact."""
        artifact = context.artifact(self.name)
        stored = artifact.json(self.file_name)["repeat"]
        return kept_repeats(context.cache, artifact, stored, is_new=is_new)
