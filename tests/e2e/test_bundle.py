"""Runs that are given away: whoever unpacks the archive elsewhere replays them with a copy of the weights."""

import json
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.report.bundle import bundle
from offstage.pipeline.report.command import run as report
from tests.e2e.conftest import Finished, Replay, record_of, records_in

EMBEDDED = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
SHORT = ("generate.max_new_tokens=3", "max_memory.cpu=3MB")
Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, described: Path) -> Path:
    """The folder of somebody's run, with a checkpoint and prompts of their own."""
    folder = tmp_path_factory.mktemp("project")
    shutil.copytree(EMBEDDED, folder / "checkpoint")
    folder.joinpath("prompts.txt").write_text("The model\nA tensor\n")
    named = (f"model.path={folder / 'checkpoint'}", f"generate.prompts_file={folder / 'prompts.txt'}")
    record_of(folder, described, *named, *SHORT)
    return folder


@pytest.fixture(scope="module")
def archive(project: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundle of that run."""
    target = tmp_path_factory.mktemp("sent") / "run.tar.gz"
    assert report(["--bundle", str(next(iter(records_in(project))).parent), "--output", str(target)]) == 0
    return target


def unpack(archive: Path, folder: Path) -> None:
    """Unpack ``archive`` in ``folder`` as its receiver does: Python before 3.11.4 has no filter of its own for it."""
    folder.mkdir(exist_ok=True)
    subprocess.run(["tar", "-xzf", str(archive), "-C", str(folder)], check=True)


def unpacked(archive: Path, folder: Path) -> Path:
    """Return the one run that ``archive`` holds, unpacked in ``folder``."""
    unpack(archive, folder)
    (run,) = (folder / "bundle" / "records").iterdir()
    return run


def moved_away(project: Path, weights: Path) -> None:
    """Copy the checkpoint to ``weights``, with other times, and take the project away."""
    shutil.copytree(project / "checkpoint", weights)
    for file in weights.iterdir():
        os.utime(file, ns=(1, 1))
    project.rename(project.with_name("away"))


@pytest.fixture
def as_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user's key, so that the records are a stranger's; of the copies of the weights there are no looks yet."""
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))


@pytest.mark.usefixtures("as_another_user")
def test_another_user_replays_it_in_another_folder_with_a_copy_of_the_weights(
    project: Path, archive: Path, replay: Replay, tmp_path: Path
) -> None:
    run = unpacked(archive, tmp_path)
    moved_away(project, tmp_path / "weights")
    try:
        code, out, err = replay(run)
        assert (code, out) == (2, "")
        assert f"model.path: {str(project / 'checkpoint')!r} isn't here; say where it is by --model-path FOLDER" in err
        code, out, err = replay(run, "--model-path", tmp_path / "weights")
        assert code == 0, err
        assert "tokens    the same" in out
        assert list(tmp_path.glob("outputs/runs/*/*/run.json")), "in the folder of whoever replays"
    finally:
        project.with_name("away").rename(project)


@pytest.mark.usefixtures("as_another_user")
def test_other_weights_are_named(project: Path, archive: Path, replay: Replay, tmp_path: Path) -> None:
    shutil.copytree(project / "checkpoint", tmp_path / "weights")
    shard = next((tmp_path / "weights").glob("*.safetensors"))
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    code, _, err = replay(unpacked(archive, tmp_path), "--model-path", tmp_path / "weights")
    assert code == 2
    assert f"{shard.name}: model." in err or f"{shard.name}: lm_head" in err, err


def test_it_holds_what_reproduces_the_run_and_no_weights(project: Path, archive: Path, tmp_path: Path) -> None:
    run = unpacked(archive, tmp_path)
    names = {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()}
    prompts = "inputs/generate.prompts_file/prompts.txt"
    assert names == {"run.json", "weights.json", "run.log", prompts, ".hydra/config.yaml", ".hydra/overrides.yaml"}
    assert not [name for name in names if name.endswith((".safetensors", ".bin"))]
    top = run.parents[1]
    lock = top.joinpath("requirements.lock.txt").read_text()
    assert "torch==" in lock
    assert all("+" not in line.partition("#")[0] for line in lock.splitlines()), "no index has a local version"
    assert "offstage-pipeline" not in lock
    readme = top.joinpath("README.md").read_text()
    assert f"offstage-replay records/{run.name} --model-path FOLDER" in readme
    assert json.loads(top.joinpath("report/report.json").read_text())["jobs"]


