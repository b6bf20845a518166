from __future__ import annotations

import errno
import json
import math
import os
import shutil
import threading
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.errors import CheckpointError, ConfigError, StorageError
from offstage.pipeline.installed_stages import declared_metrics, metric_table
from offstage.pipeline.metrics import MetricTable
from offstage.pipeline.record import RunRecord, never_left_running
from offstage.pipeline.run_schema import RunMemory, StageRun
from offstage.pipeline.signatures import is_signed, places_in
from offstage.pipeline.stage import Report

STAGE = StageRun(
    name="plan",
    key="f" * 64,
    cached=False,
    seconds=1.5,
    artifact="outputs/cache/plan/ffff",
    peak_host_bytes=10,
    peak_device_bytes={"0": 20},
    inputs={"seed": 1},
)


def start(folder: Path) -> RunRecord:
    return RunRecord.start(folder, overrides=["seed=1"], config={"seed": 1}, environment={"python": "3"})


def read(folder: Path) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((folder / "run.json").read_text())
    return record


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "runs" / "today"


def test_a_record_begins_with_every_field_of_the_design(folder: Path) -> None:
    start(folder)
    content = read(folder)
    assert datetime.fromisoformat(content.pop("started")).tzinfo is not None
    assert content == {
        "schema_version": 2,
        "status": "running",
        "error": None,
        "finished": None,
        "overrides": ["seed=1"],
        "config": {"seed": 1},
        "signature": content["signature"],
        "environment": {"python": "3"},
        "model": {},
        "inputs": {},
        "packages": {},
        "places": {"run": str(folder), "folder": str(Path.cwd()), "conf": str(resources.files("offstage.conf"))},
        "stages": [],
        "memory": {"budget": {}, "predicted": {}, "measured": {}},
        "metrics": {},
        "metric_table": {},
        "outputs": [],
        "experts": {},
        "repeats": [],
        "steps": [],
        "device_map": None,
        "enforcement": None,
    }
    assert [path.name for path in folder.iterdir()] == ["run.json"]
    config, signature, elsewhere = (
        content["config"],
        content["signature"],
        {**content["places"], "folder": "/elsewhere"},
    )
    assert is_signed("run.json", places_in(config, content["places"]), signature)
    assert not is_signed("run.json", places_in(config, elsewhere), signature)


def test_a_record_has_the_table_of_its_metrics_and_a_null_for_each_that_is_not_optional(folder: Path) -> None:
    record = start(folder)
    record.merge(Report(metrics={"load_seconds": 1.0}))
    record.note_metrics(declared_metrics(["plan", "generate"]))
    content = read(folder)
    assert {name for name, value in content["metrics"].items() if value is None} == {
        "time_to_first_token_seconds", "prefill_seconds", "decode_seconds_per_token", "decode_tokens_per_second",
        "streamed_bytes_per_token", "streamed_bytes_per_second", "stall_seconds_per_token", "stall_share",
        "bottleneck", "lower_bound_seconds_per_token", "storage_read_bytes", "stall_seconds", "peak_host_bytes",
        "peak_host_rss_bytes", "base_host_bytes",
    }  # fmt: skip
    assert content["metrics"]["load_seconds"] == 1.0
    assert content["metric_table"]["stall_share"] == {"unit": "share", "title": "stall share"}
    assert (
        metric_table(record.run) == MetricTable.read(content["metric_table"]) == declared_metrics(["plan", "generate"])
    )


def test_a_stage_is_written_as_soon_as_it_is_added(folder: Path) -> None:
    start(folder).add_stage(STAGE)
    assert read(folder)["stages"] == [
        {
            "name": "plan",
            "key": "f" * 64,
            "cached": False,
            "seconds": 1.5,
            "artifact": "outputs/cache/plan/ffff",
            "peak_host_bytes": 10,
            "peak_device_bytes": {"0": 20},
            "inputs": {"seed": 1},
            "measured": False,
        }
    ]


def test_a_stage_that_is_added_again_takes_the_place_of_its_entry(folder: Path) -> None:
    record = start(folder)
    for name, seconds in (("plan", 1.0), ("generate", 2.0), ("plan", 3.0)):
        record.add_stage(StageRun(name=name, key="", cached=True, seconds=seconds, artifact=""))
    assert [(stage["name"], stage["seconds"]) for stage in read(folder)["stages"]] == [
        ("plan", 3.0),
        ("generate", 2.0),
    ]


def test_reports_are_merged_key_by_key(folder: Path) -> None:
    record = start(folder)
    record.merge(Report(memory={"budget": {"0": 1, "cpu": 2}}, metrics={"load_seconds": 1.0}))
    record.merge(Report(memory={"budget": {"cpu": 3}, "measured": {"cpu": 4}}, metrics={"stall_seconds": 2.0}))
    written = read(folder)
    assert written["memory"] == {"budget": {"0": 1, "cpu": 3}, "predicted": {}, "measured": {"cpu": 4}}
    assert (written["metrics"]["load_seconds"], written["metrics"]["stall_seconds"]) == (1.0, 2.0)


