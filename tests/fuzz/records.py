"""Run records from elsewhere: replayed, compared and reported, or refused."""

from __future__ import annotations

import json
import os
import shutil
import sys
from io import StringIO
from pathlib import Path

from offstage.pipeline.installed_stages import metric_table
from offstage.pipeline.job import perform
from offstage.pipeline.record import RunRecord, never_left_running
from offstage.pipeline.replay import compare
from offstage.pipeline.replay_command import _report, refuse_untrusted
from offstage.pipeline.replay_config import config_here, load_foreign
from offstage.pipeline.report.comparison import compare_runs
from offstage.pipeline.report.exports import as_csv, as_json, comparison_json
from offstage.pipeline.report.page import report_page
from offstage.pipeline.report.run_folders import find, find_one
from offstage.pipeline.report.summary import summarise
from offstage.pipeline.report.terminal import show_comparison, show_summary
from offstage.pipeline.terminal import Screen
from tests.e2e.conftest import records_in
from tests.fuzz.commands import CHECKPOINT, keep_figures, run_command, tokens_in
from tests.fuzz.formats import RIGHT, Format, require
from tests.fuzz.mutations import JSON
from tests.fuzz.texts import TINY


def _make_records(folder: Path) -> None:
    """Keep the records of two runs, one of them of the whole checkpoint on disk."""
    shutil.copytree(TINY, folder / "ckpt")
    for name, more in (("one", ()), ("two", ("device_map=disk", "generate.prompts=[[5,6,7]]"))):
        code, said = run_command((*CHECKPOINT, *more), folder)
        require(code == 0, said)
        (path,) = records_in(folder)
        folder.joinpath("runs", name).mkdir(parents=True)
        path.rename(folder / "runs" / name / "run.json")
        shutil.rmtree(folder / "outputs" / "runs")
    keep_figures(folder)


def _attempt_reading(folder: Path, pristine: Path) -> str:
    """Read a record as a replay does before it runs anything, and hold it against the one that it was."""
    for name in ("one", "two"):
        record = load_foreign(folder / "runs" / name)
        refuse_untrusted(record, config_here(record, folder / "outputs", {}), folder / "outputs/runs/day/time", ())
        whole = RunRecord.load(pristine / "runs" / name)
        for first, second in ((record, whole), (whole, record)):
            text = "\n".join(_report(compare(first.run, second.run), metric_table(second.run)))
            require("tokens" in text, text)
    return RIGHT


def _attempt_report(folder: Path, _pristine: Path) -> str:
    """Report all runs, as a table, a page and two files; what isn't a record is listed with the reason."""
    summary = summarise(find([folder / "runs"]))
    require(bool(as_csv(summary)), "no table")
    json.loads(as_json(summary))
    shown, sys.stdout = sys.stdout, StringIO()
    try:
        show_summary(Screen(), summary)
    finally:
        shown, sys.stdout = sys.stdout, shown
    return RIGHT


def _attempt_page(folder: Path, _pristine: Path) -> str:
    """Make the page of all runs with their figures, and compare two."""
    require("<html" in report_page(summarise(find([folder / "runs"])), "runs"), "no page")
    comparison = compare_runs(find_one(folder / "runs" / "one"), find_one(folder / "runs" / "two"))
    json.loads(comparison_json(comparison))
    show_comparison(Screen(), comparison)
    return RIGHT


def _attempt_replay(folder: Path, pristine: Path) -> str:
    """Run a record again as the process of a replay does, in this one, and compare."""
    os.chdir(folder)
    then = load_foreign(folder / "runs" / "one")
    place, config = folder / "outputs" / "runs" / "day" / "time", config_here(then, folder / "outputs", {})
    refuse_untrusted(then, config, place, ())
    now = RunRecord.start(place, overrides=[], config=config, environment={})
    try:
        with never_left_running(now):
            perform(now, started=0.0, expected=then, cache=folder / "outputs" / "cache")
    finally:
        require(RunRecord.load(place).data["status"] != "running", "left running")
    now = RunRecord.load(place)
    list(_report(compare(then.run, now.run), metric_table(now.run)))
    same = {key: then.config[key] for key in then.config} == RunRecord.load(pristine / "runs" / "one").config
    if same:
        wanted = RunRecord.load(pristine / "runs" / "one").data["outputs"]
        require(tokens_in(folder) == [output["token_ids"] for output in wanted], f"tokens {tokens_in(folder)}")
    return RIGHT


_RECORDS = ("runs/*/run.json",)
FORMATS = (
    Format("record", _make_records, _RECORDS, JSON, _attempt_reading),
    Format("report", _make_records, _RECORDS, JSON, _attempt_report),
    Format("report page", _make_records, _RECORDS, JSON, _attempt_page, apart=True),
    Format("replay", _make_records, ("runs/one/run.json",), JSON, _attempt_replay, apart=True),
)
