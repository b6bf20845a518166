from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from offstage.pipeline import environment as module
from offstage.pipeline.environment import environment, git_commit, has_accelerator_driver

REPOSITORY = Path(__file__).parents[2]
PROJECT = '[project]\nname = "offstage-pipeline"\n'


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@x"]
    command = ["git", *identity, *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    if shutil.which("git") is None:
        pytest.skip("needs git")
    folder = tmp_path / "checkout"
    folder.mkdir()
    (folder / "pyproject.toml").write_text(PROJECT)
    git(folder, "init", "--quiet", "--initial-branch=main")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message=first")
    return folder


def test_the_environment_has_every_field_of_the_design() -> None:
    content = environment()
    assert sorted(content) == [
        "accelerate",
        "accelerators",
        "core_quota",
        "cores",
        "cores_allowed",
        "cpu",
        "git_commit",
        "git_dirty",
        "hydra",
        "jobs_beside",
        "memory_bytes",
        "memory_limit_bytes",
        "numpy",
        "offstage",
        "omegaconf",
        "peft",
        "platform",
        "python",
        "repository",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    ]
    assert content["python"] == ".".join(map(str, sys.version_info[:3]))
    # Torch itself says what it is built for, which a wheel of PyPI's own version leaves out.
    torch_version = pytest.importorskip("torch").__version__
    assert content["torch"] in (torch_version, torch_version.partition("+")[0])
    assert content["hydra"] == pytest.importorskip("hydra").__version__
    assert 1 <= content["cores_allowed"] <= content["cores"]
    assert content["memory_bytes"] > 2**28
    assert content["cpu"]
    assert json.loads(json.dumps(content)) == content


def test_a_package_that_is_not_installed_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module._DISTRIBUTIONS, "torch", "no-such-distribution")
    assert environment()["torch"] is None


def test_a_machine_without_a_driver_has_no_accelerators_and_torch_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(module, "_DRIVERS", (tmp_path / "nvidiactl",))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert environment()["accelerators"] == []


@pytest.mark.parametrize("device", ["nvidiactl", "kfd", "dxg"])
def test_each_driver_is_known_by_its_device_file_wsl2s_too(device: str, tmp_path: Path) -> None:
    assert not has_accelerator_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev" / device).touch()
    assert has_accelerator_driver(tmp_path)


def test_a_driver_without_a_torch_that_can_use_it_gives_no_accelerators(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "nvidiactl").touch()
    monkeypatch.setattr(module, "_DRIVERS", (tmp_path / "nvidiactl",))
    monkeypatch.setitem(sys.modules, "torch", None)
    assert environment()["accelerators"] == []


def test_the_name_of_the_cpu_is_the_model_name_where_the_system_tells(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    assert module._cpu(cpuinfo)
    cpuinfo.write_text("processor\t: 0\nmodel name\t: A Fast One @ 5GHz\n")
    assert module._cpu(cpuinfo) == "A Fast One @ 5GHz"


def on_a_branch(checkout: Path) -> None:
    """Leave the checkout as it is."""


def packed(checkout: Path) -> None:
    git(checkout, "pack-refs", "--all")


def detached(checkout: Path) -> None:
    git(checkout, "checkout", "--quiet", "--detach")


@pytest.mark.parametrize("state", [on_a_branch, packed, detached])
def test_the_commit_is_the_one_that_git_names(checkout: Path, state: Callable[[Path], None]) -> None:
    state(checkout)
    assert git_commit(checkout) == git(checkout, "rev-parse", "HEAD")


@pytest.mark.parametrize("state", [on_a_branch, packed])
def test_a_worktree_has_its_own_commit(checkout: Path, state: Callable[[Path], None]) -> None:
    worktree = checkout.parent / "worktree"
    git(checkout, "worktree", "add", "--quiet", "-b", "other", str(worktree))
    git(worktree, "commit", "--quiet", "--allow-empty", "--message=second")
    state(checkout)
    assert git_commit(worktree) == git(worktree, "rev-parse", "HEAD") != git_commit(checkout)


def in_a_folder_of_another_checkout(checkout: Path) -> Path:
    packages = checkout / "site-packages"
    packages.mkdir()
    return packages


def beside_the_git_folder_of_another_project(checkout: Path) -> Path:
    (checkout / "pyproject.toml").write_text('[project]\nname = "other"\ndependencies = ["offstage-pipeline"]\n')
    return checkout


def without_git(checkout: Path) -> Path:
    shutil.rmtree(checkout / ".git")
    return checkout


def with_a_broken_git(checkout: Path) -> Path:
    (checkout / ".git" / "HEAD").write_bytes(b"\xff\xfe")
    return checkout


def before_the_first_commit(checkout: Path) -> Path:
    git(without_git(checkout), "init", "--quiet")
    return checkout


@pytest.mark.parametrize(
    "place",
    [
        in_a_folder_of_another_checkout,
        beside_the_git_folder_of_another_project,
        without_git,
        with_a_broken_git,
        before_the_first_commit,
    ],
)
def test_no_commit_is_named_that_is_not_of_offstage(checkout: Path, place: Callable[[Path], Path]) -> None:
    assert git_commit(place(checkout)) is None


def test_a_run_without_accelerators_imports_no_model_code_for_its_record_cache_and_monitor(tmp_path: Path) -> None:
    program = f"""
import sys
from pathlib import Path
from offstage.pipeline import environment as module
from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.cache.store import Store
from offstage.pipeline.memory_monitor import MemoryMonitor
from offstage.pipeline.record import RunRecord
module._DRIVERS = ()
folder = Path({str(tmp_path)!r})
with MemoryMonitor() as monitor:
    RunRecord.start(folder, overrides=[], config={{}}, environment=module.environment()).finish("completed")
    Store(folder).obtain("plan", fingerprint(1), lambda folder: (folder / "x").write_text(""))
    monitor.stage_peak()
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules])
"""
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"
