"""The page: one file with everything in it, for any screen, and nothing that it fetches."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from offstage.pipeline.report.checkpoint_groups import MOST_ROWS, CheckpointGroup
from offstage.pipeline.report.comparison import RunComparison
from offstage.pipeline.report.conditions import told_differences
from offstage.pipeline.report.figures import Picture
from offstage.pipeline.report.plots.experts import expert_picture
from offstage.pipeline.report.plots.lockstep import lockstep_picture
from offstage.pipeline.report.plots.memory import memory_picture
from offstage.pipeline.report.plots.memory_timeline import timeline_picture
from offstage.pipeline.report.plots.pareto import pareto_picture
from offstage.pipeline.report.plots.placement import placement_picture
from offstage.pipeline.report.plots.samples import sample_picture
from offstage.pipeline.report.plots.speed import speed_picture
from offstage.pipeline.report.plots.stage_times import stage_picture
from offstage.pipeline.report.plots.training import loss_picture
from offstage.pipeline.report.quantities import MISSING, listed
from offstage.pipeline.report.speed import drawn_front
from offstage.pipeline.report.summary import Fact, Summary, group_facts, headline

MOST_ANSWERS = 6
MOST_FAILURES = 24
"""So many different reasons why jobs aren't completed are told."""
ROWS_A_PAGE = 100
"""So many rows of the table are laid out at once: with thousands a browser takes seconds at each change."""
MOST_SECTIONS = 8
"""So many checkpoints have a section of their own, with pictures; the table has the jobs of all."""
_MOST_CHARACTERS = 600


@dataclass(frozen=True, slots=True)
class Heading:
    """What stands on top of a report: its ``title``, and who made it and what it shows, where that is said."""

    title: str
    author: str = ""
    caption: str = ""


@dataclass(frozen=True, slots=True)
class CheckpointSection:
    """What the page shows of one checkpoint: the facts of its jobs, and their pictures."""

    group: CheckpointGroup
    facts: Sequence[Fact]
    pictures: Sequence[Picture]


def report_page(summary: Summary, heading: Heading) -> str:
    """Return the report as HTML."""
    return _render(
        "report.html.jinja",
        **asdict(heading),
        summary=summary,
        facts=headline(summary),
        differing=told_differences(summary.conditions),
        sections=_sections(summary.groups),
        rows=_rows(summary),
        most_answers=MOST_ANSWERS,
        most_failures=MOST_FAILURES,
        script=Markup(files("offstage.pipeline.report").joinpath("templates", "table.js").read_text(encoding="utf-8")),
    )


def _rows(summary: Summary) -> dict[str, Any]:
    """Return all of the table's rows as the page's script has them, column by column, each cell no longer than shown.

    ``reasons`` has, for each row of a job that isn't completed, the number of the entry that says why, 0 without one.
    """
    shown = enumerate(summary.failures[:MOST_FAILURES], 1)
    reasons = {job.name: number for number, failure in shown for job in failure.jobs}
    return {
        "page": ROWS_A_PAGE,
        "missing": MISSING,
        "links": [job.link for job in summary.jobs],
        "reasons": [reasons.get(job.name, 0) for job in summary.jobs],
        "columns": [
            {"title": column.title, "cells": column.cells, "values": column.values or None} for column in summary.table
        ],
    }


def comparison_page(comparison: RunComparison) -> str:
    """Return what changed between two runs as HTML."""
    return _render("compare.html.jinja", title="Two runs compared", comparison=comparison)


def pictures(group: CheckpointGroup) -> Sequence[Picture]:
    """Return the plots that the records of one checkpoint have numbers for, in the order of the page."""
    jobs, names = group.jobs, group.labels
    drawn = [
        speed_picture(group.series, jobs),
        lockstep_picture(jobs),
        sample_picture(jobs, names, group.noise, most=MOST_ROWS),
        pareto_picture(drawn_front(group.front)),
        placement_picture(group.placements, jobs, names),
        memory_picture(jobs, names, most=MOST_ROWS),
        timeline_picture(jobs, names),
        loss_picture(jobs, names),
        expert_picture(jobs, names, most=MOST_ROWS),
        stage_picture(jobs, names, most=MOST_ROWS),
    ]
    return [picture for picture in drawn if picture]


def _sections(groups: Sequence[CheckpointGroup]) -> list[CheckpointSection]:
    """Return the sections of the first checkpoints that have anything to show; ids are of one alone on the page."""
    sections: list[CheckpointSection] = []
    for group in groups:
        drawn, number = pictures(group), len(sections) + 1
        if len(sections) < MOST_SECTIONS and (drawn or group.answers):
            drawn = [_numbered(one, number) for one in drawn] if number > 1 else drawn
            sections.append(CheckpointSection(group, group_facts(group), drawn))
    return sections


def _numbered(picture: Picture, number: int) -> Picture:
    """Return ``picture`` with ``number`` in its id and in all ids of its drawings."""
    name = f"{picture.name}-{number}"
    ids = re.compile(rf'(\bid="|aria-labelledby="|href="#|url\(#){re.escape(picture.name)}-')
    wide, narrow = (ids.sub(rf"\g<1>{name}-", drawing) for drawing in (picture.wide, picture.narrow))
    return replace(picture, name=name, wide=wide, narrow=narrow)


def _render(template: str, **content: object) -> str:
    """Fill in ``template``. Everything is escaped but our own SVG, whose texts matplotlib has escaped, and script."""
    environment = Environment(
        loader=PackageLoader("offstage.pipeline.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {"listed": listed, "svg": Markup, "cut": _cut, "breakable": _breakable, "sha256": _sha256}
    return environment.get_template(template).render(content)


def _breakable(title: str) -> Markup:
    """Return a heading that may go on in a new line after the dots and underscores of a key."""
    return Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(title))))


def _sha256(script: str) -> str:
    """Return what the page's policy names the one script by that may run."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters)"
