"""The command ``offstage-cache``: see, shrink and check the cache, and have the machine measured again."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

from rich.filesize import decimal
from rich.markup import escape
from rich.table import Table

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.cache import housekeeping, user_cache
from offstage.pipeline.cache.housekeeping import CacheEntry
from offstage.pipeline.cache.sealed_files import move_aside
from offstage.pipeline.command_exit import run_command
from offstage.pipeline.errors import ConfigError, StorageError
from offstage.pipeline.plain_data import printable
from offstage.pipeline.terminal import Screen, plain_table

NAME = "offstage-cache"
Work = Callable[[Path, argparse.Namespace], int]
DAMAGED = 1
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}
_BYTES: dict[str, int] = {"": 1, **{f"{unit}B": 1000**power for power, unit in enumerate(("", "K", "M", "G", "T"))}}
_BYTES |= {f"{unit}iB": 1024**power for power, unit in enumerate(("K", "M", "G", "T"), start=1)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments`` (default: the process's own), then exit with its code."""
    given = _parser().parse_args(arguments)
    run_command(NAME, lambda: _run(given))


def _run(given: argparse.Namespace) -> int:
    root = given.outputs / "cache"
    if not root.is_dir() and given.work is not _forget:  # the user's own cache is no matter of a folder
        raise ConfigError(f"{root}: no cache here; give the folder that holds it with --outputs")
    with mendable(root):
        work: Callable[[Path, argparse.Namespace], int] = given.work
        return work(root, given)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME, description="See, shrink and check the cache; have the machine measured again."
    )
    parser.add_argument("--outputs", type=Path, default=Path("outputs"), help="the folder of runs and cache (outputs)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, work, says in (
        ("list", _list, "every artifact, the least recently used first"),
        ("du", _du, "what each stage takes"),
        ("verify", _verify, "hash this cache and the user's own again, set aside what is damaged; exits 1 if any is"),
        (
            "forget",
            _forget,
            "what was measured of this machine, here and in the user's own cache: it is measured again",
        ),
    ):
        command = commands.add_parser(name, help=says, description=says)
        command.set_defaults(work=work)
        if work is _list:
            command.add_argument("--json", action="store_true", help="as JSON, with whole keys, paths and bytes")
    pruner = commands.add_parser("prune", help="remove what isn't used any more; never what a running job uses")
    pruner.add_argument(
        "--older-than", type=_read_age, metavar="30d", help="unused for longer than this (s, m, h, d, w)"
    )
    pruner.add_argument(
        "--max-size", type=_read_size, metavar="50GB", help="the least recently used, until this is kept"
    )
    pruner.add_argument("--dry-run", action="store_true", help="only say what would go")
    pruner.set_defaults(work=_prune)
    return parser


