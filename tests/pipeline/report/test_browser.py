"""The page as a reader sees it: in a real browser, on a phone and on a desk, in the light and in the dark."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.report.command import run
from tests.pipeline.report.browser import CONTRAST, Browser, browser, installed
from tests.pipeline.report.sample_runs import write_sweep

FOUND = installed()
pytestmark = pytest.mark.skipif(FOUND is None, reason="no chromium here: apt-get install chromium")

PLOTS = ["speed", "pareto", "placement", "memory", "stages"]
VIEWS = [(width, scheme) for width in (390, 1440) for scheme in ("light", "dark")]
ROWS = "[...document.querySelectorAll('#jobs tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
SHOWN = """[...document.querySelectorAll('figure')].map(figure => {
  const shown = [...figure.querySelectorAll('svg')].filter(svg => svg.getBoundingClientRect().width > 0);
  const box = element => element.getBoundingClientRect();
  const marks = shown.flatMap(svg => [...svg.querySelectorAll('path, use')]).filter(mark => box(mark).width > 0);
  const texts = shown.flatMap(svg => [...svg.querySelectorAll('text')]);
  return {
    name: figure.id, pictures: shown.length, width: box(shown[0]).width, height: box(shown[0]).height,
    marks: marks.length, texts: texts.length,
    type: Math.min(...texts.map(text => parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a)),
    outside: texts.filter(text => box(text).left < -1 || box(text).right > innerWidth + 1).map(text => text.outerHTML),
    unresolved: shown.map(svg => svg.outerHTML.match(/#0a[0-9a-f]{2}f5/g)).filter(Boolean).length,
  };
})"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    figures = {"storage_bandwidth_bytes_per_second": 1.6e9, "predicted_seconds_per_token": 0.7}
    run([str(write_sweep(folder, metrics=figures))])
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert FOUND
    with browser(FOUND) as opened:
        yield opened


@pytest.fixture(params=VIEWS, ids=[f"{width}-{scheme}" for width, scheme in VIEWS])
def view(request: pytest.FixtureRequest, chromium: Browser, page: Path) -> tuple[Browser, int, str]:
    width, scheme = request.param
    chromium.open(page, width=width, scheme=scheme)
    return chromium, width, scheme


def test_the_table_holds_the_numbers_of_the_csv(view: tuple[Browser, int, str], page: Path) -> None:
    headings, *rows = view[0].evaluate(ROWS)
    titles = [" ".join(heading.split()) for heading in headings]
    assert titles == [
        "job", "status", "device_map", "budget cpu GB", "time a token s", "time a token, predicted ms",
        "time a token, bound s", "speed tokens/s",
        "streamed a token GB", "peak cpu GB",
    ]  # fmt: skip
    with page.with_name("report.csv").open(newline="") as file:
        known = list(csv.DictReader(file))
    assert len(rows) == len(known) == 8
    for row, job in zip(rows, known, strict=True):
        cells = dict(zip(titles, row, strict=True))
        assert (cells["job"], cells["device_map"]) == (job["job"], job["config.device_map"])
        if job["status"] == "completed":
            assert float(cells["time a token s"]) == round(float(job["metrics.decode_seconds_per_token"]), 3)
            assert float(cells["streamed a token GB"]) == round(int(job["metrics.streamed_bytes_per_token"]) / 1e9, 2)
            assert float(cells["peak cpu GB"]) == round(int(job["measured_bytes.cpu"]) / 1e9, 2)
    assert rows[6][1] == "failed"


def test_every_plot_is_drawn_and_can_be_read(view: tuple[Browser, int, str]) -> None:
    chromium, width, _ = view
    plots: list[dict[str, Any]] = chromium.evaluate(SHOWN)
    assert [plot["name"] for plot in plots] == PLOTS
    for plot in plots:
        assert plot["pictures"] == 1, plot
        assert min(width, 1080) * 0.85 < plot["width"] <= width, plot
        assert plot["height"] > 100, plot
        assert plot["marks"] > 5, plot
        assert plot["texts"] > 5, plot
        assert plot["type"] >= 11, plot
        assert plot["outside"] == [], plot
        assert plot["unresolved"] == 0, plot


def test_the_page_does_not_scroll_sideways(view: tuple[Browser, int, str]) -> None:
    chromium, width, _ = view
    assert chromium.evaluate("innerWidth") == width
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width


def test_type_stands_out_from_the_page_in_either_scheme(view: tuple[Browser, int, str]) -> None:
    chromium, _, scheme = view
    seen = chromium.evaluate(CONTRAST)
    assert (seen["page"] > 0.9) == (scheme == "light")
    assert seen["worst"] >= 4.5
