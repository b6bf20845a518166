"""The page as a reader sees it: in a real browser, on a phone and on a desk, in the light and in the dark."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.report.command import run
from tests.pipeline.report.browser import CONTRAST, DRAWN, Browser, browser, installed
from tests.pipeline.report.sample_runs import write_sweep

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

PLOTS = ["speed", "pareto", "placement", "memory", "stages"]
VIEWS = [(width, scheme) for width in (390, 1440) for scheme in ("light", "dark")]
ROWS = "[...document.querySelectorAll('#table tr')].map(row => [...row.cells].map(cell => cell.innerText.trim()))"
SHOWN = """[...document.querySelectorAll('figure')].map(figure => {
  const box = element => element.getBoundingClientRect();
  const texts = [...figure.querySelectorAll('svg text')].filter(text => box(text).width > 0);
  return {
    name: figure.id, width: box(figure.querySelector('.main-svg')).width,
    height: box(figure.querySelector('.main-svg')).height,
    marks: figure.querySelectorAll('.points path, .point path, path.point').length, texts: texts.length,
    type: Math.min(...texts.map(text => text.matches('.bartext') ? 99 : parseFloat(getComputedStyle(text).fontSize))),
    outside: texts.filter(text => box(text).left < -1 || box(text).right > innerWidth + 1).map(text => text.outerHTML),
    unresolved: (figure.querySelector('.main-svg').outerHTML.match(/var\\(--/g) ?? []).length,
    buttons: [...figure.querySelectorAll('.modebar-btn')].map(button => button.dataset.title),
  };
})"""
PLACE = """(() => {{
  const plot = document.querySelector('#{name} > div'), {{xaxis, yaxis}} = plot._fullLayout, trace = plot.data[{trace}];
  plot.scrollIntoView({{block: 'center'}});
  const box = plot.getBoundingClientRect();
  return [box.left + xaxis._offset + xaxis.d2p(trace.x[0]), box.top + yaxis._offset + yaxis.d2p(trace.y[0])];
}})()"""
"""Gives where on the screen the first mark of a trace is."""
HOVERED = "document.querySelector('#speed .hoverlayer').textContent"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    figures = {"storage_bandwidth_bytes_per_second": 1.6e9, "predicted_seconds_per_token": 0.7}
    run([str(write_sweep(folder, metrics=figures))])
    return folder / "report.html"


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    assert CHROMIUM
    with browser(CHROMIUM) as opened:
        yield opened


@pytest.fixture(params=VIEWS, ids=[f"{width}-{scheme}" for width, scheme in VIEWS])
def view(request: pytest.FixtureRequest, chromium: Browser, page: Path) -> tuple[Browser, int, str]:
    width, scheme = request.param
    chromium.draw(page, width=width, scheme=scheme)
    return chromium, width, scheme


def test_the_table_holds_the_numbers_of_the_csv(view: tuple[Browser, int, str], page: Path) -> None:
    headings, *rows = view[0].evaluate(ROWS)
    titles = [" ".join(heading.split()) for heading in headings]
    details = ["time a token, predicted ms", "time a token, lower bound s", "speed tokens/s", "streamed a token GB"]
    details = [] if view[1] < 600 else details  # a phone has no room for them
    assert titles == [
        "job", "status", "device_map", "budget cpu GB", "time a token s", *details, "peak cpu GB",
    ]  # fmt: skip
    with page.with_name("report.csv").open(newline="") as file:
        known = list(csv.DictReader(file))
    assert len(rows) == len(known) == 8
    for row, job in zip(rows, known, strict=True):
        cells = dict(zip(titles, row, strict=True))
        assert (cells["job"], cells["device_map"]) == (job["job"], job["config.device_map"])
        if job["status"] == "completed":
            assert float(cells["time a token s"]) == round(float(job["metrics.decode_seconds_per_token"]), 3)
            assert float(cells["peak cpu GB"]) == round(int(job["measured_bytes.cpu"]) / 1e9, 2)
        if job["status"] == "completed" and details:
            assert float(cells["streamed a token GB"]) == round(int(job["metrics.streamed_bytes_per_token"]) / 1e9, 2)
    assert rows[6][1] == "failed"


def test_every_plot_is_drawn_and_can_be_read(view: tuple[Browser, int, str]) -> None:
    chromium, width, _ = view
    plots: list[dict[str, Any]] = chromium.evaluate(SHOWN)
    assert [plot["name"] for plot in plots] == PLOTS
    for plot in plots:
        assert min(width, 1080) * 0.85 < plot["width"] <= width, plot
        assert plot["height"] > 100, plot
        assert plot["marks"] > 2, plot
        assert plot["texts"] > 5, plot
        assert plot["type"] >= 11, plot
        assert plot["outside"] == [], plot
        assert plot["unresolved"] == 0, plot
        assert not any("Share" in button for button in plot["buttons"]), "nothing is sent to anyone"


def test_nothing_is_refused_by_the_pages_policy_and_no_script_fails(view: tuple[Browser, int, str]) -> None:
    assert view[0].evaluate("faults") == []


def test_the_page_does_not_scroll_sideways(view: tuple[Browser, int, str]) -> None:
    chromium, width, _ = view
    assert chromium.evaluate("innerWidth") == width
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width


def test_type_stands_out_from_the_page_in_either_scheme(view: tuple[Browser, int, str]) -> None:
    chromium, _, scheme = view
    seen = chromium.evaluate(CONTRAST)
    assert (seen["page"] > 0.9) == (scheme == "light")
    assert seen["worst"] >= 4.5


@pytest.fixture
def desk(chromium: Browser, page: Path) -> Browser:
    chromium.draw(page, width=1440, scheme="light")
    return chromium


def measured(desk: Browser) -> tuple[int, float, float]:
    """Return the first trace of what was measured, and where its first mark is on the screen."""
    traces = desk.evaluate("document.querySelector('#speed > div').data.map(trace => trace.name)")
    index = traces.index("device_map=sequential")
    x, y = desk.evaluate(PLACE.format(name="speed", trace=index))
    return index, x, y


def test_a_mark_tells_its_job_and_numbers_to_who_points_at_it(desk: Browser) -> None:
    _, x, y = measured(desk)
    desk.point(x - 30, y)
    desk.point(x, y)
    tooltip = desk.evaluate(f"new Promise(done => setTimeout(() => done({HOVERED}), 300))")
    assert "#0" in tooltip
    assert "budget 1.00 GB" in tooltip
    assert "time a token 1.562 spredicted 700.0 mslower bound 1.562 s" in tooltip


def test_a_rectangle_zooms_and_a_double_click_shows_all_again(desk: Browser) -> None:
    _, x, y = measured(desk)
    ends = "document.querySelector('#speed > div')._fullLayout.xaxis.range"
    before = desk.evaluate(ends)
    desk.point(x + 60, y + 20, "Pressed")
    desk.point(x + 260, y + 120)
    desk.point(x + 260, y + 120, "Released")
    after = desk.evaluate(ends)
    assert after[1] - after[0] < (before[1] - before[0]) / 2
    desk.evaluate("document.querySelector('#speed [data-title=\"Reset axes\"]').click()")
    assert desk.evaluate(ends) == before


def test_a_click_on_the_legend_hides_and_shows_a_series(desk: Browser) -> None:
    index, *_ = measured(desk)
    visible = f"document.querySelector('#speed > div').data[{index}].visible ?? true"
    entry = (
        "[...document.querySelectorAll('#speed .legend .traces')].find(e => e.textContent == 'device_map=sequential')"
    )
    x, y = desk.evaluate(
        f"(() => {{ const b = {entry}.getBoundingClientRect(); return [b.left + 20, b.top + b.height / 2]; }})()"
    )
    for expected in ("legendonly", True):
        desk.point(x, y, "Pressed", "Released")
        assert desk.evaluate(f"new Promise(done => setTimeout(() => done({visible}), 600))") == expected


def test_the_pictures_take_the_colours_of_the_scheme_that_the_reader_changes_to(chromium: Browser, page: Path) -> None:
    ink = "getComputedStyle(document.querySelector('#speed .legendtext')).fill"
    chromium.draw(page, width=1440, scheme="light")
    light = chromium.evaluate(ink)
    chromium.prefer("dark")
    dark = chromium.evaluate(f"new Promise(done => setTimeout(() => done({ink}), 1500))")
    assert light == "rgb(28, 31, 36)"
    assert dark == "rgb(232, 234, 237)"


UNDRAWN = "[...document.querySelectorAll('figure')].filter(figure => !figure.querySelector('.main-svg')).map(f => f.id)"


def test_a_picture_is_drawn_where_it_comes_near_what_is_seen_and_nothing_moves(chromium: Browser, page: Path) -> None:
    for width in (1440, 390):
        chromium.open(page, width=width, scheme="light")
        height = chromium.evaluate("document.documentElement.scrollHeight")
        assert "stages" in chromium.evaluate(UNDRAWN)
        chromium.evaluate("document.getElementById('stages').scrollIntoView()")
        drawn = "document.querySelector('#stages .main-svg')"
        chromium.evaluate(
            f"new Promise(done => {{ const look = () => {drawn} ? done() : setTimeout(look, 20); look(); }})"
        )
        assert abs(chromium.evaluate("document.documentElement.scrollHeight") - height) <= 1
        chromium.evaluate(DRAWN)
        assert abs(chromium.evaluate("document.documentElement.scrollHeight") - height) <= 1


def test_paper_has_all_pictures(chromium: Browser, page: Path) -> None:
    chromium.open(page, width=1440, scheme="light")
    assert chromium.evaluate(UNDRAWN) != []
    assert chromium.print_page().startswith(b"%PDF")
    assert chromium.evaluate(UNDRAWN) == []