def _read_age(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age; give a number and s, m, h, d or w, as in 30d")
    return float(match[1]) * _SECONDS[match[2]]


def _read_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", text)
    if match is None or match[2] not in _BYTES:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give a number and a unit, as in 50GB or 20GiB")
    return round(float(match[1]) * _BYTES[match[2]])


def _list(root: Path, given: argparse.Namespace) -> int:
    entries = housekeeping.entries(root)
    if given.json:
        _say(json.dumps([_told(entry) for entry in entries], indent=1))
        return 0
    table = plain_table((name, name == "size") for name in ("stage", "key", "model", "size", "last used"))
    for entry in entries:
        model = Path(entry.model).name if Path(entry.model).is_absolute() else entry.model
        used = f"{datetime.fromtimestamp(entry.used):%F %T}"
        table.add_row(entry.stage, entry.key[:16], escape(printable(model)), decimal(entry.bytes), used)
    _print(table)
    return 0


def _told(entry: CacheEntry) -> dict[str, str | int | None]:
    """Return what is known of ``entry`` as JSON can hold it; the model is the path or name that a config gives."""
    used = datetime.fromtimestamp(entry.used, UTC).isoformat(timespec="seconds")
    folder, model = str(entry.folder.absolute()), entry.model or None
    fields = {"stage": entry.stage, "key": entry.key, "model": model, "bytes": entry.bytes}
    return {**fields, "last_used": used, "folder": folder}


def _du(root: Path, _given: argparse.Namespace) -> int:
    entries = housekeeping.entries(root)
    table = plain_table([("stage", False), ("artifacts", True), ("size", True), ("last used", False)])
    for stage in dict.fromkeys(sorted(entry.stage for entry in entries)):
        own = [entry for entry in entries if entry.stage == stage]
        used = datetime.fromtimestamp(max(entry.used for entry in own))
        table.add_row(stage, str(len(own)), decimal(sum(entry.bytes for entry in own)), f"{used:%F %T}")
    table.add_row("all", str(len(entries)), decimal(sum(entry.bytes for entry in entries)), "")
    _print(table)
    return 0


def _prune(root: Path, given: argparse.Namespace) -> int:
    if given.older_than is None and given.max_size is None:
        raise ConfigError("prune: nothing says what may go; give --older-than 30d, --max-size 50GB or both")
    entries = housekeeping.entries(root)
    chosen = housekeeping.choose(entries, older_than_seconds=given.older_than, max_bytes=given.max_size)
    if given.dry_run:
        _say(f"would remove {_amount(chosen)}")
        return 0
    locked = [entry for entry in chosen if not os.access(entry.folder.parent, os.W_OK)]
    taken = housekeeping.prune([entry for entry in chosen if entry not in locked])
    _say(f"removed {_amount(taken)}")
    if in_use := [entry for entry in chosen if entry not in locked and entry not in taken]:
        _say(f"kept {_amount(in_use)} that running jobs use")
    if locked:
        raise StorageError(
            f"{root}: {_amount(locked)} can't be removed: this cache may not be written to; change its permissions"
        )
    return 0


def _verify(root: Path, _given: argparse.Namespace) -> int:
    began, entries = time.perf_counter(), housekeeping.entries(root)
    users = [entry for each in _roots(root)[1:] for entry in housekeeping.entries(each)]
    damaged = [(entry, damage) for entry in [*entries, *users] if (damage := housekeeping.find_damage(entry))]
    for entry, damage in damaged:
        aside = housekeeping.set_aside(entry)
        _say(f"{entry.folder}: {damage}; {f'set aside as {aside.name}' if aside else 'in use, left where it is'}")
    figures = {path: damage for each in _roots(root) for path, damage in housekeeping.damaged_figures(each).items()}
    for path, damage in figures.items():
        move_aside(path, damage)
        _say(f"{path}: {damage}; set aside, to be measured again")
    count = len(damaged) + len(figures)
    own = f", {_amount(users)} of the user's own cache" if users else ""
    _say(f"{_amount(entries)}{own} hashed in {time.perf_counter() - began:.1f} s, {count} damaged")
    return DAMAGED if count else 0


def _forget(root: Path, _given: argparse.Namespace) -> int:
    for each in _roots(root):
        try:
            forgotten = housekeeping.forget_figures(each)
        except OSError as error:
            raise StorageError(f"{error.filename}: can't be removed ({error.strerror}); remove it by hand") from error
        for path in forgotten:
            _say(f"removed {path}")
    return 0


def _roots(root: Path) -> list[Path]:
    """Return the cache ``root`` and the user's own, where that is another."""
    with suppress(RuntimeError):  # a user without a home
        if user_cache().resolve() != root.resolve():
            return [root, user_cache()]
    return [root]


def _amount(entries: Sequence[CacheEntry]) -> str:
    one = "" if len(entries) == 1 else "s"
    return f"{len(entries)} artifact{one} ({decimal(sum(entry.bytes for entry in entries))})"


def _print(table: Table) -> None:
    Screen(soft_wrap=True).print(table)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
