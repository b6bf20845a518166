"""A stage that runs the model, and can run it again to be measured: ``measure.repeats``, ``warmup`` and ``fresh``."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from offstage.pipeline.measure import read_measure
from offstage.pipeline.stage import Context, Inputs, Report, Stage
from offstage.stages.inference.repeats import kept_samples, lacking, take_samples, with_figures
from offstage.stages.inference.timed_samples import TimedSample


class MeasuredStage(Stage[Inputs]):
    """Its artifact's ``file_name`` holds the first sample under ``sample``; its live half is ``Repeatable``.

    ``results`` is what its outputs are called, ``seconds`` the metric of its time.
    """

    measures = True
    file_name: ClassVar[str]
    results: ClassVar[str]
    seconds: ClassVar[str]

    @abstractmethod
    def told(self, outputs: Sequence[Mapping[str, Any]], metrics: Mapping[str, Any]) -> str:
        """Return the line of the screen: what came out, and how fast."""

    def lacks_figures(self, context: Context) -> bool:
        """Return whether fewer samples are kept than the keys ``measure`` ask for."""
        return lacking(self._samples(context, is_new=False), read_measure(context.config)) > 0

    def measure(self, inputs: Inputs, context: Context, report: Report, *, is_new: bool) -> Report:
        """Return ``report`` with the median of all samples that are asked for, and with each of them."""
        wanted, samples = read_measure(context.config), self._samples(context, is_new=is_new)
        if lacking(samples, wanted):
            samples = take_samples(
                context.live(self.name),
                context.artifact(self.name),
                samples,
                wanted,
                cache=context.cache,
                expected=report.outputs,
                results=self.results,
            )
        return with_figures(report, samples, wanted, seconds=self.seconds, told=self.told)

    def _samples(self, context: Context, *, is_new: bool) -> list[TimedSample]:
        """Return the samples that are kept of the run's artifact."""
        artifact = context.artifact(self.name)
        stored = artifact.json(self.file_name)["sample"]
        return kept_samples(context.cache, artifact, stored, is_new=is_new)
