"""The page of the Python API says what the docstrings say, and what these show is so."""

from __future__ import annotations

import doctest
import inspect
from contextlib import nullcontext
from pathlib import Path

import pytest

import offstage
from tests.api_page import CHECKPOINT, PAGE, errors, example_names, examples, page, sections

NAMES = [name for _, names in sections() for name in names]


@pytest.fixture(autouse=True)
def caches(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have all examples share what is found out about the machine, and leave nothing in a user's folders."""
    folder = tmp_path_factory.getbasetemp() / "cache of the examples"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "python -m tests.api_page writes it"


def test_the_page_has_every_name_and_every_function_an_example() -> None:
    assert {*NAMES, *(kind.__name__ for kind in errors())} == set(offstage.__all__)
    functions = [name for name in NAMES if inspect.isroutine(getattr(offstage, name))]
    assert [name for name in functions if not examples(name)] == []
    assert [name for name in NAMES for one in examples(name) if doctest.SKIP in one.options] == []


@pytest.mark.parametrize("name", [name for name in NAMES if examples(name)])
def test_each_example_runs(name: str, tmp_path: Path) -> None:
    names, output = example_names(tmp_path), list[str]()
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    with offstage.load(CHECKPOINT) if name == "LoadedModel" else nullcontext() as names["loaded"]:
        runner.run(doctest.DocTest(examples(name), names, name, None, None, None), out=output.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(output)


def test_an_example_that_is_wrong_fails(tmp_path: Path) -> None:
    wrong = doctest.DocTestParser().get_examples(">>> checkpoint.name\n'large'\n")
    test = doctest.DocTest(wrong, example_names(tmp_path), "wrong", None, None, None)
    assert doctest.DocTestRunner().run(test, out=lambda _: None).failed == 1
    assert CHECKPOINT.name == "tiny"
