"""Every mark of a picture leads to the folder of its job, and each picture says what an earlier run measured."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.report.checkpoint_groups import group_jobs
from offstage.pipeline.report.figures import Picture
from offstage.pipeline.report.page import pictures
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.sample_runs import repeat, write_run

SERIES = [(0.0, 10**8), (1.0, 10**9)]
MARKED = ("speed", "repeats", "pareto", "memory", "timeline", "stages")
NAMED = ("repeats", "memory", "stages", "placement")
FOLDERS = {"a%20%26%20b/0/", "a%20%26%20b/1/"}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Picture]:
    """Two jobs, the second served from the cache, in a folder whose name must be escaped."""
    folder = tmp_path_factory.mktemp("of pictures")
    for number in (0, 1):
        earlier = bool(number)
        repeats = [repeat(seconds + number, earlier=earlier) for seconds in (0.5, 0.6, 0.7)]
        write_run(
            folder / "a & b" / str(number), budget=(number + 1) * 10**9, seconds=0.6 + number, cached=earlier,
            repeats=repeats, series=SERIES,
        )  # fmt: skip
    (group,) = group_jobs(find([folder], page_folder=folder).jobs)
    return {picture.name: picture for picture in pictures(group)}


@pytest.mark.parametrize("name", MARKED)
def test_marks_lead_to_the_folder_of_their_job(name: str, drawn: dict[str, Picture]) -> None:
    links = {link for trace in drawn[name].figure.data for link in trace.customdata or ()}
    assert links == ({"a%20%26%20b/0/"} if name == "timeline" else FOLDERS)


@pytest.mark.parametrize("name", NAMED)
def test_the_names_of_rows_lead_there_too(name: str, drawn: dict[str, Picture]) -> None:
    names = drawn[name].figure.layout.yaxis.ticktext
    assert all('target="_self"' in text for text in names)
    assert FOLDERS >= {text.split('"')[1] for text in names} >= {"a%20%26%20b/0/"}


def test_without_a_page_nothing_is_linked(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    (group,) = group_jobs(find([tmp_path]).jobs)
    for picture in pictures(group):
        assert "<a" not in picture.figure.to_json(), picture.name
        assert {link for trace in picture.figure.data for link in trace.customdata or ()} <= {""}


def test_every_picture_of_figures_says_that_some_are_an_earlier_runs(drawn: dict[str, Picture]) -> None:
    for name in ("speed", "pareto", "memory"):
        assert "measured by an earlier run" in drawn[name].caption, name
    for name in ("speed", "repeats", "pareto", "memory"):
        assert "earlier run" in drawn[name].figure.to_json(), name
    assert "timeline" in drawn


def test_what_a_record_says_is_no_markup_in_a_picture(tmp_path: Path) -> None:
    for number, policy in enumerate(("<b>bold</b>", "balanced")):
        write_run(tmp_path / str(number), policy=policy, repeats=[repeat(0.5), repeat(0.6)], series=SERIES)
    (group,) = group_jobs(find([tmp_path]).jobs)
    figures = "".join(picture.figure.to_json() for picture in pictures(group))
    assert "&lt;b&gt;bold" in figures.replace("\\u003c", "<").replace("\\u0026", "&")
    assert "<b>" not in figures.replace("\\u003c", "<").replace("\\u003e", ">")
