"""How a training went: the loss of each step, one line a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from offstage.pipeline.report.figures import COLOURS, SERIES, Key, Picture, Size, dress, picture, told_first
from offstage.pipeline.report.run_folders import Job


def loss_picture(jobs: Sequence[Job], labels: Mapping[str, str]) -> Picture | None:
    """Return the losses of the jobs that trained, None where none did."""
    trained = [job for job in jobs if any(loss is not None for loss in job.run.losses)]
    shown = trained[: len(SERIES) - 1]
    if not shown:
        return None
    more = told_first(len(shown), len(trained))
    return picture(
        "losses",
        lambda figure, size: _paint(figure, size, shown),
        title="Loss of each step",
        caption=f"The mean over the tokens of a step, in nats.{more}",
        keys=[
            *(Key(SERIES[index], "line", labels[job.name]) for index, job in enumerate(shown)),
            *[Key("muted", "dashed", "an earlier run's")] * any(job.run.provenance.is_cached for job in shown),
        ],
        height=lambda size: 220 if size.narrow else 260,
    )


def _paint(figure: Figure, size: Size, jobs: Sequence[Job]) -> None:
    axes = figure.subplots()
    dress(axes, x_label="step", y_label="loss")
    axes.xaxis.set_major_locator(MaxNLocator(5 if size.narrow else 10, integer=True))
    for index, job in enumerate(jobs):
        known = [(step, loss) for step, loss in enumerate(job.run.losses, 1) if loss is not None]
        steps, losses = zip(*known, strict=True)
        marker = "o" if len(known) == 1 else None  # a line through one point is none
        style = "--" if job.run.provenance.is_cached else "-"
        axes.plot(
            steps, losses, marker=marker, linestyle=style, color=COLOURS[SERIES[index]], linewidth=1.5,
            url=job.link or None,
        )  # fmt: skip
