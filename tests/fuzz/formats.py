"""What a format is to the fuzzer: inputs made on the spot, what is done to them, and what may come of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.fuzz.mutations import Mutations

Files = dict[str, bytes]
"""The files of a folder, by their names in it."""

RIGHT = "right"
"""The answer is that of the whole input, or what the reference reads of the same bytes."""
REFUSED = "refused"
"""A typed error."""
ALONE = "right alone"
"""An answer where the reference has none; it isn't held to anything."""


class WrongAnswerError(AssertionError):
    """An answer that isn't what it must be."""


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of input.

    ``make`` fills a folder with valid inputs; of the files that ``targets`` (glob patterns) match, one is changed by
    one of ``mutations``. ``attempt`` then reads what lies in the folder, which is the second argument's but for that
    file, and returns ``RIGHT`` or ``ALONE``; whatever else it does is raised. Each case is in a process of its own
    where it is ``apart``: what runs a whole command is.
    """

    name: str
    make: Callable[[Path], None]
    targets: tuple[str, ...]
    mutations: Mutations
    attempt: Callable[[Path, Path], str]
    apart: bool = False


def require(holds: bool, what: str) -> None:
    """Raise a ``WrongAnswerError`` that says ``what`` unless it holds."""
    if not holds:
        raise WrongAnswerError(what)


def files_of(folder: Path) -> Files:
    """Return all files of ``folder``, read."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def write_files(folder: Path, files: Files) -> None:
    """Write ``files`` into ``folder``, with the folders that they need."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
