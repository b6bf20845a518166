"""offstage-cache: what lies in the cache, what goes, what is damaged; and pruning while jobs run."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.cache.store import Store
from tests.e2e.conftest import Finished, finish, start, wait_for

Run = Callable[..., Finished]
EMBEDDED = Path(__file__).parents[2] / "conf/checkpoints/tiny"
Command = Callable[..., tuple[int, str, str]]
STAGES = ("empty_init", "plan", "shard_load", "dispatch", "generate")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> Command:
    """Return a function that runs offstage-cache in this test's folder: exit code, output, errors."""
    from offstage.pipeline.cache.command import main

    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
            with pytest.raises(SystemExit) as exit_info:
                main(arguments)
        captured = capfd.readouterr()
        return int(exit_info.value.code or 0), captured.out, captured.err

    return run


def artifacts(folder: Path) -> set[str]:
    return {path.parent.parent.name for path in folder.glob("outputs/cache/*/*/manifest.json")}


def test_everything_is_listed_counted_verified_and_pruned(offstage_here: Run, cache: Command, tmp_path: Path) -> None:
    assert offstage_here("generate.max_new_tokens=2").code == 0
    assert all(stage in cache("list")[1] for stage in STAGES)
    assert "all" in cache("du")[1]
    assert "5 artifacts" in cache("verify")[1]
    code, out, _ = cache("prune", "--older-than", "1h")
    assert (code, out) == (0, "removed 0 artifacts (0 bytes)\n")
    assert "would remove 5" in cache("prune", "--max-size", "0B", "--dry-run")[1]
    assert artifacts(tmp_path) == set(STAGES)
    assert "removed 5" in cache("prune", "--max-size", "0B")[1]
    assert artifacts(tmp_path) == set()
    assert offstage_here("generate.max_new_tokens=2").code == 0


def test_old_is_what_was_not_used_for_long(offstage_here: Run, cache: Command, tmp_path: Path) -> None:
    offstage_here("generate.max_new_tokens=2")
    long_ago = time.time() - 40 * 86400
    for folder in tmp_path.glob("outputs/cache/*/*"):
        os.utime(folder, (long_ago, long_ago))
    offstage_here("stop_after=plan")
    cache("prune", "--older-than", "30d")
    assert artifacts(tmp_path) == {"empty_init", "plan"}


def test_damage_is_found_and_set_aside(offstage_here: Run, cache: Command, tmp_path: Path) -> None:
    offstage_here("generate.max_new_tokens=2")
    (path,) = tmp_path.glob("outputs/cache/generate/*/generation.json")
    path.write_text(path.read_text().replace("a", "b", 1))
    code, out, _ = cache("verify")
    assert code == 1
    assert "generation.json doesn't match its hash; set aside as .damaged-" in out
    assert cache("verify")[0] == 0
    assert not offstage_here("generate.max_new_tokens=2").cached["generate"]


@pytest.mark.parametrize(
    "arguments", [(), ("prune", "--older-than", "soon"), ("prune", "--max-size", "9XB"), ("prune",)]
)
def test_what_is_no_command_exits_2(arguments: tuple[str, ...], cache: Command, tmp_path: Path) -> None:
    tmp_path.joinpath("outputs", "cache").mkdir(parents=True)
    assert cache(*arguments)[0] == 2


def test_a_folder_without_a_cache_is_named(cache: Command) -> None:
    code, _, err = cache("du")
    assert code == 2
    assert "outputs/cache: no cache here" in err


@pytest.mark.long_form
def test_what_a_running_job_uses_is_kept(cache: Command, tmp_path: Path) -> None:
    job = start(tmp_path, "max_memory.cpu=1.9MB", "dtype=bfloat16", "generate.max_new_tokens=100")
    wait_for(lambda: list(tmp_path.glob("outputs/cache/dispatch/*/manifest.json")), job)
    (log,) = tmp_path.glob("outputs/**/run.log")
    while job.poll() is None:
        _, out, _ = cache("prune", "--max-size", "0B")
        if "removed 0" not in out:
            assert "generate: ends after" in log.read_text(), "only after the job let go of what it used"
            break
    done = finish(job, tmp_path, {})
    assert done.code == 0, done.err
    stored = tmp_path / "outputs" / "cache" / "offload"
    assert "removed" in cache("prune", "--max-size", "0B")[1]
    assert not list(stored.glob("*/index.json"))


def test_what_was_measured_is_forgotten_in_both_caches_and_measured_again(
    offstage_here: Run, cache: Command, tmp_path: Path
) -> None:
    given = ("generate.max_new_tokens=2",)
    assert offstage_here(*given).code == 0
    here, user = tmp_path / "outputs/cache/hardware/decoding.json", tmp_path / "user/offstage/hardware/decoding.json"
    user.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(here, user)
    code, out, _ = cache("forget")
    assert code == 0
    assert f"removed {user}" in out
    assert not here.exists()
    assert not user.exists()
    assert cache("forget") == (0, "", "")
    assert offstage_here(*given).code == 0
    assert here.exists()


def test_the_users_own_figures_are_forgotten_where_there_are_no_outputs(cache: Command, tmp_path: Path) -> None:
    user = tmp_path / "user/offstage/hardware/decoding.json"
    user.parent.mkdir(parents=True, exist_ok=True)
    user.write_text("{}")
    assert cache("forget")[0] == 0
    assert not user.exists()
    assert not (tmp_path / "outputs").exists()


