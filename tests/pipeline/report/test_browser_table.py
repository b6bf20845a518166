"""The table of jobs in a real browser: it sorts, filters and turns its pages there, by mouse and by keyboard."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.report.command import run
from tests.pipeline.report.browser import CONTRAST, Browser, browser, installed
from tests.pipeline.report.sample_runs import repeat, write_failure, write_many, write_run
from tests.pipeline.report.test_exports import FORMULAS

CHROMIUM = installed()
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: apt-get install chromium")

MANY, REFUSED = 118, 12
REASON = "max_memory.cpu: too small, " + "and told at length, " * 20
VIEWS = [(width, scheme) for width in (390, 1440) for scheme in ("light", "dark")]
JOBS = "[...document.querySelectorAll('#table tbody tr')].map(row => row.cells[0].innerText)"
SORTED = "[...document.querySelectorAll('#table th')].map(heading => heading.ariaSort).filter(Boolean)"
SHOWN = "document.querySelector('#table .dt-info').textContent"
SETTLED = "new Promise(done => setTimeout(() => setTimeout(done)))"
"""Waits until what was asked before is on the screen: the table sorts in a timer of its own."""
BOX = "document.querySelector('#table .dt-layout-table > div')"
TURN = "document.querySelector('#table .{way}').click()"
PARTS = "#table .dt-search, #table .dt-info, #table .dt-paging, #conditions div, .failures li, .full > .note"
LAID_OUT = f"""[...document.querySelectorAll('{PARTS}')].map(part => {{
  const box = part.getBoundingClientRect();
  return {{text: part.innerText, left: box.left, right: box.right, height: box.height}};
}})"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Browser, Path]]:
    """A browser, and the page of runs of two checkpoints, those of the second all refused for one reason."""
    assert CHROMIUM
    sweep = write_many(tmp_path_factory.mktemp("many"), MANY)
    for number in range(MANY, MANY + REFUSED):
        path = write_failure(sweep / str(number), message=REASON) / "run.json"
        record = json.loads(path.read_text())
        record["config"]["model"]["path"] = "/another/checkpoint"
        path.write_text(json.dumps(record))
    run([str(sweep)])
    with browser(CHROMIUM) as chromium:
        yield chromium, sweep / "report.html"


@pytest.fixture
def table(opened: tuple[Browser, Path]) -> Browser:
    chromium, page = opened
    chromium.draw(page, width=1440, scheme="light")
    return chromium


def click(chromium: Browser, title: str) -> None:
    chromium.evaluate(
        f"document.querySelector('#table thead [aria-label^=' + JSON.stringify({json.dumps(title)}) + ']').click()"
    )
    chromium.evaluate(SETTLED)


def press_enter(chromium: Browser) -> None:
    chromium.press("Enter", "\r")
    chromium.evaluate(SETTLED)


def give(chromium: Browser, words: str) -> str:
    """Filter by ``words``, and return what the page says of the rows then."""
    chromium.evaluate(
        "(() => { const part = document.querySelector('#table .dt-search input');"
        f" part.value = {json.dumps(words)}; part.dispatchEvent(new Event('input', {{bubbles: true}})); }})()"
    )
    return str(chromium.evaluate(f"new Promise(done => setTimeout(() => done({SHOWN}), 500))"))


def test_a_heading_sorts_by_number_and_what_says_nothing_comes_last(table: Browser) -> None:
    click(table, "budget cpu")
    assert table.evaluate(SORTED) == ["ascending"]
    assert table.evaluate(JOBS)[:3] == ["#0", "#1", "#2"]
    click(table, "budget cpu")
    assert table.evaluate(SORTED) == ["descending"]
    assert table.evaluate(JOBS)[:3] == [f"#{MANY - 1}", f"#{MANY - 2}", f"#{MANY - 3}"]
    table.evaluate(TURN.format(way="next"))
    assert set(table.evaluate(JOBS)[-REFUSED:]) == {f"#{number}" for number in range(MANY, MANY + REFUSED)}


def test_rows_that_are_alike_keep_their_order_whichever_way_they_are_sorted(table: Browser) -> None:
    refused, completed = list(range(MANY, MANY + REFUSED)), list(range(MANY))
    for expected in (completed + refused, refused + completed):
        click(table, "status")
        assert table.evaluate(JOBS) == [f"#{number}" for number in expected[:100]]


def test_a_screen_that_is_too_narrow_leaves_out_details_and_the_button_shows_them(
    opened: tuple[Browser, Path], tmp_path: Path
) -> None:
    times = [repeat(0.5), repeat(0.6)]
    metrics = {
        "load_seconds": 1.0,
        "stall_share": 0.5,
        "streamed_bytes_per_second": 10**9,
        "time_to_first_token_seconds": 2,
    }
    titles = "[...document.querySelectorAll('#table thead th')].map(heading => heading.innerText.split('\\n')[0])"
    write_run(tmp_path / "0", metrics=metrics, repeats=times)
    run([str(tmp_path)])
    chromium, shown = opened[0], {}
    for width in (1440, 600):
        chromium.draw(tmp_path / "report.html", width=width, scheme="light")
        shown[width] = chromium.evaluate(titles)
    assert set(shown[600]) < set(shown[1440])
    assert {"job", "budget cpu", "time a token", "peak cpu"} <= set(shown[600])
    assert "streaming" in shown[1440]
    assert "streaming" not in shown[600]
    assert chromium.evaluate(f"{BOX}.scrollWidth <= {BOX}.clientWidth")
    chromium.evaluate("document.querySelector('#table .buttons-colvis').click()")
    chromium.evaluate(
        "[...document.querySelectorAll('.dt-button-collection button')]"
        ".find(one => one.innerText.startsWith('streaming')).click()"
    )
    assert "streaming" in chromium.evaluate(titles)