def test_its_bytes_follow_from_the_runs(project: Path, archive: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.tar.gz"
    report(["--bundle", str(next(iter(records_in(project))).parent), "--output", str(again)])
    assert again.read_bytes() == archive.read_bytes()
    with tarfile.open(again) as packed:
        assert {entry.mtime for entry in packed} == {0}


def test_names_and_passwords_stay_at_home(project: Path, tmp_path: Path) -> None:
    (path,) = records_in(project)
    record = json.loads(path.read_text())
    record["config"]["tracker"]["uri"] = "https://ann:geheim@store.example/x"
    record["overrides"].append("tracker.uri=https://ann:geheim@store.example/x")
    shutil.copytree(path.parent, tmp_path / "run")
    tmp_path.joinpath("run", "run.json").write_text(json.dumps(record))
    bundle([tmp_path / "run" / "run.json"], {}, tmp_path / "x.tar.gz")
    run = unpacked(tmp_path / "x.tar.gz", tmp_path)
    assert all(b"geheim" not in file.read_bytes() for file in run.parents[1].rglob("*") if file.is_file())
    assert "https://store.example/x" in run.joinpath("run.json").read_text()


def test_what_no_bundle_can_be_made_of_is_refused(project: Path, tmp_path: Path) -> None:
    (path,) = records_in(project)
    record = json.loads(path.read_text())
    for name, change in {
        "running": {"status": "running"},
        "cached": {"packages": {}},
        "other": {"packages": {**record["packages"], "numpy": "0.1"}},
    }.items():
        tmp_path.joinpath(name).mkdir()
        tmp_path.joinpath(name, "run.json").write_text(json.dumps({**record, **change}))
    target = tmp_path / "x.tar.gz"
    with pytest.raises(ConfigError, match="the run is running"):
        bundle([tmp_path / "running/run.json"], {}, target)
    with pytest.raises(ConfigError, match="give the run that computed it"):
        bundle([tmp_path / "cached/run.json"], {}, target)
    with pytest.raises(ConfigError, match=r"was made with numpy 0\.1"):
        bundle([path, tmp_path / "other/run.json"], {}, target)
    with pytest.raises(ConfigError, match=r"ends with \.tar\.gz"):
        bundle([path], {}, tmp_path / "x.zip")
    with pytest.raises(ConfigError, match="given twice"):
        bundle([path, path], {}, target)
    assert not target.exists()


@pytest.mark.long_form
@pytest.mark.usefixtures("as_another_user")
def test_a_whole_sweep_is_given_away(offstage_here: Run, replay: Replay, tmp_path: Path) -> None:
    done = offstage_here("-m", "max_memory.cpu=3MB,8MB", "generate.max_new_tokens=2")
    assert done.code == 0, done.err
    target = tmp_path / "sweep.tar.gz"
    (sweep,) = tmp_path.glob("outputs/multirun/*/*")
    assert report(["--bundle", str(sweep), "--output", str(target)]) == 0
    unpack(target, tmp_path / "there")
    runs = sorted((tmp_path / "there/bundle/records").iterdir())
    assert [json.loads((run / "run.json").read_text())["memory"]["budget"]["cpu"] for run in runs] == [
        3 * 10**6,
        8 * 10**6,
    ]
    code, out, err = replay(runs[1])
    assert code == 0, err
    assert "tokens    the same" in out, "the embedded model is where offstage is"


def test_a_stranger_s_record_has_no_file_of_mine_given_away(project: Path, tmp_path: Path) -> None:
    (path,) = records_in(project)
    record = json.loads(path.read_text())
    tmp_path.joinpath("secret.txt").write_text("mine\n")
    record["config"]["generate"]["prompts_file"] = str(tmp_path / "secret.txt")
    tmp_path.joinpath("run").mkdir()
    tmp_path.joinpath("run", "run.json").write_text(json.dumps(record))
    bundle([tmp_path / "run" / "run.json"], {}, tmp_path / "x.tar.gz")
    run = unpacked(tmp_path / "x.tar.gz", tmp_path)
    assert [file.name for file in run.iterdir()] == ["run.json"]
