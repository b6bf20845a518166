"""A folder from elsewhere may record any command: what names code runs only where the user says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.sweeps.command import main
from pipeline.sweeps.record import SweepRecord
from pipeline.sweeps.trust import named_code, refuse_untrusted, resume_command
from tests.pipeline.sweeps.sample_sweeps import sweep_of


def began_with(*command: str) -> SweepRecord:
    return replace(sweep_of(1), command=command)


@pytest.mark.parametrize(
    "argument",
    [
        "--config-dir=/tmp/x",
        "-cp",
        "hydra.callbacks.x._target_=os.system",
        "+hydra.callbacks.x=1",
        "++hydra/job_logging=x",
        "hydra.searchpath=[file:///tmp]",
        "hydra.launcher.setup=[reboot]",
        "hydra.sweeper.params.hydra.callbacks=1",
        "experiment=../../x",
        "+model@x=/tmp/y",
    ],
)
def test_arguments_that_load_or_call_what_they_name_need_the_user_s_word(argument: str) -> None:
    record = began_with("-m", argument, "seed=1,2")
    assert named_code(record) == [argument]
    with pytest.raises(ConfigError, match="its command names code to run"):
        refuse_untrusted(Path("s"), record, [])
    refuse_untrusted(Path("s"), record, [argument])


def test_other_arguments_name_no_code() -> None:
    own = (
        "hydra.sweep.dir=/x",
        "hydra.sweeper.max_batch_size=2",
        "hydra/launcher=submitit_slurm",
        "experiment=precision",
    )
    paths = ("model.path=../x", "device_map=/maps/map.json", "outputs=/a/b", "stages=[plan,generate]")
    assert named_code(began_with("-m", *own, *paths)) == []


def test_the_command_that_resumes_says_what_is_trusted() -> None:
    record = replace(sweep_of(1, code=("a.Net",)), command=("-m", "--config-dir=my files"))
    assert resume_command(Path("a b"), record) == (
        "offstage-sweep resume 'a b' '--trust=--config-dir=my files' --trust=a.Net"
    )


def test_nothing_of_a_command_runs_that_is_not_trusted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    began_with("-m", "hydra.callbacks.x._target_=os.system").create(tmp_path)
    with pytest.raises(SystemExit) as left:
        main(["resume", str(tmp_path)])
    assert left.value.code == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "give --trust=hydra.callbacks.x._target_=os.system" in shown.err
    assert len(shown.err.splitlines()) == 1


def test_a_folder_without_a_sweep_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["resume", str(tmp_path)])
    assert left.value.code == 5
    assert capsys.readouterr().err == f"offstage-sweep: {tmp_path}: no sweep.json there; give the folder of a sweep\n"
