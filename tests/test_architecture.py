"""The architecture page is true: each path in it exists, each name is defined where it says, no package is left out."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / ".github/ARCHITECTURE.md").read_text()
TOPS = {".src", "pipeline", "stages", "conf", "tests", ".github", ".ci", "pyproject.toml"}
KINDS = ("a policy", "a format", "a stage", "an accelerator")


def spans(text: str) -> list[tuple[str, str]]:
    """Return the (path, name in it or empty) of each code span that starts at the repository's root."""
    pairs = [span.partition(": ") for span in re.findall(r"`([^`\n]+)`", text)]
    return [(path, name) for path, _, name in pairs if (path.split("/")[0] in TOPS and "/" in path) or path in TOPS]


def defined(source: str) -> set[str]:
    """Return the names that a module defines at its top."""
    names = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of the table under ``heading`` by the first of each row, which is no key itself."""
    lines = PAGE.partition(f"## {heading}\n")[2].partition("\n## ")[0].splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return {row[0]: row[1:] for row in cells[2:]}


def packages() -> list[str]:
    """Return every folder that holds an ``__init__.py``, and those of what is imported by a name at the top."""
    inits = [path.parent for top in ("pipeline", "stages", "conf") for path in (ROOT / top).rglob("__init__.py")]
    return sorted(f"{path.relative_to(ROOT)}/" for path in [*inits, *(ROOT / ".src").iterdir()])


def test_every_path_exists() -> None:
    paths = {path for path, _ in spans(PAGE)}
    assert [path for path in paths if not (ROOT / path).exists() or (ROOT / path).is_dir() != path.endswith("/")] == []


def test_every_name_is_defined_where_the_page_says() -> None:
    named = defaultdict[str, set[str]](set)
    for path, name in spans(PAGE):
        if name:
            named[path].add(name)
    missing = {path: names - defined((ROOT / path).read_text()) for path, names in named.items()}
    assert {path: names for path, names in missing.items() if names} == {}


def test_every_package_has_its_room() -> None:
    assert {(package, "") for package in packages()} - set(spans(PAGE.partition("\n## ")[0])) == set()


@pytest.mark.parametrize("kind", KINDS)
def test_what_may_be_added_names_its_files_and_its_tests(kind: str) -> None:
    files, tests = rows("Where to add")[kind]
    assert [path for path, _ in spans(files) if path.startswith(("stages/", "pipeline/"))]
    assert spans(tests)
    assert all(path.startswith("tests/") for path, _ in spans(tests))


def test_both_ways_go_through_the_packages_that_they_are_about() -> None:
    run = {path for path, _ in spans(PAGE.partition("## The way of a run")[2].partition("\n## ")[0])}
    weight = {path for path, _ in spans(PAGE.partition("## The way of a weight")[2].partition("\n## ")[0])}
    assert {path.split("/")[0] for path in run} == {"conf", "pipeline"}
    stages = {path.split("/")[1] for path in weight}
    assert stages == {"checkpoints", "empty_init", "plan", "shard_load", "dispatch"}


def test_a_path_or_name_that_is_not_there_would_be_seen() -> None:
    assert spans("`stages/gone.py: Gone`, `outputs/cache/`, `plan.json`, `run`") == [("stages/gone.py", "Gone")]
    assert defined("A = 1\nB: int = 2\nclass C: ...\ndef d(): ...\nfrom e import F\n") == {"A", "B", "C", "d"}
