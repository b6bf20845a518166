"""A run of the tests ends with what it didn't run."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import by_folder, left_to_the_long_form, skipped_by_reason


def test_each_reason_has_one_line_with_how_many_there_were_wherever_they_stand() -> None:
    first, second = ("a.py", 1, "Skipped: needs a GPU"), ("b.py", 7, "Skipped: needs a GPU")
    assert skipped_by_reason([("c.py", 2, "Skipped: no C compiler"), first, second]) == [
        "    2  needs a GPU",
        "    1  no C compiler",
    ]
    assert skipped_by_reason([]) == []


def test_each_folder_with_tests_of_the_long_form_has_one_line() -> None:
    deep = Path("tests/stages/dispatch/streaming/test_threads.py")
    left = by_folder([Path("tests/e2e/test_ports.py"), deep, deep])
    assert [line.partition(":")[0] for line in left_to_the_long_form(left)] == [
        "    1  tests/e2e",
        "    2  tests/stages/dispatch",
    ]
    assert left_to_the_long_form({}) == []
