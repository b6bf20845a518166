"""What all tests have in common: the long form, draws that are the same on each run of the short one, and garbage.

What their imports make is never looked through for garbage. A run ends with what it skipped, by the reasons.
"""

from __future__ import annotations

import gc
import os
import tempfile
from collections import Counter
from collections.abc import Iterable

import pytest
from hypothesis import settings

LONG_FORM = "OFFSTAGE_LONG"
"""The environment variable with which tests in the long form run too, and searches draw freely."""

# What the short form draws follows from a test's own code: it answers the same on any machine, under any load.
settings.register_profile("offstage", derandomize=not os.environ.get(LONG_FORM), deadline=None)
settings.load_profile("offstage")


def pytest_configure(config: pytest.Config) -> None:
    """Have records be signed by a key of these tests, and not by the user's, whose home may not even be writable."""
    if "XDG_DATA_HOME" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="offstage-tests-")
        os.environ["XDG_DATA_HOME"] = folder.name
        config.add_cleanup(folder.cleanup)


def pytest_sessionstart() -> None:
    """Have nothing collected while tests are imported, which makes next to no garbage: a sixth of that time."""
    gc.disable()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what runs by hand alone: cases beside one that CI has, of the same mechanism."""
    if os.environ.get(LONG_FORM):
        return
    long = [item for item in items if item.get_closest_marker("long_form")]
    if long:
        config.hook.pytest_deselected(items=long)
        items[:] = [item for item in items if not item.get_closest_marker("long_form")]


def pytest_collection_finish() -> None:
    """Take what the imported libraries are made of out of every later collection: a million objects, half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how many tests were skipped for which reason: a line for each reason, wherever the tests stand."""
    lines = skipped_by_reason(report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    if lines:
        terminalreporter.section("skipped")
        for line in lines:
            terminalreporter.write_line(line)


def skipped_by_reason(skips: Iterable[object]) -> list[str]:
    """Return a line for each reason, the commonest first; ``skips`` are what pytest has of them: file, line, reason."""
    reasons = Counter(str(skip[2] if isinstance(skip, tuple) else skip).removeprefix("Skipped: ") for skip in skips)
    return [f"{count:5}  {reason}" for reason, count in reasons.most_common()]
