"""Every mark of a picture leads to the folder of its job, and what an earlier run measured is hollow in all of them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from offstage.pipeline.report.checkpoint_groups import group_jobs
from offstage.pipeline.report.figures import Picture
from offstage.pipeline.report.page import pictures
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.sample_runs import sample, write_run

EXPERTS = {"model.layers.0.mlp.experts": {"hits": 3, "misses": 1, "streamed_bytes": 7, "evictions": 0}}
SERIES = [(0.0, 10**8), (1.0, 10**9)]
MARKED = ("speed", "samples", "pareto", "memory", "timeline", "losses")
NAMED = ("samples", "memory", "experts", "stages", "placement")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Picture]:
    """Two jobs, the second served from the cache, in a folder whose name must be escaped."""
    folder = tmp_path_factory.mktemp("of pictures")
    for number in (0, 1):
        earlier = bool(number)
        samples = [sample(seconds + number, earlier=earlier) for seconds in (0.5, 0.6, 0.7)]
        write_run(
            folder / "a & b" / str(number), budget=(number + 1) * 10**9, seconds=0.6 + number, cached=earlier,
            samples=samples, experts=EXPERTS, steps=[{"loss": 2.0}, {"loss": 1.0}], series=SERIES,
        )  # fmt: skip
    (group,) = group_jobs(find([folder], page_folder=folder).jobs)
    return {picture.name: picture for picture in pictures(group)}


def links(drawing: str, inside: str) -> set[str]:
    """Return where those links of ``drawing`` lead that have an element ``inside``."""
    found = re.findall(r'<a href="([^"]*)" tabindex="-1">(.*?)</a>', drawing, re.DOTALL)
    return {link for link, content in found if f"<{inside}" in content}


@pytest.mark.parametrize("name", MARKED)
def test_marks_lead_to_the_folder_of_their_job(name: str, drawn: dict[str, Picture]) -> None:
    expected = {"a%20%26%20b/0/", "a%20%26%20b/1/"}
    if name == "timeline":
        expected = {"a%20%26%20b/0/"}
    for drawing in (drawn[name].wide, drawn[name].narrow):
        assert links(drawing, "use") | links(drawing, "path") == expected
        assert "_blank" not in drawing


@pytest.mark.parametrize("name", NAMED)
def test_the_names_of_rows_lead_there_too(name: str, drawn: dict[str, Picture]) -> None:
    for drawing in (drawn[name].wide, drawn[name].narrow):
        assert {"a%20%26%20b/0/", "a%20%26%20b/1/"} >= links(drawing, "text") >= {"a%20%26%20b/0/"}


def test_without_a_page_nothing_is_linked(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    (group,) = group_jobs(find([tmp_path]).jobs)
    assert all("<a" not in picture.wide for picture in pictures(group))


def test_every_picture_of_figures_says_that_some_are_an_earlier_runs(drawn: dict[str, Picture]) -> None:
    for name in ("speed", "samples", "pareto", "memory", "losses", "experts"):
        assert any("earlier run" in key.text for key in drawn[name].keys), name
    assert "timeline" in drawn
