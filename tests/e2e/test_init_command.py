"""offstage-init: the tree that it writes, which runs as it is, and never over what is there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from offstage.pipeline import init_command
from tests.e2e.conftest import Finished, finish, records_in, start

Init = Callable[..., tuple[int, str, str]]
FILES = {
    "README.md", "conf/experiment/mine.yaml", "conf/experiment/sweep.yaml", "conf/hardware/lab.yaml",
    "conf/model/mine.yaml",
}  # fmt: skip


@pytest.fixture
def init(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Init:
    """Return a function that runs offstage-init in this test's folder: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_info:
            init_command.main(arguments)
        captured = capfd.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run


def files_in(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def globbed(folder: Path, word: str) -> list[str]:
    """Return what a shell in ``folder`` makes of ``word``."""
    return sorted(str(path.relative_to(folder)) for path in folder.glob(word)) if "*" in word else [word]


def commands_in(readme: Path) -> list[list[str]]:
    """Return the commands that stand in blocks of ``readme``."""
    blocks = re.findall(r"^```\n(.*?)^```", readme.read_text(), re.MULTILINE | re.DOTALL)
    lines = (line for block in blocks for line in block.splitlines())
    return [shlex.split(line) for line in lines if line.startswith("offstage")]


def test_each_command_that_the_readme_lists_runs_in_the_folder_as_it_was_written(
    init: Init, fresh_folder: Path, offstage_here: Callable[..., Finished], jobs_fork: None
) -> None:
    code, out, err = init(".")
    assert (code, err) == (0, "")
    assert files_in(fresh_folder) - {each for each in files_in(fresh_folder) if each.startswith("outputs/")} == FILES
    assert all(f"  {name}\n" in out for name in FILES)
    commands = commands_in(fresh_folder / "README.md")
    assert len(commands) == 7
    done: dict[str, Finished] = {}
    for name, *arguments in commands:
        before = records_in(fresh_folder)
        words = [each for word in arguments for each in globbed(fresh_folder, word)]
        if name == "offstage" and "job" not in words:  # Hydra shows a job's config to a process that then ends
            done[shlex.join(arguments)] = offstage_here(*words)
            continue
        process = start(fresh_folder, *words, entry=name.removeprefix("offstage-"))
        done[shlex.join(arguments)] = finish(process, fresh_folder, before)
    assert [(asked, each.err) for asked, each in done.items() if each.code] == []
    assert done["--config-dir conf experiment=mine"].record["config"]["vars"] == {"budget": "3MB", "words": 24}
    changed = done["--config-dir conf experiment=mine vars.budget=4MB"].record
    assert (changed["config"]["max_memory"], len(changed["outputs"])) == ({"cpu": "4MB"}, 2)
    sweep = done["--config-dir conf experiment=sweep"]
    assert "6 of 6 completed" in sweep.out
    lab = next(each for asked, each in done.items() if "hardware=lab stages=plan_only max_memory.0" in asked)
    assert "0 (RTX 4090)" in lab.out
    assert "1 (RTX 3060) 6.00 GB from the host" in lab.out


def test_every_file_says_how_it_is_used_and_an_experiment_begins_with_its_package(init: Init, tmp_path: Path) -> None:
    init("new/folder")
    for path in tmp_path.rglob("*.yaml"):
        text = path.read_text()
        assert "offstage --config-dir conf" in text, path
        assert OmegaConf.create(text), path
        assert (text.partition("\n")[0] == "# @package _global_") == (path.parent.name == "experiment"), path


def test_a_folder_that_is_not_there_is_made_and_the_next_commands_are_told(init: Init, tmp_path: Path) -> None:
    code, out, err = init("new/folder")
    assert (code, err, files_in(tmp_path / "new/folder")) == (0, "", FILES)
    assert out.endswith("to run it:\ncd new/folder\noffstage --config-dir conf experiment=mine\n")


def test_what_is_there_is_not_written_over_and_nothing_else_is_written(init: Init, tmp_path: Path) -> None:
    mine = tmp_path / "conf/model/mine.yaml"
    mine.parent.mkdir(parents=True)
    mine.symlink_to("nowhere")
    tmp_path.joinpath("README.md").write_text("mine")
    code, out, err = init(".")
    assert (code, out) == (2, "")
    assert err == (
        "offstage-init: .: README.md, conf/model/mine.yaml would be written over; move them away, or name another "
        "folder\n"
    )
    assert files_in(tmp_path) == {"README.md"}
    assert tmp_path.joinpath("README.md").read_text() == "mine"


def test_a_second_time_every_file_is_named(init: Init) -> None:
    assert init("a")[0] == 0
    code, _, err = init("a")
    assert code == 2
    assert all(f"a/{name}" in err for name in FILES)


@pytest.mark.parametrize(("folder", "refused"), [("file", 2), ("link", 2), ("file/below", 5)])
def test_what_is_no_folder_is_told_in_one_line(folder: str, refused: int, init: Init, tmp_path: Path) -> None:
    tmp_path.joinpath("file").write_text("")
    tmp_path.joinpath("link").symlink_to("nowhere")
    code, out, err = init(folder)
    assert (code, out, err.count("\n")) == (refused, "", 1), err
    assert err.startswith(f"offstage-init: {folder}: ")
    assert files_in(tmp_path) == {"file"}
