"""What Hydra trips over while it composes: the cause, in one line."""

from pathlib import Path

import pytest

from offstage.pipeline.command_exit import last_resort
from offstage.pipeline.hydra_messages import composing


def test_a_config_that_cannot_be_opened_is_an_error_of_input(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def read_as_hydra_does() -> int:
        with composing():
            try:
                file = tmp_path.joinpath("gone.yaml").open()
                return len(file.read())
            finally:
                file.close()

    assert last_resort(read_as_hydra_does) == 5
    assert capfd.readouterr().err.startswith(f"offstage: {tmp_path / 'gone.yaml'}: No such file or directory; ")


def test_a_mistake_of_the_same_kind_elsewhere_is_not_taken_for_one() -> None:
    @composing()
    def mistaken() -> int:
        if __debug__ is None:
            number = 0
        return number

    with pytest.raises(UnboundLocalError):
        mistaken()
