"""What all tests have in common: the long form, draws that are the same on each run of the short one, and garbage.

What their imports make is never looked through for garbage. Folders go when what asked for them does. A run ends with
what it didn't run, by the reasons.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from tests.long_form import LONG_FORM
from tests.unsynced import leave_unsynced

# What the short form draws follows from a test's own code: it answers the same on any machine, under any load.
settings.register_profile("offstage", derandomize=not os.environ.get(LONG_FORM), deadline=None)
settings.load_profile("offstage")

_OWNED = pytest.StashKey[set[Path]]()
"""The folders of a run that a fixture has made, of which each has its own."""
_LEFT = pytest.StashKey[dict[str, int]]()
"""How many tests of each folder were left to the long form."""


def pytest_configure(config: pytest.Config) -> None:
    """Have no file be synced, and records be signed by a key of these tests: a user's home may not even be writable."""
    leave_unsynced()
    if "XDG_DATA_HOME" not in os.environ:
        folder = tempfile.TemporaryDirectory(prefix="offstage-tests-")
        os.environ["XDG_DATA_HOME"] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.fixture(autouse=True)
def _ends_logs() -> Iterator[None]:
    """Close the logs of runs in this process: those after it would log into a folder that is removed.

    So is that of a run which a module's fixture has made, before any test.
    """
    yield
    root = logging.getLogger()
    for handler in root.handlers[:]:
        if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).name == "run.log":
            root.removeHandler(handler)
            handler.close()


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
    config.stash[_LEFT] = by_folder(item.path.relative_to(config.rootpath) for item in long)
    if hasattr(config, "workeroutput"):
        config.workeroutput[LONG_FORM] = config.stash[_LEFT]


def pytest_collection_finish() -> None:
    """Take what the imported libraries are made of out of every later collection: a million objects, half a second."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(
    fixturedef: pytest.FixtureDef[Any], request: pytest.FixtureRequest
) -> Generator[None, object, object]:
    """Empty the folders that a module's fixture has made once it's torn down, unless a test failed."""
    if fixturedef.scope not in ("module", "session") or fixturedef.argname == "tmp_path_factory":
        return (yield)
    base: Path = request.getfixturevalue("tmp_path_factory").getbasetemp()
    owned, made = request.config.stash.setdefault(_OWNED, set()), set[Path]()
    if fixturedef.scope == "module":
        fixturedef.addfinalizer(partial(_empty, made, request.session))
    before = {*base.iterdir()}
    fixture_value = yield
    made |= {*base.iterdir()} - before - owned
    owned |= made
    return fixture_value


def _empty(folders: Iterable[Path], session: pytest.Session) -> None:
    if not session.testsfailed:
        for folder in (each for each in folders if each.is_dir() and not each.is_symlink()):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(exist_ok=True)  # by another module's files of that name nothing is mistaken for these


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take what a worker left to the long form: all of them collect the same."""
    node.config.stash[_LEFT] = getattr(node, "workeroutput", {}).get(LONG_FORM, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Say how many tests weren't run: a line for each reason to skip some, and for each folder with some left out."""
    skips = (report.longrepr for report in terminalreporter.stats.get("skipped", ()))
    lines = [*skipped_by_reason(skips), *left_to_the_long_form(config.stash.get(_LEFT, {}))]
    if lines:
        terminalreporter.section("not run")
        for line in lines:
            terminalreporter.write_line(line)


def by_folder(paths: Iterable[Path]) -> dict[str, int]:
    """Return how many of ``paths``, files of tests, each folder has, two levels deep at most below that of all."""
    return dict(Counter("/".join(path.parent.parts[:3]) for path in paths))


def left_to_the_long_form(left: Mapping[str, int]) -> list[str]:
    """Return a line for each folder of which there is something ``left`` to run by hand, with how many tests."""
    return [
        f"{count:5}  {folder}: cases beside one that ran; {LONG_FORM}=1 runs them" for folder, count in left.items()
    ]


def skipped_by_reason(skips: Iterable[object]) -> list[str]:
    """Return a line for each reason, the commonest first; ``skips`` are what pytest has of them: file, line, reason."""
    reasons = Counter(str(skip[2] if isinstance(skip, tuple) else skip).removeprefix("Skipped: ") for skip in skips)
    return [f"{count:5}  {reason}" for reason, count in reasons.most_common()]
