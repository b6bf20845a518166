"""The page: one file with everything in it, for any screen, and nothing that it fetches."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from pipeline.report.comparison import RunComparison
from pipeline.report.figures import Picture
from pipeline.report.plots.experts import expert_picture
from pipeline.report.plots.memory import memory_picture, timeline_picture
from pipeline.report.plots.pareto import pareto_picture
from pipeline.report.plots.placement import placement_picture
from pipeline.report.plots.samples import sample_picture
from pipeline.report.plots.speed import speed_picture
from pipeline.report.plots.stage_times import stage_picture
from pipeline.report.plots.training import loss_picture
from pipeline.report.quantities import listed
from pipeline.report.summary import MOST_ROWS, Summary, headline, labels

MOST_ANSWERS = 6
_MOST_CHARACTERS = 600


def report_page(summary: Summary, *, title: str) -> str:
    """Return the report as HTML."""
    return _render(
        "report.html.jinja",
        title=title,
        summary=summary,
        facts=headline(summary),
        pictures=pictures(summary),
        most_answers=MOST_ANSWERS,
    )


def comparison_page(comparison: RunComparison) -> str:
    """Return what changed between two runs as HTML."""
    return _render("compare.html.jinja", title="Two runs compared", comparison=comparison)


def pictures(summary: Summary) -> Sequence[Picture]:
    """Return the plots that the records have numbers for, in the order of the page."""
    jobs, names = summary.jobs, labels(summary.jobs, summary.differences)
    drawn = [
        speed_picture(summary.series),
        sample_picture(jobs, names, summary.noise, most=MOST_ROWS),
        pareto_picture(summary.front),
        placement_picture(summary.placements, names),
        memory_picture(jobs, names, most=MOST_ROWS),
        timeline_picture(jobs),
        loss_picture(jobs),
        expert_picture(jobs, names, most=MOST_ROWS),
        stage_picture(jobs, names, most=MOST_ROWS),
    ]
    return [picture for picture in drawn if picture]


def _render(template: str, **content: object) -> str:
    """Fill in ``template``. Everything is escaped but our own SVG, whose texts matplotlib has escaped."""
    environment = Environment(
        loader=PackageLoader("pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"listed": listed, "svg": Markup, "cut": _cut}
    return environment.get_template(template).render(content)


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters)"
