"""What stands on top of the page: what was measured and on what, and in what the jobs differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.report.command import run
from offstage.pipeline.report.differences import conditions, told_differences
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.pages import markup
from tests.pipeline.report.sample_runs import write_failure, write_run

ANSWERED = "of 1 tokens, answered by "
VERSIONS = {
    "offstage": "0.1.0",
    "torch": "2.13.0",
    "python": "3.11.7",
    "git_commit": "0d017e1aa9e8de6815ed86c1b79be312",
}
MACHINE = {
    "cpu": "AMD EPYC",
    "cores": 64,
    "cores_allowed": 2,
    "core_quota": 1.5,
    "memory_bytes": 25_000_000_000,
    "memory_limit_bytes": 4_000_000_000,
    "accelerators": [{"name": "H200", "memory_bytes": 139 * 10**9}] * 2,
}


def write(folder: Path, change: Callable[[dict[str, Any]], object] = lambda record: None, **options: Any) -> None:
    write_run(folder, **options)
    record = json.loads((folder / "run.json").read_text())
    record["environment"] = {**VERSIONS, **MACHINE, "platform": "Linux-6.18", "peft": None}
    record["started"] = "2026-11-22T10:05:30.000+00:00"
    record["config"]["stages"] = ["plan", "generate"]
    change(record)
    (folder / "run.json").write_text(json.dumps(record))


def conditions_of(folder: Path) -> dict[str, list[str]]:
    return {entry.key: [value for value, _ in entry.values] for entry in conditions(find([folder]).jobs)}


def test_what_all_jobs_share_is_told_once(tmp_path: Path) -> None:
    for number in range(2):
        write(tmp_path / str(number), tokens=[1, 2, 3])
    assert conditions_of(tmp_path) == {
        "model": ["LlamaForCausalLM, 1.10 billion parameters"],
        "checkpoint": ["/ckpt"],
        "dtype": ["bfloat16, 2.20 GB"],
        "last stage": ["generate"],
        "prompts": ["1, of 1 tokens, answered by 3 new ones"],
        "machine": [
            "AMD EPYC, 64 cores, 2 of them allowed, a quota of 1.5 cores, 25.00 GB of memory, 4.00 GB of it allowed; "
            "2x H200 (139.0 GB)"
        ],
        "platform": ["Linux-6.18"],
        "versions": ["offstage 0.1.0 at 0d017e1aa9e8, torch 2.13.0, python 3.11.7"],
        "begun": ["2026-11-22 10:05 UTC"],
    }
    assert told_differences(conditions(find([tmp_path]).jobs)) == "The same for all jobs."


def test_the_checkout_that_a_run_was_started_in_is_told_with_its_changes(tmp_path: Path) -> None:
    state = {"commit": "1" * 40, "dirty": True}
    write(tmp_path, lambda record: record["environment"].update(repository=state, git_dirty=True))
    by_key = conditions_of(tmp_path)
    assert by_key["repository"] == [f"{'1' * 12} with changes"]
    assert by_key["versions"][0].startswith("offstage 0.1.0 at 0d017e1aa9e8 with changes, ")


def change_torch(record: dict[str, Any]) -> None:
    record["environment"]["torch"] = "2.12.0"


def change_dtype(record: dict[str, Any]) -> None:
    record["model"]["parameters"] = {"float32": 10, "float16": 10**9}


def change_prompts(record: dict[str, Any]) -> None:
    record["outputs"] = [{"prompt": f"p{n}", "prompt_tokens": n, "text": "", "token_ids": [1] * n} for n in (2, 7)]


@pytest.mark.parametrize(
    ("change", "name", "values"),
    [
        (change_torch, "torch", ["2.13.0", "2.12.0"]),
        (change_dtype, "dtype", ["bfloat16, 2.20 GB", "float16, float32, 2.20 GB"]),
        (
            change_prompts,
            "prompts",
            [f"1, {ANSWERED}4 new ones", "2, of 2 to 7 tokens, answered by 2 to 7 new ones"],
        ),
    ],
)
def test_what_jobs_differ_in_is_named_with_its_jobs(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], name: str, values: list[str]
) -> None:
    write(tmp_path / "0")
    write(tmp_path / "1", change)
    entries = conditions(find([tmp_path]).jobs)
    entry = next(entry for entry in entries if entry.key == name)
    assert entry.values == ((values[0], ("#0",)), (values[1], ("#1",)))
    assert name in told_differences(entries)
    assert "jobs differ in" in told_differences(entries)


def test_a_machine_that_jobs_shared_says_that_seconds_are_contended(tmp_path: Path) -> None:
    write(tmp_path / "0", lambda record: record["environment"].update(jobs_beside=3))
    (machine,) = conditions_of(tmp_path)["machine"]
    assert "4.00 GB of it allowed, jobs beside it at most: 3, so that seconds are contended; 2x H200" in machine


def test_a_job_that_was_refused_has_a_say_in_what_its_record_holds_alone(tmp_path: Path) -> None:
    write(tmp_path / "0")
    write_failure(tmp_path / "1")
    entries = {entry.key: entry for entry in conditions(find([tmp_path]).jobs)}
    assert entries["model"].values == (("LlamaForCausalLM, 1.10 billion parameters", ("#0",)),)
    assert entries["checkpoint"].values == (("/ckpt", ("#0", "#1")),)


def test_records_from_before_these_fields_make_the_page_too(tmp_path: Path) -> None:
    def strip(record: dict[str, Any]) -> None:
        del record["model"], record["started"], record["environment"]
        record["outputs"][0].pop("prompt_tokens")

    write(tmp_path / "0", strip)
    assert conditions_of(tmp_path) == {
        "checkpoint": ["/ckpt"],
        "dtype": ["auto"],
        "last stage": ["generate"],
        "prompts": ["1, answered by 4 new ones"],
    }
    run([str(tmp_path)])
    assert "What was measured" in markup(tmp_path / "report.html")


def test_an_answer_without_text_shows_its_token_ids(tmp_path: Path) -> None:
    write(tmp_path / "0", text="", tokens=[17, 4711])
    run([str(tmp_path)])
    page = markup(tmp_path / "report.html")
    assert "<code>17 4711</code>" in page
    assert "token ids" in page
