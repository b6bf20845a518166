"""What the pages say can be followed: links lead somewhere, benchmarks, files and extras that are named are there."""

from __future__ import annotations

import re
import shlex
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.pages import OF_NOW, PAGES, ROOT, all_commands


def names(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of ``page``, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_each_link_leads_to_a_file_and_a_heading_that_are_there(page: Path) -> None:
    dead = []
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if target.startswith(("http:", "https:")):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            dead.append(target)
    assert dead == []


def test_readers_find_each_page_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(\.github/(\w+\.md)", (ROOT / "README.md").read_text()))
    assert linked == set(names(PAGES)) - {"README.md"}


@pytest.mark.parametrize("page", OF_NOW, ids=names(OF_NOW))
def test_benchmarks_and_files_that_are_named_are_there(page: Path) -> None:
    text = page.read_text()
    modules = set(re.findall(r"python -m (tests\.benchmarks\.\w+)", text))
    paths = set(re.findall(r"`((?:tests|conf|stages|pipeline)/[\w./-]+)`", text))
    assert [module for module in modules if find_spec(module) is None] == []
    made = ROOT / "pipeline/init_templates"  # by offstage-init, for the reader
    assert [path for path in paths if not (ROOT / path).exists() and not (made / path).exists()] == []


def test_extras_that_pip_is_to_install_are_there() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    words = [word for command in all_commands() if " install " in command for word in shlex.split(command)]
    named = re.findall(r"^(?:offstage-pipeline|\.)\[(.+)\]$", "\n".join(words), re.MULTILINE)
    assert {extra for listed in named for extra in listed.split(",")} - set(extras) == set()
    assert len(named) > 5
