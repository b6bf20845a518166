"""The command ``offstage-sweep``: go on with a sweep that was interrupted, in its own folder.

A sweep's record is a command, and a folder may come from anywhere: what is gone on with are the user's own sweeps,
known by their signature. Who means another's gives its command, which is printed.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from offstage.pipeline import app
from offstage.pipeline.command_exit import run_command
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.sweeps.record import SweepRecord

NAME = "offstage-sweep"
_FOLDER = "hydra.sweep.dir="


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments`` (default: the process's own), then exit with its code."""
    given = _parser().parse_args(arguments)
    run_command(NAME, lambda: resume(given.sweep))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=NAME, description="Goes on with a sweep that was interrupted.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    says = "run the jobs of a sweep that haven't completed, in its folder; those that have aren't run again"
    command = commands.add_parser("resume", help=says, description=says)
    command.add_argument("sweep", type=Path, metavar="FOLDER", help="the sweep's folder")
    return parser


def resume(folder: Path) -> NoReturn:
    """Run the command that began the sweep once more, in its ``folder``, and exit as that does.

    What completed there isn't run again. Raises a ``ConfigError`` where this user didn't give the command.
    """
    record, place = SweepRecord.load(folder.absolute()), folder.absolute()
    words = [word for word in record.command if not word.startswith(_FOLDER)]
    if not record.is_own:
        began = f"cd {shlex.quote(record.cwd)} && " if Path(record.cwd).is_dir() else ""
        command = shlex.join(["offstage", *words, f"{_FOLDER}{_quoted(place)}"])
        raise ConfigError(
            f"{folder}: its command isn't one that you gave on this machine, or it was changed since; where it is what "
            f"you mean, give it yourself, and it goes on there: {began}{command}"
        )
    if Path(record.cwd).is_dir():  # else it was moved, to where it is resumed
        os.chdir(record.cwd)
    app.main(["--multirun", *words, f"{_FOLDER}{_quoted(place)}"], resumed=record)


def _quoted(folder: Path) -> str:
    """Return ``folder`` as Hydra's grammar takes any text: quotes, and backslashes before one, are escaped."""
    text = re.sub(r"(\\*)('|$)", lambda match: match[1] * 2 + ("\\'" if match[2] else ""), str(folder))
    return f"'{text}'"