def test_figures_that_can_t_be_removed_are_named(cache: Command, tmp_path: Path) -> None:
    (tmp_path / "outputs/cache/hardware/decoding.json").mkdir(parents=True)
    code, _, err = cache("forget")
    assert code != 0
    assert "outputs/cache/hardware/decoding.json: can't be removed (Is a directory); remove it by hand" in err


def test_a_bit_flipped_in_an_offload_store_is_found_and_made_again(
    offstage_here: Run, cache: Command, tmp_path: Path
) -> None:
    given = ("dtype=float32", "device_map=disk", "generate.max_new_tokens=2")
    first = offstage_here(*given)
    assert first.code == 0, first.err
    assert cache("verify")[0] == 0
    (path,) = tmp_path.glob("outputs/cache/offload/*/lm_head.weight.dat")
    data = bytearray(path.read_bytes())
    data[-1] ^= 4
    path.write_bytes(data)
    code, out, _ = cache("verify")
    assert code == 1
    assert "tensor 'lm_head.weight' doesn't match its checksum (block 0); set aside as .damaged-" in out
    assert cache("verify")[0] == 0
    shutil.rmtree(tmp_path / "outputs" / "cache" / "generate")
    again = offstage_here(*given)
    assert (again.code, again.tokens) == (0, first.tokens)


def test_damaged_figures_of_the_machine_are_found(offstage_here: Run, cache: Command, tmp_path: Path) -> None:
    offstage_here("stop_after=plan")
    path = tmp_path / "outputs" / "cache" / "hardware" / "decoding.json"
    path.write_text("{")
    code, out, _ = cache("verify")
    assert code == 1
    assert "decoding.json: isn't JSON; set aside" in out
    assert cache("verify")[0] == 0


def test_the_users_own_cache_is_verified_too(cache: Command, tmp_path: Path) -> None:
    tmp_path.joinpath("outputs", "cache").mkdir(parents=True)
    user = tmp_path / "user" / "offstage"
    artifact, _, _ = Store(user).obtain("gguf", "0" * 32, lambda folder: (folder / "config.json").write_text("{}"))
    assert "0 artifacts (0 bytes), 1 artifact (" in cache("verify")[1]
    artifact.path("config.json").write_text("[]")
    code, out, _ = cache("verify")
    assert code == 1
    assert "config.json doesn't match its hash; " in out


READ_ONLY = """
mount --bind outputs/cache outputs/cache && mount -o remount,bind,ro outputs/cache && exec "$@"
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting needs root")
def test_what_a_read_only_cache_keeps_is_said(offstage_here: Run, tmp_path: Path) -> None:
    mounted = ["unshare", "-m", "bash", "-c", READ_ONLY, "bash"]
    assert offstage_here("stop_after=plan").code == 0
    if subprocess.run([*mounted, "true"], cwd=tmp_path, capture_output=True, check=False).returncode:
        pytest.skip("may not mount")
    before = artifacts(tmp_path)
    command = [
        sys.executable,
        "-c",
        "from offstage.pipeline.commands import cache; cache()",
        "prune",
        "--max-size",
        "0B",
    ]
    done = subprocess.run([*mounted, *command], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (5, "removed 0 artifacts (0 bytes)\n"), done.stderr
    assert done.stderr.count("\n") == 1
    assert "2 artifacts" in done.stderr
    assert "may not be written to; change its permissions" in done.stderr
    assert artifacts(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_what_lies_in_folders_without_permission_is_said(offstage_here: Run, cache: Command, tmp_path: Path) -> None:
    assert offstage_here("stop_after=plan").code == 0
    folder = tmp_path / "outputs" / "cache" / "plan"
    folder.chmod(0o555)
    try:
        code, out, err = cache("prune", "--max-size", "0B")
    finally:
        folder.chmod(0o755)
    assert (code, out.startswith("removed 1 artifact ")) == (5, True)
    assert "1 artifact " in err
    assert artifacts(tmp_path) == {"plan"}


def test_a_listing_names_the_model_that_each_artifact_is_of(offstage_here: Run, cache: Command, tmp_path: Path) -> None:
    shutil.copytree(EMBEDDED, tmp_path / "opt-13b")
    given = ("max_memory.cpu=3MB", "dtype=float32", "device_map=disk", "stop_after=shard_load")
    assert offstage_here("model.path=opt-13b", *given).code == 0
    code, out, _ = cache("list", "--json")
    assert code == 0
    listed = {entry["stage"]: entry for entry in json.loads(out)}
    assert {listed[stage]["model"] for stage in ("plan", "shard_load", "offload")} == {str(tmp_path / "opt-13b")}
    plan = listed["plan"]
    assert Path(plan["folder"]) == tmp_path / "outputs" / "cache" / "plan" / plan["key"]
    assert plan["bytes"] == sum(path.stat().st_size for path in Path(plan["folder"]).iterdir())
    assert datetime.fromisoformat(plan["last_used"]).timestamp() == pytest.approx(time.time(), abs=300)
    line = next(line for line in cache("list")[1].splitlines() if line.startswith("shard_load"))
    assert line.split()[:3] == ["shard_load", listed["shard_load"]["key"][:16], "opt-13b"]


def test_an_artifact_from_before_models_were_kept_is_listed_without_one(
    offstage_here: Run, cache: Command, tmp_path: Path
) -> None:
    assert offstage_here("stop_after=empty_init").code == 0
    (manifest,) = tmp_path.glob("outputs/cache/empty_init/*/manifest.json")
    content = json.loads(manifest.read_text())
    del content["model"]
    manifest.write_text(json.dumps(content))
    assert json.loads(cache("list", "--json")[1])[0]["model"] is None
    assert cache("verify")[0] == 0
