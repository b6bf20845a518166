"""A byte's way from the call that needs it to the system's read stays as short as it is."""

from pathlib import Path

from tests.benchmarks.hops import of_a_part, of_an_expert


def test_a_streamed_byte_goes_through_ten_functions(tmp_path: Path) -> None:
    assert len(of_a_part(tmp_path)) <= 10
    assert len(of_a_part(tmp_path, at_begin=True)) <= 10


def test_the_byte_of_an_expert_goes_through_twelve(tmp_path: Path) -> None:
    assert len(of_an_expert(tmp_path)) <= 12
