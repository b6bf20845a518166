"""A run of the tests ends with what it skipped."""

from __future__ import annotations

from tests.conftest import skipped_by_reason


def test_each_reason_has_one_line_with_how_many_there_were_wherever_they_stand() -> None:
    here, there = ("a.py", 1, "Skipped: needs a GPU"), ("b.py", 7, "Skipped: needs a GPU")
    assert skipped_by_reason([("c.py", 2, "Skipped: no C compiler"), here, there]) == [
        "    2  needs a GPU",
        "    1  no C compiler",
    ]
    assert skipped_by_reason([]) == []
