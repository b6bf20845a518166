"""What the pages say can be followed: links lead somewhere, commands compose, benchmarks and files that are named are
there.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module

from offstage.pipeline import init_command, replay_command
from offstage.pipeline.app import prepare_arguments
from offstage.pipeline.cache import command as cache_command
from offstage.pipeline.config import check, register, resolve
from offstage.pipeline.installed_stages import installed_stages
from offstage.pipeline.report import command as report_command
from offstage.pipeline.sweeps import command as sweep_command
from offstage.pipeline.sweeps.sweep_keys import register_sweeps

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / ".github").glob("*.md"))]
_HISTORY = "CHANGELOG.md"
"""It speaks of what was there then."""
PARSERS: Mapping[str, Callable[[], argparse.ArgumentParser]] = {
    "offstage-cache": cache_command._parser,
    "offstage-init": init_command._parser,
    "offstage-replay": replay_command._parser,
    "offstage-report": report_command._parser,
    "offstage-sweep": sweep_command._parser,
}
_LEFT_OUT = re.compile("…|\\.\\.\\.|\\bDATE\\b|\\bFOLDER\\b|\\bFILE\\b|\\bRUN\\b|\\bN\\b")
"""What a reader is to put something in place of."""


def names(pages: list[Path]) -> list[str]:
    return [page.name for page in pages]


def fenced(page: Path) -> list[str]:
    """Return the lines of the blocks of commands on ``page``."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    texts = [text for language, text in blocks if language in ("", "sh", "bash")]
    return [line for text in texts for line in text.replace("\\\n", " ").splitlines()]


def commands(page: Path) -> list[str]:
    """Return the commands of offstage that stand on ``page`` whole, in blocks and between words."""
    prose = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    spans = [span.replace("\n", " ") for span in re.findall(r"`(offstage [^`]+)`", prose)]
    lines = [line.partition("| ")[2] if line.startswith("cat ") else line.removeprefix("$ ") for line in fenced(page)]
    listed = [line for line in (*lines, *spans) if line.startswith("offstage ") and not _LEFT_OUT.search(line)]
    return [line for line in listed if " --" not in line.partition(" #")[0]]


def other_commands(page: Path) -> list[list[str]]:
    """Return the words of the commands beside ``offstage`` in the blocks of ``page``, one for each ``| COMMAND``."""
    lines = [line.removeprefix("$ ") for line in fenced(page)]
    listed = []
    for name, *words in (shlex.split(line, comments=True) for line in lines if line.partition(" ")[0] in PARSERS):
        starts = [0, *(place + 1 for place, word in enumerate(words) if word == "|"), len(words) + 1]
        listed += [[name, *words[start : end - 1]] for start, end in pairwise(starts)]
    return listed


def anchors(page: Path) -> set[str]:
    """Return the anchors of the headings of ``page``, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


def each_once(lines: Iterator[str]) -> list[str]:
    """Return ``lines`` without what stands there again, of which comments and spaces are no part."""
    return list(dict.fromkeys(shlex.join(shlex.split(line, comments=True)) for line in lines))


OF_NOW = [page for page in PAGES if page.name != _HISTORY]
COMMANDS = each_once(line for page in OF_NOW for line in commands(page))
"""Those of offstage on all pages."""
TORCHRUN_COMMANDS = each_once(line for page in OF_NOW for line in fenced(page) if line.startswith("torchrun "))
OTHER_COMMANDS = each_once(shlex.join(words) for page in OF_NOW for words in other_commands(page))


@pytest.fixture(scope="module")
def hydra_tree() -> Iterator[None]:
    register()
    register_sweeps()
    with initialize_config_module("offstage.conf", version_base="1.3"):
        yield


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


@pytest.mark.parametrize("page", PAGES, ids=names(PAGES))
def test_benchmarks_and_files_that_are_named_are_there(page: Path) -> None:
    if page not in OF_NOW:
        return
    text = page.read_text()
    modules = set(re.findall(r"python -m (tests\.benchmarks\.\w+)", text))
    paths = set(re.findall(r"`((?:tests|conf|stages|pipeline)/[\w./-]+)`", text))
    assert [module for module in modules if find_spec(module) is None] == []
    made = ROOT / "pipeline/init_templates"  # by offstage-init, for the reader
    assert [path for path in paths if not (ROOT / path).exists() and not (made / path).exists()] == []


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_composes_a_config_that_is_sound(command: str, hydra_tree: None) -> None:
    _, *arguments = shlex.split(command)
    sweep = "-m" in arguments
    asked = [re.sub(r"^(\S+=[^\[{,]*),\S*$", r"\1", one) if sweep else one for one in arguments if one != "-m"]
    config = resolve(compose("config", prepare_arguments(asked)))
    faults = [str(fault) for fault in check(config, list(installed_stages()))]
    assert [fault for fault in faults if "isn't installed" not in fault] == []


@pytest.mark.parametrize("command", OTHER_COMMANDS)
def test_each_other_command_is_one_that_its_parser_takes(command: str) -> None:
    name, *arguments = shlex.split(command)
    PARSERS[name]().parse_args(arguments)


def test_the_pages_have_commands() -> None:
    assert len(OTHER_COMMANDS) > 10
    assert len(COMMANDS) > 30
    assert TORCHRUN_COMMANDS
