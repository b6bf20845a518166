"""How far the samples of each job lie apart: a box a job, for the prompt and for decoding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from offstage.pipeline.report.figures import (
    COLOURS,
    Key,
    Picture,
    Size,
    bar_place,
    dress,
    in_unit,
    measure,
    name_rows,
    picture,
    row_height,
    row_names,
    told_first,
)
from offstage.pipeline.report.noise import Noise
from offstage.pipeline.report.records import Number, RunSample
from offstage.pipeline.report.run_folders import Job

SampleTime = Callable[[RunSample], Number | None]
DECODING: tuple[str, SampleTime] = ("decoding: time a token", lambda sample: sample.token_seconds)
_PANELS: tuple[tuple[str, SampleTime], ...] = (
    ("prompt: time to first token", lambda sample: sample.first_token_seconds),
    DECODING,
)


def sample_picture(jobs: Sequence[Job], labels: Mapping[str, str], within: Noise, *, most: int) -> Picture | None:
    """Return the boxes of the jobs that were measured several times, None where none was."""
    several = [job for job in jobs if len(job.run.counting) > 1]
    rows = several[:most]
    if not rows:
        return None
    caption = "The box has the middle half of a job's samples, its line the median; the whiskers reach to the least and"
    caption += f" the largest, and every sample has a mark. {within.told()}"
    caption += told_first(len(rows), len(several))
    return picture(
        "samples",
        lambda figure, size: _paint(figure, size, rows, labels),
        title="Samples of each job",
        caption=caption.strip(),
        keys=_keys([sample for job in rows for sample in job.run.counting]),
        height=lambda size: (90 + row_height(size) * len(rows)) * (2 if size.narrow else 1),
    )


def _keys(samples: Sequence[RunSample]) -> list[Key]:
    keys = [Key("bar", "fill", "the middle half"), Key("s0", "full-o", "a sample")]
    keys += [Key("s0", "mark-o", "taken by an earlier run")] * any(sample.earlier for sample in samples)
    keys += [Key("s1", "mark-x", "taken while others used the processor")] * any(sample.busy for sample in samples)
    return keys


def _paint(figure: Figure, size: Size, rows: Sequence[Job], labels: Mapping[str, str]) -> None:
    shape = (len(_PANELS), 1) if size.narrow else (1, len(_PANELS))
    panels = figure.subplots(*shape, squeeze=False).ravel()
    for place, (axes, (title, value)) in enumerate(zip(panels, _PANELS, strict=True)):
        paint_samples(axes, rows, value, title=title, size=size)
        name_rows(axes, row_names(rows, labels), size=size)
        if place and not size.narrow:
            axes.set_yticks([])


def paint_samples(axes: Axes, rows: Sequence[Job], value: SampleTime, *, title: str, size: Size) -> None:
    """Draw the box of each job of ``rows``, and its samples: of each the time that ``value`` has of it."""
    every = [seconds for job in rows for sample in job.run.counting if (seconds := value(sample)) is not None]
    dress(axes, x_label=in_unit(title, measure(axes, "x", every, "seconds", size=size)))
    for row, job in enumerate(rows):
        known = [(seconds, one) for one in job.run.counting if (seconds := value(one)) is not None]
        _box(axes, row, known, job=job, size=size)


def _box(axes: Axes, row: int, samples: Sequence[tuple[Number, RunSample]], *, job: Job, size: Size) -> None:
    """Draw the box of ``samples`` of ``job``, an outline where all are an earlier run's, and a mark each."""
    offset, height = bar_place(size)
    url = job.link or None
    if samples:
        ink, (face, edge) = COLOURS["ink"], ("page", 1.6) if job.run.provenance.is_cached else ("bar", 0)
        box = {"facecolor": COLOURS[face], "edgecolor": COLOURS["bar"], "linewidth": edge, "url": url}
        axes.boxplot(
            [seconds for seconds, _ in samples], positions=[row + offset], widths=height, orientation="horizontal",
            whis=(0, 100), showfliers=False, manage_ticks=False, patch_artist=True, boxprops=box,
            medianprops={"color": ink, "linewidth": 2}, whiskerprops={"color": ink}, capprops={"color": ink},
        )  # fmt: skip
    for seconds, sample in samples:
        colour = COLOURS["s1" if sample.busy else "s0"]
        inside = "none" if sample.earlier else colour
        mark, length = ("x", 6) if sample.busy else ("o", 4.5)
        axes.plot(
            [seconds], [row + offset], mark, color=colour, markerfacecolor=inside, markersize=length, clip_on=False,
            url=url,
        )  # fmt: skip
