"""The command ``offstage-replay``: run a record again, and say whether it came out the same.

Everything is made anew, in a cache of the replay's own that is removed afterwards: what a cache serves proves nothing.
The config is the record's own, whole; what is default today has no part in it.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from os import getpid
from pathlib import Path
from typing import Any

from offstage.pipeline.atomic_files import mendable
from offstage.pipeline.cache.fingerprint import Change
from offstage.pipeline.cache.housekeeping import measured_files
from offstage.pipeline.cache.sealed_files import DamagedError, read_sealed, write_sealed
from offstage.pipeline.command_exit import INTERRUPTED, discard_output, run_command
from offstage.pipeline.environment import environment
from offstage.pipeline.errors import KilledError, ReplayError
from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.job_process import supervise
from offstage.pipeline.metrics import MetricTable
from offstage.pipeline.peers import excuse_this, own_rank
from offstage.pipeline.record import RunRecord, never_left_running
from offstage.pipeline.regular_files import lies_in
from offstage.pipeline.replay import Comparison, compare
from offstage.pipeline.replay_config import config_here, given_places, load_foreign
from offstage.pipeline.report.quantities import tell
from offstage.pipeline.stage import MEASURED
from offstage.pipeline.terminal import shorten
from offstage.pipeline.trust import REMOTE_CODE, TrustRequest, named_by_config, outputs_for

NAME = "offstage-replay"
DIFFERENT = 1
_SHOWN = 8
"""Entries of one list that are printed; the record has them all."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command with ``arguments`` (default: the process's own), then exit with its code."""
    given = _parser().parse_args(arguments)
    run_command(NAME, lambda: replay(given), tell=excuse_this)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=NAME,
        description="Runs a recorded run again, in a fresh process, from its own config, and compares the two.",
        epilog="Exit code: 0 the same, 1 different, 2 it can't be replayed, 130 interrupted.",
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run's folder, or its run.json")
    parser.add_argument(
        "--outputs",
        type=Path,
        metavar="FOLDER",
        help="where to write; default: the outputs that the run lies in",
    )
    parser.add_argument(
        "--trust",
        action="append",
        default=[],
        metavar="NAME",
        help=f"trust what the record names so: a class, a stage, a path outside its folder, or {REMOTE_CODE}; give it "
        "once for each",
    )
    parser.add_argument(
        "--model-path", metavar="FOLDER", help="where the checkpoint is here: a folder, a file or a Hub id"
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        dest="settings",
        metavar="KEY=PATH",
        help="where another file or folder of the config is here, as model.adapter=PATH; once for each",
    )
    return parser


def replay(given: argparse.Namespace) -> int:
    """Replay the run that ``given`` names, print what came of it, and return the exit code."""
    if own_rank():
        discard_output()  # hosts that replay together come to the same: the first shows it
    then = load_foreign(given.run)
    outputs = given.outputs.absolute() if given.outputs else outputs_for(then.path)
    folder = outputs / "runs" / f"{datetime.now():%Y-%m-%d/%H-%M-%S-%f}-{getpid()}"
    places = given_places(given.model_path, given.settings)
    config = config_here(then, outputs, places)
    refuse_untrusted(then, config, folder, [*given.trust, *places.values()])
    now = RunRecord.start(folder, overrides=then.run.overrides, config=config, environment=environment())
    cache = folder / ".cache"
    options = ["--expected", str(then.path.absolute()), "--cache", str(cache)]
    try:
        with never_left_running(now), mendable(folder):
            _bring_measurements(outputs / "cache", cache)
            code = supervise(now, options=options)
    except KilledError as error:
        raise ReplayError(f"{given.run}: the replay was ended: {error}") from error
    finally:
        shutil.rmtree(cache, ignore_errors=True)
    if code:
        return INTERRUPTED if code == INTERRUPTED else ReplayError.exit_code
    done = RunRecord.load(folder).run
    comparison = compare(then.run, done)
    lines = (*_report(comparison, metric_table(done)), f"replay    {shorten(folder)}")
    sys.stdout.writelines(f"{line}\n" for line in lines)
    return 0 if comparison.same else DIFFERENT


def refuse_untrusted(then: RunRecord, config: Mapping[str, Any], folder: Path, words: Sequence[str]) -> None:
    """Raise a ``ReplayError`` that names what a replay by ``config`` in ``folder`` needs the user's ``words`` for.

    A record of their own may name any place.
    """
    path, outputs = then.path.absolute(), Path(config["outputs"])
    asked = list(named_by_config(config, [path.parent, outputs]))
    if path.is_relative_to(outputs) and not lies_in(folder, [outputs]):  # sent with a link in it
        asked.append(TrustRequest(str(folder.parent), "outputs", is_code=False))
    untrusted = {each.word: each.key for each in asked if each.word not in words and (each.is_code or not then.is_own)}
    if untrusted:
        named = ", ".join(f"{key} ({word!r})" for word, key in untrusted.items())
        flags = " ".join(shlex.quote(f"--trust={word}") for word in dict.fromkeys([*words, *untrusted]))
        raise ReplayError(
            f"{then.path}: it names code to run, or places outside its folder that only its author chose: "
            f"{named}; where you trust them, give {flags}"
        )


def _bring_measurements(source: Path, target: Path) -> None:
    """Copy what was measured of this machine: measured again it would be slightly other, and so might be the plan."""
    for path in measured_files(source):
        with suppress(DamagedError, OSError):  # what isn't as it was written is measured again
            figures = read_sealed(path)
            (target / MEASURED).mkdir(parents=True, exist_ok=True)
            write_sealed(target / MEASURED / path.name, figures)


def _report(comparison: Comparison, table: MetricTable) -> Iterable[str]:
    """Yield the lines that say what came of a replay: of its metrics the times that ``table`` has a title for."""
    if comparison.kind:
        first = comparison.difference
        yield f"{comparison.kind:<10}{'the same' if first is None else f'different; {first}'}"
    yield f"plan      {f'{len(comparison.moved)} modules moved' if comparison.moved else 'the same'}"
    yield from _listed(comparison.moved)
    if comparison.why:
        yield "changed   in what the stages depend on"
        yield from _listed(comparison.why)
    yield f"machine   {'versions or hardware differ' if comparison.environment else 'the same versions and hardware'}"
    yield from _listed(comparison.environment)
    times = {row[0].name: row[0] for row in table.rows() if (row[0].kind, row[0].unit) == ("measured", "seconds")}
    for change in comparison.metrics:
        metric, then, now = times.get(change.place), change.then, change.now
        if metric and isinstance(then, int | float) and isinstance(now, int | float):
            yield f"speed     {metric.title}: {tell(then, metric.unit)} then, {tell(now, metric.unit)} now"


def _listed(changes: Sequence[Change]) -> Iterable[str]:
    for change in changes[:_SHOWN]:
        yield f"          {change.place}: was {change.then}, is {change.now}"
    if len(changes) > _SHOWN:
        yield f"          and {len(changes) - _SHOWN} more"
