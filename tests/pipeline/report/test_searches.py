"""What a search came to stands on top of the report of its jobs."""

import json
from pathlib import Path
from typing import Any

from offstage.pipeline.objective import SEARCH_RESULTS, Limit, Objective
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.summary import headline, search_facts, summarise
from tests.pipeline.report.sample_runs import write_run

LEAST = {"metric": "memory.budget.cpu", "at_most": {"decode_seconds_per_token": 0.5}}


def write_search(folder: Path, **fields: Any) -> Path:
    for number in range(3):
        run = write_run(folder / str(number), budget=(number + 1) * 10**9, seconds=1 / (number + 1))
        record = json.loads((run / "run.json").read_text())
        record["config"]["objective"] = LEAST
        (run / "run.json").write_text(json.dumps(record))
    (folder / SEARCH_RESULTS).write_text(json.dumps({"jobs": 3, "trials": 5, **fields}))
    return folder


def test_a_number_is_told_with_its_units_and_its_limits() -> None:
    limits = (Limit("decode_seconds_per_token", True, 0.5, 0.4, "seconds"), Limit("perplexity", False, 2, 3))
    assert Objective("memory.budget.cpu", 2e9, limits, "bytes").describe() == (
        "memory.budget.cpu 2.00 GB, decode_seconds_per_token 400.0 ms (at most 500.0 ms), "
        "perplexity 3.0000 (at least 2.0000)"
    )


def test_the_best_job_of_each_search_is_named_with_what_it_came_to(tmp_path: Path) -> None:
    write_search(tmp_path / "a", best_job=1)
    write_search(tmp_path / "b")
    write_run(tmp_path / "c" / "0")
    facts = headline(summarise(find([tmp_path])))
    assert [fact for fact in facts if fact[0] == "search"] == [
        ("search", "2.00 GB", "#1, best of 3 jobs of 5 trials: memory.budget.cpu 2.00 GB, "
         "decode_seconds_per_token 500.0 ms (at most 500.0 ms)"),
        ("search", "no answer", "none of 3 jobs of 5 trials completed within the objective's limits"),
    ]  # fmt: skip


def test_a_file_that_is_another_program_s_says_nothing(tmp_path: Path) -> None:
    write_search(tmp_path)
    (tmp_path / SEARCH_RESULTS).write_text("name: optuna\n")
    assert list(search_facts(find([tmp_path]).jobs)) == []
