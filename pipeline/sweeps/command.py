"""The command ``offstage-sweep``: go on with a sweep that was interrupted, in its own folder."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from offstage.pipeline import app
from offstage.pipeline.command_exit import run_command
from offstage.pipeline.sweeps.record import SweepRecord
from offstage.pipeline.sweeps.trust import named_by_folder
from offstage.pipeline.trust import Trust

NAME = "offstage-sweep"
_FOLDER = "hydra.sweep.dir="


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments`` (default: the process's own), then exit with its code."""
    given = _parser().parse_args(arguments)
    run_command(NAME, lambda: resume(given))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description="Goes on with a sweep that was interrupted.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    says = "run the jobs of a sweep that haven't completed, in its folder; those that have aren't run again"
    command = commands.add_parser("resume", help=says, description=says)
    command.add_argument("sweep", type=Path, metavar="FOLDER", help="the sweep's folder")
    command.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="NAME",
        help="trust what the sweep names so: a class, a path outside its folder, a setting of Hydra; give it once for "
        "each",
    )
    return parser


def resume(given: argparse.Namespace) -> NoReturn:
    """Run the command that began the sweep once more, in its folder, and exit as that does.

    What completed there isn't run again.
    """
    folder = given.sweep.absolute()
    record = SweepRecord.load(folder)
    trust = Trust(folder, given.trust, record.is_own, record.files)
    trust.refuse(named_by_folder(folder, record), about=given.sweep)
    if Path(record.cwd).is_dir():  # else it was moved, to where it is resumed
        os.chdir(Path(record.cwd))
    words = [word for word in record.command if not word.startswith(_FOLDER)]
    app.main(["--multirun", *words, f"{_FOLDER}{_quoted(folder)}"], trust=trust)


def _quoted(folder: Path) -> str:
    """Return ``folder`` as Hydra's grammar takes any text: quotes, and backslashes before one, are escaped."""
    text = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), str(folder))
    return f"'{text}'"