def test_names_are_sorted_by_the_numbers_in_them(table: Browser) -> None:
    for expected in (["#0", "#1", "#2"], ["#129", "#128", "#127"]):
        click(table, "job")
        assert table.evaluate(JOBS)[:3] == expected


def test_a_third_click_gives_the_rows_back_as_they_were(table: Browser) -> None:
    before = table.evaluate(JOBS)
    for _ in range(3):
        click(table, "device_map")
    assert table.evaluate(JOBS) == before
    assert table.evaluate(SORTED) == []


def test_the_table_sorts_by_keyboard_alone(table: Browser) -> None:
    table.evaluate("document.querySelector('#table thead .dt-column-order').focus()")
    press_enter(table)
    press_enter(table)
    assert table.evaluate(JOBS)[0] == f"#{MANY + REFUSED - 1}"
    table.press("Tab")
    assert table.evaluate("document.activeElement.ariaLabel").startswith("status")
    assert table.evaluate("getComputedStyle(document.activeElement).outlineStyle") == "auto", "it is seen"


def test_words_filter(table: Browser) -> None:
    assert table.evaluate(SHOWN) == "1 to 100 of 130 jobs"
    assert give(table, "FAILED checkpoint") == "1 to 12 of 12 jobs that match, of 130"
    assert give(table, "balanced") == "1 to 59 of 59 jobs that match, of 130"
    assert give(table, "nowhere") == "No jobs that match, of 130"
    assert give(table, "") == "1 to 100 of 130 jobs"


def test_a_value_of_a_column_can_be_chosen(table: Browser) -> None:
    table.evaluate("document.querySelectorAll('#table thead .dtcc-button_dropdown')[0].click()")
    offered = "[...document.querySelectorAll('.dtcc-dropdown .dtcc-list-buttons button')]"
    assert table.evaluate(f"{offered}.map(button => button.innerText)") == ["completed", "failed"]
    table.evaluate(f"{offered}[1].click()")
    assert table.evaluate(JOBS) == [f"#{number}" for number in range(MANY, MANY + REFUSED)]


def test_pages_turn_and_no_more_rows_are_laid_out_than_one_has(table: Browser) -> None:
    assert len(table.evaluate(JOBS)) == 100
    table.evaluate(TURN.format(way="next"))
    assert table.evaluate(SHOWN) == "101 to 130 of 130 jobs"
    assert table.evaluate(JOBS) == [f"#{number}" for number in range(100, 130)]
    table.evaluate(TURN.format(way="previous"))
    assert table.evaluate(JOBS)[0] == "#0"


def exported(chromium: Browser) -> list[list[str]]:
    """Return the rows that the table's button gives, the headings first."""
    text = chromium.evaluate(
        "new Promise(done => { URL.createObjectURL = blob => { blob.text().then(done); return '#'; };"
        " document.querySelector('#table .buttons-csv').click(); })"
    )
    return list(csv.reader(io.StringIO(text.strip("\ufeff\r\n"))))


def test_the_button_gives_all_rows_as_csv(table: Browser) -> None:
    headings, *rows = exported(table)
    assert headings[:3] == ["job", "status", "checkpoint"]
    assert rows[0][:2] == ["#0", "completed"]
    assert len(rows) == MANY + REFUSED


def test_what_the_button_gives_is_no_formula_either(opened: tuple[Browser, Path], tmp_path: Path) -> None:
    for number, text in enumerate(FORMULAS):
        write_run(tmp_path / str(number), policy=text)
    run([str(tmp_path)])
    opened[0].draw(tmp_path / "report.html", width=1440, scheme="light")
    assert [row[2][:1] for row in exported(opened[0])[1:]] == ["'"] * len(FORMULAS)


def test_one_refusal_of_many_jobs_is_one_line_and_stretches_no_row(table: Browser) -> None:
    assert table.evaluate("document.querySelectorAll('.failures li').length") == 1
    assert f"{REFUSED} in all" in table.evaluate("document.querySelector('.failures li').innerText")
    heights = table.evaluate("[...document.querySelectorAll('#table tbody tr')].map(row => row.offsetHeight)")
    click(table, "status")
    click(table, "status")
    assert table.evaluate(JOBS)[0] == f"#{MANY}"
    failed = table.evaluate("[...document.querySelectorAll('#table tbody tr')].map(row => row.offsetHeight)")
    assert max(*heights, *failed) - min(*heights, *failed) <= 1
    assert table.evaluate("document.querySelector('#table tbody td a').getAttribute('href')") == "#failure-1"


def test_every_row_leads_to_its_jobs_folder(table: Browser, opened: tuple[Browser, Path]) -> None:
    links = table.evaluate(
        "[...document.querySelectorAll('#table tbody tr')].map(row => row.querySelector('th a').href)"
    )
    assert links[:2] == [(opened[1].parent / name).resolve().as_uri() + "/" for name in ("0", "1")]


@pytest.mark.parametrize(("width", "scheme"), VIEWS)
def test_what_stands_about_the_table_fits_the_screen(opened: tuple[Browser, Path], width: int, scheme: str) -> None:
    chromium, page = opened
    chromium.draw(page, width=width, scheme=scheme)
    parts: list[dict[str, Any]] = chromium.evaluate(LAID_OUT)
    assert len(parts) > 10
    for part in parts:
        assert part["left"] >= 0, part
        assert part["right"] <= width, part
        assert 0 < part["height"] < 400, part
    assert chromium.evaluate("document.documentElement.scrollWidth") <= width
    assert chromium.evaluate(CONTRAST)["worst"] >= 4.5
