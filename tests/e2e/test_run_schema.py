"""The schema of run.json: made of the classes that read it, and true of what each kind of run writes."""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.record import RunRecord
from tests.e2e.conftest import Finished, records_in, start, wait_for
from tests.json_schema import SCHEMA, run_validator, schema_text

KINDS: dict[str, tuple[str, ...]] = {
    "generate": ("generate.max_new_tokens=3", "measure.repeats=2"),
    "score": ("score.texts=[some words to score]",),
    "forward": ("forward.texts=[hello]",),
    "finetune": ("finetune.text_file=words.txt", "finetune.steps=2", "finetune.window=32", "max_memory.cpu=1GB"),
    "plan_only": (),
}


def test_the_schema_in_the_docs_is_that_of_the_classes() -> None:
    assert SCHEMA.read_text() == schema_text(), "python -m tests.json_schema writes it anew"


@pytest.mark.parametrize("kind", KINDS)
def test_the_record_of_a_run_of_each_kind_is_as_the_schema_says(
    kind: str, offstage_here: Callable[..., Finished], fresh_folder: Path
) -> None:
    (fresh_folder / "words.txt").write_text("one line of words to learn from\n" * 50)
    done = offstage_here(f"stages={kind}", *KINDS[kind])
    assert done.code == 0, done.err
    run_validator().validate(done.record)
    assert done.record["status"] == "completed"
    assert bool(done.record["outputs"]) is (kind != "plan_only")
    assert bool(done.record["steps"]) is (kind == "finetune")


def test_the_record_of_a_run_that_fails_is_too(offstage_here: Callable[..., Finished]) -> None:
    done = offstage_here("max_memory.cpu=1kB")
    assert done.code != 0
    assert (done.record["status"], done.record["error"]["stage"]) == ("failed", "plan")
    run_validator().validate(done.record)


def test_the_record_of_a_run_at_work_and_interrupted_is_too(fresh_folder: Path) -> None:
    process = start(fresh_folder, "generate.max_new_tokens=100000", "generate.prompts=[[5,6,7]]")
    wait_for(lambda: records_in(fresh_folder), process)
    (record,) = records_in(fresh_folder).values()
    assert record["status"] == "running"
    run_validator().validate(record)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=300)
    ((path, record),) = records_in(fresh_folder).items()
    assert record["status"] == RunRecord.load(path).run.status == "interrupted"
    run_validator().validate(record)


@pytest.mark.parametrize(
    "damage",
    [
        {"status": "done"},
        {"stages": {}},
        {"outputs": [{"token_ids": ["5"]}]},
        {"memory": {"series": {"cpu": [[1]]}}},
        {"metrics": {"load_seconds": [1]}},
        {"overrides": None},
    ],
)
def test_what_no_run_writes_is_not_as_the_schema_says(damage: dict[str, Any], tmp_path: Path) -> None:
    record = RunRecord.start(tmp_path, overrides=[], config={}, environment={})
    whole = json.loads(record.path.read_text())
    assert run_validator().is_valid(whole)
    assert not run_validator().is_valid(whole | damage)
