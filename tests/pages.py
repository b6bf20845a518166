"""What the pages say: their blocks of code and, in these and between words, their commands."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / ".github").glob("*.md"))]
_HISTORY = "CHANGELOG.md"
"""It speaks of what was there then."""
OF_NOW = [page for page in PAGES if page.name != _HISTORY]
_SHELL = ("", "sh", "bash", "console")
"""The languages of blocks with commands in them, and with what these print."""
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
_PROGRAMS = re.compile(
    r"offstage(-\w+)?|python3?|pip|torchrun|accelerate|mlflow|uvicorn|curl|git|docker|podman|scontrol|srun|sbatch|run"
)
"""What a command begins with, after variables of its environment and the folder that the program lies in."""
_VARIABLE = re.compile(r"[A-Z_]+=")
_BENCHMARK = re.compile(r"python -m tests\.benchmarks\.(\w+)|… (?:(\w+)(?= |$))?")
"""A benchmark's beginning. ``…`` stands for that of the one before, whose name may be another."""
REFUSAL = re.compile(r"^\$ offstage (.*)\n(offstage: .*)$", re.MULTILINE)
"""A command that a page shows with what it is refused with: its arguments, and the line."""


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the text of each block of ``page`` in one of the ``languages``."""
    return [text for language, text in _BLOCK.findall(page.read_text()) if language in languages]


def commands(page: Path) -> list[str]:
    """Return each command on ``page`` once, in its order: those of blocks and of code between words.

    A comment is no part of one, nor is what ends a command before the next on its line. Those that are refused are left
    out, and so are names of programs between words.
    """
    text = REFUSAL.sub("", page.read_text())
    return list(dict.fromkeys(command for line in _in_full(_lines(text)) for command in _on_line(line)))


def all_commands() -> list[str]:
    """Return the commands on all pages of what is there now, each once."""
    return list(dict.fromkeys(command for page in OF_NOW for command in commands(page)))


def program(command: str) -> str:
    """Return the name of the program that ``command`` begins with, without its folder; empty where that is none."""
    first = next((word for word in command.split() if not _VARIABLE.match(word)), "").rpartition("/")[2]
    return first if _PROGRAMS.fullmatch(first) else ""


def _lines(text: str) -> Iterator[str]:
    """Yield what may be commands, in the order of the page."""
    place = 0
    for block in _BLOCK.finditer(text):
        yield from _spans(text[place : block.start()])
        if block[1] in _SHELL:
            yield from (line.removeprefix("$ ") for line in block[2].replace("\\\n", " ").splitlines())
        place = block.end()
    yield from _spans(text[place:])


def _spans(prose: str) -> Iterator[str]:
    spans = (span.replace("\n", " ") for span in re.findall(r"`([^`]+)`", prose))
    return (span for span in spans if " " in span)


def _in_full(lines: Iterable[str]) -> Iterator[str]:
    """Yield ``lines``, those of benchmarks with what they leave out."""
    benchmark = ""
    for line in lines:
        begins = _BENCHMARK.match(line)
        if begins is None:
            yield line
            continue
        named, word = begins.groups()
        if named or (ROOT / f"tests/benchmarks/{word}.py").exists():
            benchmark, rest = named or word, line[begins.end() :]
        else:
            rest = line.removeprefix("…")
        yield f"python -m tests.benchmarks.{benchmark}{rest}" if named or " --" in rest else line


def _on_line(line: str) -> Iterator[str]:
    if not program(line):
        return
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
            continue
        yield shlex.join(words)
        words = []
