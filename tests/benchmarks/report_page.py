"""What a report of thousands of runs costs: to make, to open in a browser, to sort and to filter there.

``python -m tests.benchmarks.report_page`` copies one record 5,000 times with changed values; ``--record`` names a real
one to take instead. Opening is timed from the request until the page is loaded, a picture from when it is scrolled to
until it is drawn, a sort or a filter from the event until the rows that it shows are laid out.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tests.pipeline.report.browser import DRAWN, Browser, browser, installed
from tests.pipeline.report.sample_runs import change_record, write_run

_LOADED = "performance.getEntriesByType('navigation')[0].loadEventEnd"
_TIMED = """new Promise(done => {{ const began = performance.now(); {act};
  document.getElementById('table').offsetHeight; setTimeout(() => done(performance.now() - began), 0); }})"""
_DRAWN_THERE = """new Promise(done => {{ const began = performance.now();
  const figure = [...document.querySelectorAll('figure')].at({place});
  const look = () => figure.querySelector('.main-svg') ? done(performance.now() - began) : setTimeout(look, 1);
  figure.scrollIntoView(); look(); }})"""
_SORT = "document.querySelectorAll('#table thead .dt-column-order')[{column}].click()"
_FILTER = """const filter = document.querySelector('#table input'); filter.value = '{words}';
  filter.dispatchEvent(new Event('input'))"""
_ACTS = {
    "sort by words": _SORT.format(column=1),
    "sort by a number": "document.querySelector('#table th.number .dt-column-order').click()",
    "sort the other way": "document.querySelector('#table th.number .dt-column-order').click()",
    "filter by a letter": _FILTER.format(words="b"),
    "filter by two words": _FILTER.format(words="completed 99"),
    "no filter": _FILTER.format(words=""),
}


def main() -> None:
    """Make the records, the report and the measurements, and print them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5000, help="how many records")
    parser.add_argument("--record", type=Path, help="the run.json that they are copies of")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pattern = arguments.record or write_run(folder / "pattern") / "run.json"
        write_copies(folder / "sweep", json.loads(pattern.read_text()), arguments.runs)
        for what, figure in measure(folder / "sweep"):
            sys.stdout.write(f"{what:28} {figure}\n")
    sys.stdout.write(f"{'load of the machine':28} {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores\n")


def write_copies(folder: Path, pattern: dict[str, object], count: int) -> None:
    """Write ``count`` records below ``folder``, each with numbers and settings of its own."""
    for number in range(count):
        record = copy.deepcopy(pattern)
        change_record(record, number)
        target = folder / str(number) / "run.json"
        target.parent.mkdir(parents=True)
        target.write_text(json.dumps(record))


def measure(sweep: Path) -> Iterator[tuple[str, str]]:
    """Yield what making the report of ``sweep`` and using its page takes."""
    command = [sys.executable, "-c", "from offstage.pipeline.report.command import main; main()", str(sweep)]
    began, used = time.monotonic(), os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    wall, then = time.monotonic() - began, os.times()
    cpu = then.children_user + then.children_system - used.children_user - used.children_system
    yield "offstage-report", f"{wall:.1f} s, {cpu:.1f} s of the processor"
    page = sweep / "report.html"
    yield "page", f"{page.stat().st_size / 1e6:.1f} MB"
    executable = installed()
    if executable is None:
        yield "browser", "none here: apt-get install chromium"
        return
    with browser(executable) as chromium:
        for width in (1440, 390):
            yield from _use(chromium, page, width)


def _use(chromium: Browser, page: Path, width: int) -> Iterator[tuple[str, str]]:
    chromium.open(page, width=width, scheme="light")
    time.sleep(0.1)  # the load event has an end once it is over
    yield f"open, {width} px", f"{chromium.evaluate(_LOADED):.0f} ms"
    for name, scrolled in (("first", 0), ("last", -1)):
        drawn = chromium.evaluate(_DRAWN_THERE.format(place=scrolled))
        yield f"{name} picture, {width} px", f"{drawn:.0f} ms after it is scrolled to"
    yield f"all pictures, {width} px", f"{chromium.evaluate(_TIMED.format(act=DRAWN)):.0f} ms, for paper"
    for name, act in _ACTS.items():
        yield f"{name}, {width} px", f"{chromium.evaluate(_TIMED.format(act=act)):.0f} ms"


if __name__ == "__main__":
    main()
