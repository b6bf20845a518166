"""The command ``offstage-init``: a small tree of config files to edit, each of which runs as it is written."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from offstage.pipeline.atomic_files import create_file, mendable
from offstage.pipeline.command_exit import run_command
from offstage.pipeline.errors import ConfigError
from offstage.pipeline.terminal import shorten

NAME = "offstage-init"
_SHOWN = 5


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments`` (default: the process's own), then exit with its code."""
    given = _parser().parse_args(arguments)
    run_command(NAME, lambda: _run(given.folder))


def _parser() -> argparse.ArgumentParser:
    says = "Writes config files of a run, a sweep, a model and a machine into a folder, to be edited."
    parser = argparse.ArgumentParser(prog=NAME, description=says)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where to; it is made if it isn't there")
    return parser


def _run(folder: Path) -> int:
    files = write_tree(folder)
    change_folder = "" if folder.absolute() == Path.cwd() else f"cd {shorten(folder.absolute())}\n"
    listed = "\n".join(f"  {shorten(path.absolute())}" for path in files)
    sys.stdout.write(f"written:\n{listed}\nto run it:\n{change_folder}offstage --config-dir conf experiment=mine\n")
    return 0


def write_tree(folder: Path) -> list[Path]:
    """Write the files into ``folder``, which is made where it isn't there, and return them.

    A file that is there already is left as it is, and is a ``ConfigError`` before any is written; so is a ``folder``
    that is none. What can't be written is a ``StorageError``.
    """
    with resources.as_file(resources.files("offstage.pipeline") / "init_templates") as source:
        files = [path for path in sorted(source.rglob("*")) if path.is_file()]
        templates = {folder / path.relative_to(source): path.read_text(encoding="utf-8") for path in files}
    _refuse([path for path in templates if os.path.lexists(path)], folder)
    with mendable(folder):
        for path, text in templates.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            create_file(path, text)
    return list(templates)


def _refuse(existing: Sequence[Path], folder: Path) -> None:
    if os.path.lexists(folder) and not folder.is_dir():
        raise ConfigError(f"{folder}: it is no folder; name another one")
    if existing:
        named = ", ".join(str(path) for path in existing[:_SHOWN])
        more = f" and {len(existing) - _SHOWN} more" if len(existing) > _SHOWN else ""
        raise ConfigError(f"{folder}: {named}{more} would be written over; move them away, or name another folder")
