"""Where what a record names lies now: moved with its project, beside it, or said on the command line."""

import json
import shutil
from pathlib import Path

import pytest

from tests.e2e.conftest import Replay, record_of, records_in

EMBEDDED = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, described: Path) -> Path:
    """The folder of a planned run, with all that it names below it."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(EMBEDDED, folder / "checkpoint")
    folder.joinpath("prompts.txt").write_text("The model\n")
    named = (f"model.path={folder / 'checkpoint'}", f"generate.prompts_file={folder / 'prompts.txt'}")
    path = record_of(folder, described, *named, "stop_after=plan", "max_memory.cpu=3MB")
    record = json.loads(path.read_text())
    record["places"]["folder"] = str(folder)  # as if it were started there
    path.write_text(json.dumps(record))
    return folder


@pytest.fixture
def moved(project: Path, tmp_path: Path) -> Path:
    """The same somewhere else, the original gone; the run in it."""
    copy = tmp_path / "moved"
    shutil.copytree(project, copy)
    path = next(iter(records_in(copy)))
    text = path.read_text().replace(str(project), str(project.with_name("gone")))
    path.write_text(text)
    return path.parent


def replayed(folder: Path) -> dict[str, object]:
    """Return the config of the latest replay in ``folder``."""
    config: dict[str, object] = list(records_in(folder).values())[-1]["config"]
    return config


def test_a_project_that_was_moved_as_a_whole_is_found(moved: Path, replay: Replay, tmp_path: Path) -> None:
    code, out, err = replay(moved, "--outputs", tmp_path / "outputs")
    assert code == 2
    assert f"--trust={tmp_path / 'moved' / 'checkpoint'}" in err, "it was changed by somebody, and lies beside the run"
    words = [f"--trust={tmp_path / 'moved' / name}" for name in ("checkpoint", "prompts.txt")]
    code, out, err = replay(moved, "--outputs", tmp_path / "outputs", *words)
    assert code == 0, err
    assert "plan      the same" in out
    config = replayed(tmp_path)
    assert config["model"]["path"] == str(tmp_path / "moved" / "checkpoint")  # type: ignore[index]


def test_what_is_given_is_trusted_and_taken(moved: Path, replay: Replay, project: Path, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "moved" / "checkpoint")
    (tmp_path / "moved" / "prompts.txt").unlink()
    given = ("--model-path", project / "checkpoint", "--set", f"prompts_file={project / 'prompts.txt'}")
    code, out, err = replay(moved, "--outputs", tmp_path / "outputs", *given)
    assert code == 0, err
    assert "plan      the same" in out


def test_what_is_nowhere_is_named_with_the_option_that_gives_it(moved: Path, replay: Replay, tmp_path: Path) -> None:
    shutil.rmtree(tmp_path / "moved" / "checkpoint")
    (tmp_path / "moved" / "prompts.txt").unlink()
    code, out, err = replay(moved)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "/gone/checkpoint' isn't here; say where it is by --model-path FOLDER" in err
    assert "prompts.txt' isn't here; say where it is by --set generate.prompts_file=PATH" in err


@pytest.mark.parametrize("setting", ["seed=3", "outputs=/tmp/x", "prompt_file=/tmp/x", "prompts_file", "texts_file=/x"])
def test_only_places_that_are_read_can_be_set(moved: Path, replay: Replay, setting: str) -> None:
    code, out, err = replay(moved, "--set", setting)
    assert (code, out) == (2, "")
    assert f"--set {setting!r}: a place belongs here, as KEY=PATH" in err
    assert "generate.prompts_file" in err
