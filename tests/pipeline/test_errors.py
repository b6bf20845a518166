"""The text of an error: one bearable line for each fault, whatever the values are that it quotes."""

import pytest

from pipeline.errors import CheckpointError, Fault, OffstageError, StorageError, raise_faults


@pytest.mark.parametrize("kind", [OffstageError, CheckpointError, StorageError])
def test_what_a_terminal_obeys_is_escaped(kind: type[OffstageError]) -> None:
    assert str(kind("a\x1b[2Jb\x00\x9b\u202e\rc é")) == r"a\x1b[2Jb\x00\x9b\u202e\rc é"


def test_of_a_line_that_is_too_long_the_middle_is_left_out() -> None:
    said = str(CheckpointError("it: " + "x" * 10**6 + "; do this next"))
    assert len(said) < 4100
    assert said.startswith("it: xx")
    assert said.endswith("xx; do this next")


def test_each_fault_keeps_its_line() -> None:
    with pytest.raises(OffstageError) as raised:
        raise_faults([Fault("a", "b" * 5000), Fault("c", "d")])
    first, second = str(raised.value).split("\n")
    assert (first[:4], second) == ("a: b", "c: d")