def test_what_a_report_does_not_know_leaves_what_is_known(folder: Path) -> None:
    record = start(folder)
    record.merge(Report(memory={"budget": {"disk": None, "cpu": 1}}, metrics={"load_seconds": 1.0}))
    record.merge(Report(memory={"budget": {"cpu": None}}, metrics={"load_seconds": None}))
    assert read(folder)["memory"]["budget"] == {"disk": None, "cpu": 1}
    assert read(folder)["metrics"]["load_seconds"] == 1.0


def test_a_number_that_json_does_not_have_counts_as_not_known(folder: Path) -> None:
    record = start(folder)
    record.merge(Report(metrics={"load_seconds": math.nan, "decode_tokens_per_second": math.inf}))
    metrics = read(folder)["metrics"]
    assert (metrics["load_seconds"], metrics["decode_tokens_per_second"]) == (None, None)


@pytest.mark.parametrize(
    ("report", "words"),
    [
        (Report(metrics={"echo_time": [1, 2]}), r"metrics.echo_time: \[1, 2\]"),  # type: ignore[dict-item]
        (Report(memory={"measured": {"cpu": "much"}}), r"memory.measured.cpu: 'much'"),  # type: ignore[dict-item]
        (Report(outputs=({"token_ids": "none"},)), r"outputs.0.token_ids: 'none'"),
        (Report(metrics=["load_seconds"]), "has no attribute 'items'"),  # type: ignore[arg-type]
    ],
)
def test_what_no_record_can_hold_is_refused_by_the_stage_that_reports_it(
    report: Report, words: str, folder: Path
) -> None:
    record = start(folder)
    before = (folder / "run.json").read_text()
    with pytest.raises(ConfigError, match=f"stages: echo reports what no record can hold, .*{words}.*mend the report"):
        record.merge(report, stage="echo")
    assert (folder / "run.json").read_text() == before


def test_outputs_that_are_reported_twice_are_there_once(folder: Path) -> None:
    record = start(folder)
    outputs = ({"prompt": "a", "text": "é", "token_ids": [1, 2]}, {"prompt": "a", "text": "é", "token_ids": [1, 2]})
    for _ in range(2):
        record.merge(Report(outputs=outputs))
    record.merge(Report())
    assert read(folder)["outputs"] == list(outputs)


def test_a_record_that_ends_well_says_so(folder: Path) -> None:
    start(folder).finish("completed")
    assert (read(folder)["status"], read(folder)["error"]) == ("completed", None)


def test_a_record_that_ends_with_an_error_tells_which_and_where(folder: Path) -> None:
    start(folder).finish("failed", error=CheckpointError("model.safetensors: missing"), stage="shard_load")
    assert read(folder)["status"] == "failed"
    assert read(folder)["error"] == {
        "stage": "shard_load",
        "type": "CheckpointError",
        "message": "model.safetensors: missing",
    }


def test_the_resolved_config_takes_the_place_of_the_first(folder: Path) -> None:
    record = start(folder)
    record.config = {"seed": 2}
    assert record.config == read(folder)["config"] == {"seed": 2}
    assert record.data == read(folder)


def test_two_runs_never_share_a_folder(folder: Path) -> None:
    start(folder).finish("completed")
    with pytest.raises(StorageError, match=r"run\.json: another run's record.*hydra\.run\.dir"):
        start(folder)
    assert read(folder)["status"] == "completed"


def no_links(self: Path, target: Path) -> None:
    raise OSError(errno.EPERM, "Operation not permitted")


@pytest.mark.parametrize("links", [True, False])
def test_of_many_runs_that_start_in_one_folder_at_once_one_has_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    if not links:
        monkeypatch.setattr(Path, "hardlink_to", no_links)
    barrier, started, refused = threading.Barrier(8), [], []

    def attempt() -> None:
        barrier.wait(120)
        try:
            started.append(start(folder))
        except StorageError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=attempt) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(started), len(refused)) == (1, 7)
    assert all("another run's record" in message for message in refused)
    assert read(folder)["status"] == "running"
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_a_file_in_the_place_of_the_folder_is_an_error_that_says_what_to_do(folder: Path) -> None:
    folder.parent.mkdir(parents=True)
    folder.write_text("")
    with pytest.raises(StorageError, match=r"today: .*move it away"):
        start(folder)


def test_a_write_that_fails_leaves_the_record_as_it_was(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = start(folder)
    before = read(folder)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match="today: No space left on device; free some space"):
        record.add_stage(STAGE)
    assert read(folder) == before
    assert [path.name for path in folder.iterdir()] == ["run.json"]


