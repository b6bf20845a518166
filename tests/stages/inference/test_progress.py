"""What was generated is kept line by line, and what a kill or a disk spoilt isn't taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.cache.sealed_files import sealed_line
from offstage.stages.inference.progress import Progress

BATCHES = [
    [{"index": 2, "batch": 0, "rows": 2, "text": "ä"}, {"index": 0, "batch": 0, "rows": 2, "text": "b"}],
    [{"index": 1, "batch": 1, "rows": 1, "text": "c"}],
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    progress = Progress(tmp_path / "generations.jsonl")
    for rows in BATCHES:
        progress.add(rows)
    return tmp_path / "generations.jsonl"


def test_what_is_done_is_found_again(file: Path) -> None:
    assert Progress(file).done == dict(enumerate(BATCHES))


def test_in_the_end_the_rows_stand_in_the_order_of_the_prompts(file: Path) -> None:
    assert [row["index"] for row in Progress(file).settle()] == [0, 1, 2]
    assert [row["index"] for rows in Progress(file).done.values() for row in rows] == [0, 2, 1]


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 100_000 + b"\n",
        b'{"a":' * 1000 + b"1" + b"}" * 1000 + b"\n",
        b"\xff\n",
        b"7\n",
        sealed_line({"index": 0}),
        sealed_line({"index": 0, "batch": 7}),
        sealed_line({"index": "0", "batch": 7, "rows": 1}),
        sealed_line({"index": 0, "batch": [7], "rows": 1}),
        sealed_line({"index": 0, "batch": 7, "rows": None}),
    ],
    ids=lambda line: repr(line[:20]),
)
def test_a_line_that_is_no_result_is_dropped_and_the_others_are_taken(line: bytes, file: Path) -> None:
    whole = file.read_bytes()
    file.write_bytes(line + whole)
    assert Progress(file).done == dict(enumerate(BATCHES))
    assert file.read_bytes() == whole


def test_wherever_a_kill_cut_the_file_short_only_whole_batches_are_taken(file: Path) -> None:
    whole = file.read_bytes()
    first = whole.index(b"\n", whole.index(b"\n") + 1) + 1
    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        done = Progress(file).done
        assert set(done) == ({0} if length >= first else set())
        assert Progress(file).done == done, "what was dropped stays dropped"


def test_a_flipped_bit_anywhere_costs_its_batch_and_no_other(file: Path) -> None:
    whole = file.read_bytes()
    for place in range(len(whole)):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        done = Progress(file).done
        assert all(done[number] == BATCHES[number] for number in done)
        assert len(done) >= 1 or whole[place : place + 1] == b"\n"


def test_what_is_not_to_be_kept_is_forgotten_in_the_file_too(file: Path) -> None:
    Progress(file).keep({1})
    assert Progress(file).done == {1: BATCHES[1]}
