"""The page: one file with everything in it, for any screen, and nothing that it fetches."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.offline import get_plotlyjs

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.report.checkpoint_groups import MOST_ROWS, CheckpointGroup
from offstage.pipeline.report.differences import told_differences
from offstage.pipeline.report.exports import defused
from offstage.pipeline.report.figures import Picture, linked
from offstage.pipeline.report.plots.layers import placement_picture
from offstage.pipeline.report.plots.memory import memory_picture, timeline_picture
from offstage.pipeline.report.plots.speed import pareto_picture, speed_picture
from offstage.pipeline.report.plots.times import repeat_picture, stage_picture
from offstage.pipeline.report.quantities import MISSING, listed
from offstage.pipeline.report.run_folders import natural
from offstage.pipeline.report.summary import Summary, group_facts, headline
from offstage.pipeline.report.table import Column
from offstage.pipeline.run_schema import Number

MOST_ANSWERS = 6
MOST_FAILURES = 24
"""So many different reasons why jobs aren't completed are told."""
FEW_JOBS = 12
"""So many jobs are looked through without a filter."""
MOST_CHOICES = 12
"""Of a column with so many different words at most, some of them can be chosen."""
MOST_SECTIONS = 8
"""So many checkpoints have a section of their own, with pictures; the table has the jobs of all."""
_MOST_CHARACTERS = 600
_BUNDLE = files("itables").joinpath("html")
"""Where DataTables is, for a page that fetches nothing."""


def report_page(summary: Summary, title: str, *, author: str = "", caption: str = "") -> str:
    """Return the report as HTML: everything is escaped but the libraries' scripts and style.

    Its ``title`` stands on top, and who made it and what it shows, where that is said.
    """
    environment = Environment(
        loader=PackageLoader("offstage.pipeline.report"), autoescape=True, undefined=StrictUndefined,
        trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    environment.filters |= {"listed": listed, "cut": _cut, "sha256": _sha256}
    return environment.get_template("report.html.jinja").render(
        title=title,
        author=author,
        caption=caption,
        summary=summary,
        facts=headline(summary),
        differing=told_differences(summary.conditions),
        sections=_sections(summary.groups),
        rows=_rows(summary),
        most_answers=MOST_ANSWERS,
        most_failures=MOST_FAILURES,
        scripts=_scripts(),
        table_style=Markup(_BUNDLE.joinpath("dt_bundle.css").read_text(encoding="utf-8")),
    )


def _scripts() -> list[tuple[str, Markup]]:
    """Return the page's scripts with their types: plotly.js, then DataTables with what this page does with both.

    The bundle is a module that exports its DataTable; in the page nothing can import it, so it goes by its own name.
    """
    bundle = _BUNDLE.joinpath("dt_bundle.js").read_text(encoding="utf-8")
    own = files("offstage.pipeline.report").joinpath("templates", "page.js").read_text(encoding="utf-8")
    exported = re.search(r"([\w$]+) as default\b", bundle)
    if exported is None:
        raise ConfigError("itables: its DataTables bundle has no default export; install itables 2.9")
    table = f"{bundle}\n{own.replace('DATATABLE', exported[1])}"
    return [("text/javascript", Markup(get_plotlyjs())), ("module", Markup(table))]


def _rows(summary: Summary) -> dict[str, Any]:
    """Return the table as the page's script has it.

    Of each cell that is its HTML, the number that it is sorted by, and what the page's CSV has, null where that is
    the same.
    """
    shown = enumerate(summary.failures[:MOST_FAILURES], 1)
    reasons = {job.name: f"#failure-{number}" for number, failure in shown for job in failure.jobs}
    links = {"job": [job.link for job in summary.jobs], "status": [reasons.get(job.name, "") for job in summary.jobs]}
    cells = [_cells(column, links.get(column.title, [""] * len(summary.jobs))) for column in summary.table]
    many = len(summary.jobs) > FEW_JOBS
    columns = [
        {
            "title": _heading(column),
            "numeric": column.numeric,
            "choices": column.sets_apart and 1 < len(set(column.cells)) <= MOST_CHOICES,
            "detail": column.detail,
        }
        for column in summary.table
    ]
    return {"many": many, "columns": columns, "rows": list(zip(*cells, strict=True))}


def _cells(column: Column, links: Sequence[str]) -> list[tuple[str, Number | None, str | None]]:
    """Return the cells of ``column``; words are sorted as people do, #2 before #10, and what says nothing is last."""
    ranks = {word: rank for rank, word in enumerate(sorted(set(column.cells) - {MISSING}, key=natural))}
    keys = column.values or tuple(map(ranks.get, column.cells))
    words = [linked(word, link) for word, link in zip(column.cells, links, strict=True)]
    safe = [linked(str(cell), "") if (cell := defused(word)) != word else None for word in column.cells]
    return list(zip(words, keys, safe, strict=True))


def _heading(column: Column) -> Markup:
    """Return a heading that may go on in a new line after the dots and underscores of a key, with its unit."""
    title = Markup(re.sub(r"([._])", r"\1<wbr>", str(escape(column.title))))
    return Markup('{} <span class="unit">{}</span>').format(title, column.unit) if column.unit else title


def pictures(group: CheckpointGroup) -> Sequence[Picture]:
    """Return the plots that the records of one checkpoint have numbers for, in the order of the page."""
    jobs, names = group.jobs, group.labels
    drawn = [
        speed_picture(group.series, jobs),
        repeat_picture(jobs, names, group.noise, most=MOST_ROWS),
        pareto_picture(group.front),
        placement_picture(jobs, names, most=MOST_ROWS),
        memory_picture(jobs, names, most=MOST_ROWS),
        timeline_picture(jobs, names),
        stage_picture(jobs, names, most=MOST_ROWS),
    ]
    return [picture for picture in drawn if picture]


def _sections(groups: Sequence[CheckpointGroup]) -> list[dict[str, Any]]:
    """Return the sections of the first checkpoints that have anything to show; ids are of one alone on the page."""
    sections: list[dict[str, Any]] = []
    for group in groups:
        drawn, number = pictures(group), len(sections) + 1
        if len(sections) < MOST_SECTIONS and (drawn or group.answers):
            drawn = [replace(one, name=f"{one.name}-{number}") for one in drawn] if number > 1 else drawn
            sections.append({"group": group, "facts": group_facts(group), "pictures": drawn})
    return sections


def _sha256(script: str) -> str:
    """Return what the page's policy names a script by that may run."""
    return base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()


def _cut(text: str) -> str:
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_MOST_CHARACTERS]}… ({len(text):,} characters)"
