"""How a training went: the loss of each step, one line a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import plotly.graph_objects as go

from offstage.pipeline.report.figures import EARLIER, SERIES, Picture, figure, named, shown, told, told_first
from offstage.pipeline.report.run_folders import Job


def loss_picture(jobs: Sequence[Job], labels: Mapping[str, str]) -> Picture | None:
    """Return the losses of the jobs that trained, None where none did."""
    trained = [job for job in jobs if any(step.loss is not None for step in job.run.steps)]
    rows = trained[: len(SERIES)]
    if not rows:
        return None
    drawn = figure(
        [_line(job, labels[job.name], SERIES[index]) for index, job in enumerate(rows)], showlegend=True,
        xaxis={"title": {"text": "step"}, "tickformat": "d"}, yaxis={"title": {"text": "loss"}},
    )  # fmt: skip
    caption = "The mean over the tokens of a step, in nats."
    caption += f" A dashed line was {EARLIER}." * any(job.run.provenance.is_cached for job in rows)
    return Picture("losses", "Loss of each step", caption + told_first(len(rows), len(trained)), drawn)


def _line(job: Job, label: str, ink: str) -> go.Scatter:
    steps = [(number, step.loss) for number, step in enumerate(job.run.steps, 1) if step.loss is not None]
    return go.Scatter(
        x=[step for step, _ in steps], y=[loss for _, loss in steps], name=named(label),
        mode="lines" if len(steps) > 1 else "markers",
        line={"color": ink, "width": 1.8, "dash": "dash" if job.run.provenance.is_cached else "solid"},
        **shown([told(job.name, f"step {step}: {loss:.4f}") for step, loss in steps], [job.link] * len(steps)),
    )  # fmt: skip
