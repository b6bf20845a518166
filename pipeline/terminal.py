"""The terminal, or the file that takes its place: what every command shows its tables on."""

from __future__ import annotations

import sys
from pathlib import Path
from shutil import get_terminal_size

from rich.console import Console

from offstage.pipeline.command_exit import discard_output

_WIDTH_OF_FILES = 200
"""Characters a line where the output is no terminal, so that nothing is folded that somebody may search for."""


class Screen(Console):
    """The terminal, or the file that takes its place; a pipe that nobody reads any more ends no run."""

    def __init__(self, *, soft_wrap: bool = False) -> None:
        width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
        super().__init__(highlight=False, soft_wrap=soft_wrap, width=width)

    def on_broken_pipe(self) -> None:
        """Go on without an output: what is asked for is the run, and its record."""
        self.quiet = True
        discard_output()


def announce(stage: str) -> None:
    """Say on a terminal which stage is at work."""
    show_line(stage and f"{stage} …")


def show_line(text: str) -> None:
    """Show ``text`` on a terminal, on a line that whatever comes next writes over: a bar, a warning."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[2K{text[: get_terminal_size().columns - 1]}\r")
        sys.stderr.flush()


def shorten(folder: Path) -> str:
    """Return ``folder`` relative to the current folder where it lies below it. A dot alone would name nothing."""
    here = Path.cwd()
    return str(folder.relative_to(here) if here in folder.parents else folder)