def test_what_could_not_be_written_is_written_the_next_time(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = start(folder)
    with monkeypatch.context() as patch:
        patch.setattr("offstage.pipeline.record.replace_file", lambda path, text: no_links(path, path))
        with pytest.raises(StorageError):
            record.add_stage(STAGE)
    record.add_stage(STAGE)
    assert [stage["name"] for stage in read(folder)["stages"]] == ["plan"]


def test_a_record_in_which_nothing_changed_is_not_written_again(folder: Path) -> None:
    record = start(folder)
    record.add_stage(STAGE)
    written = (folder / "run.json").stat().st_mtime_ns
    record.add_stage(STAGE)
    record.merge(Report())
    assert (folder / "run.json").stat().st_mtime_ns == written


def test_a_reader_always_sees_a_whole_record(folder: Path) -> None:
    record = start(folder)
    done = threading.Event()

    def grow() -> None:
        for number in range(50):
            record.merge(Report(outputs=({"prompt": "p", "text": "t" * 20_000, "token_ids": [number]},)))
        done.set()

    writer = threading.Thread(target=grow)
    writer.start()
    seen = set()
    while not done.is_set():
        seen.add(json.dumps(read(folder)["outputs"]))
    writer.join()
    assert len(seen) > 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (StorageError("the folder: Input/output error"), "failed"),  # as the exit code says
        (BrokenPipeError(), "completed"),  # nobody reads what is shown of it
        (KeyboardInterrupt(), "completed"),
    ],
)
def test_a_completed_run_whose_record_may_not_last_is_no_completed_one(
    error: BaseException, status: str, tmp_path: Path
) -> None:
    record = RunRecord.start(tmp_path, overrides=[], config={}, environment={})
    record.finish("completed")
    with pytest.raises(type(error)), never_left_running(record):
        raise error
    assert RunRecord.load(tmp_path).data["status"] == status


def test_a_record_that_is_gone_is_named_whatever_else_failed_since(folder: Path) -> None:
    record = start(folder)
    record.require()
    shutil.rmtree(folder)
    for write in (record.require, lambda: record.finish("completed")):
        with pytest.raises(StorageError, match=r"run.json: was removed while the run was at work, .*; run again, and"):
            write()
    with pytest.raises(CheckpointError, match="no weights"), never_left_running(record):
        raise CheckpointError("no weights")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({"stages": [{"name": "plan"}]}, r"damaged: stages\.0\.artifact is missing"),
        ({"metrics": {"load_seconds": [1]}}, r"damaged: metrics\.load_seconds: \[1\] isn't"),
        ({"outputs": [{"token_ids": [1, "2"]}]}, r"damaged: outputs\.0\.token_ids\.1: '2' isn't int"),
        ({"overrides": list(range(100_000))}, r"damaged: overrides\.0: 0 isn't str"),
        ({"memory": list(range(100_000))}, r"damaged: memory: \[0, 1, 2, 3, 4, 5, \.\.\.\] isn't RunMemory"),
        ({"schema_version": 9}, "schema_version 9; this offstage reads 2"),
        ({"status": 3}, "no run record: it has no status"),
    ],
)
def test_a_record_that_is_damaged_is_refused_with_the_key(damage: dict[str, Any], words: str, folder: Path) -> None:
    path = start(folder).path
    path.write_text(json.dumps(read(folder) | damage))
    with pytest.raises(StorageError, match=words) as refused:
        RunRecord.load(folder)
    assert str(refused.value).endswith("restore the file, or give the folder of another run")


def test_what_a_release_wrote_that_had_fewer_sections_is_read_with_what_they_would_be(folder: Path) -> None:
    path = start(folder).path
    older = ("status", "overrides", "config", "environment", "stages", "metrics", "outputs")
    path.write_text(json.dumps({key: value for key, value in read(folder).items() if key in older} | {"newer": 1}))
    run = RunRecord.load(folder).run
    assert (run.repeats, run.metric_table, run.places, run.memory, run.enforcement) == ((), {}, None, RunMemory(), None)
    assert RunRecord.load(folder).data["newer"] == 1, "who writes it again loses nothing of it"


def test_two_records_share_nothing(folder: Path) -> None:
    one = start(folder)
    one.merge(Report(memory={"budget": {"cpu": 1}}, metrics={"load_seconds": 1.0}, model={"class": "Model"}))
    assert start(folder.with_name("other")).data["memory"]["budget"] == {}
    assert (one.run.memory.budget, one.run.model.class_name) == ({"cpu": 1}, "Model")


def test_a_record_has_its_tokens_in_a_line(folder: Path) -> None:
    record = start(folder)
    lines = len(record.path.read_text().splitlines())
    record.merge(Report(outputs=({"token_ids": list(range(10_000))},)))
    assert len(record.path.read_text().splitlines()) < lines + 6
    assert RunRecord.load(folder).run.outputs[0].token_ids == tuple(range(10_000))


def test_what_is_noted_together_is_written_once_also_where_it_ends_in_an_error(folder: Path) -> None:
    record = start(folder)

    def note() -> None:
        with record.written_once():
            record.add_stage(STAGE)
            record.merge(Report(metrics={"load_seconds": 2.0}))
            assert read(folder)["stages"] == []
            assert record.run.stages == (STAGE,)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        note()
    assert [stage["name"] for stage in read(folder)["stages"]] == ["plan"]
    assert read(folder)["metrics"] == {"load_seconds": 2.0}
