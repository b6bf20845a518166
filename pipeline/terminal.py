"""The terminal, or the file that takes its place: what every command shows its tables on."""

from __future__ import annotations

import sys
from collections.abc import Container, Iterable
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from offstage.pipeline.command_exit import discard_output
from offstage.pipeline.errors import StorageError, apart
from offstage.pipeline.peers import own_rank

_WIDTH_OF_FILES = 200
"""Characters a line where the output is no terminal, so that nothing is folded that somebody may search for."""


class Screen(Console):
    """The terminal, or the file that takes its place; a pipe that nobody reads any more ends no run."""

    def __init__(self, *, soft_wrap: bool = False) -> None:
        width = None if sys.stdout.isatty() else _WIDTH_OF_FILES
        super().__init__(highlight=False, soft_wrap=soft_wrap, width=width)

    def print(self, *objects: Any, **options: Any) -> None:
        """Show ``objects`` as rich does; raises ``StorageError`` where that can't be written, as on a full disk."""
        try:
            super().print(*objects, **options)
        except BrokenPipeError:
            raise
        except OSError as error:
            advice = "free some space where it goes, or send it elsewhere"
            raise StorageError(f"standard output: {error.strerror or error}; {advice}") from apart(error)

    def on_broken_pipe(self) -> None:
        """Go on without an output: what is asked for is the run, and its record."""
        self.quiet = True
        discard_output()


COLOURS = {"completed": "green", "failed": "red", "interrupted": "yellow", "running": "yellow", "not begun": "dim"}
"""Those of how a run ended."""


def plain_table(
    headings: Iterable[tuple[str, bool]] = (), *, folded: Container[str] = (), header: bool = True
) -> Table:
    """Return a table without lines, with a column for each of ``headings``: plain text, and whether it is of numbers.

    What is too long for a line is cut, but for the columns that are ``folded``.
    """
    table = Table(box=None, pad_edge=False, header_style="dim", show_header=header)
    for heading, is_numeric in headings:
        justify: Literal["right", "left"] = "right" if is_numeric else "left"
        overflow: Literal["fold", "ellipsis"] = "fold" if heading in folded else "ellipsis"
        table.add_column(escape(heading), justify=justify, no_wrap=heading not in folded, overflow=overflow)
    return table


def announce(work: str) -> None:
    """Say on a terminal which ``work`` is under way; nothing: none any more."""
    show_line(work and f"{work} …")


def show_line(text: str) -> None:
    """Show ``text`` on a terminal, on a line that whatever comes next writes over: a bar, a warning."""
    if sys.stderr.isatty() and not own_rank():
        sys.stderr.write(f"\r\x1b[2K{text[: get_terminal_size().columns - 1]}\r")
        sys.stderr.flush()


def shorten(folder: Path) -> str:
    """Return ``folder`` relative to the current folder where it lies below it. A dot alone would name nothing."""
    here = Path.cwd()
    return str(folder.relative_to(here) if here in folder.parents else folder)
