from __future__ import annotations

import errno
import json
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock, SoftFileLock

from pipeline.cache import manifest, store
from pipeline.cache.store import Store
from pipeline.errors import CheckpointError, StorageError

REPOSITORY = Path(__file__).parents[3]
KEY = "0123456789abcdef" * 4
CONTENT = {"answer.json": b'{"answer": 42}', "shards/0.bin": b"x" * 5000}


def write(folder: Path) -> str:
    for name, content in CONTENT.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return "live half"


def never(folder: Path) -> str:
    raise AssertionError("built again")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "cache"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks."""

    class Refusing(FileLock):
        def acquire(self, *arguments: object, **options: object) -> object:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(store, "FileLock", Refusing)


def names(folder: Path) -> list[str]:
    """Everything in ``folder`` but lock files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def assert_right(root: Path, key: str = KEY) -> None:
    artifact = Store(root).find("plan", key)
    assert artifact is not None
    assert {name: artifact.path(name).read_bytes() for name in artifact.files} == CONTENT


# Building and finding


def test_what_is_not_there_is_not_found(root: Path) -> None:
    assert Store(root).find("plan", KEY) is None
    assert not root.exists()


def test_an_artifact_is_built_once_and_found_afterwards(root: Path) -> None:
    artifact, made, cached = Store(root).obtain("plan", KEY, write)
    assert (made, cached) == ("live half", False)
    assert artifact.folder == root / "plan" / KEY
    assert artifact.json("answer.json") == {"answer": 42}
    again, made_again, cached_again = Store(root).obtain("plan", KEY, never)
    assert (again, made_again, cached_again) == (artifact, None, True)
    assert Store(root).find("plan", KEY) == artifact
    assert names(root / "plan") == [KEY]


def test_the_manifest_lists_size_and_hash_of_every_file(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    data = json.loads((artifact.folder / "manifest.json").read_text())
    assert (data["schema_version"], data["stage"], data["key"]) == (1, "plan", KEY)
    assert {name: entry["size"] for name, entry in data["files"].items()} == {
        name: len(content) for name, content in CONTENT.items()
    }
    assert artifact.digest("answer.json") == data["files"]["answer.json"]["sha256"]


def test_every_file_reaches_the_disk_before_the_manifest_and_the_manifest_before_the_rename(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def seen_fsync(descriptor: int) -> None:
        steps.append(Path(f"/proc/self/fd/{descriptor}").readlink().name.partition(".json")[0])
        fsync(descriptor)

    def seen_rename(path: Path, target: Path) -> Path:
        steps.append("rename")
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(Path, "rename", seen_rename)
    Store(root).obtain("plan", KEY, write)
    folder = next(step for step in steps if step.startswith(".tmp-"))
    assert steps == ["answer", "shards", "0.bin", ".manifest", folder, "rename", "plan"]


@pytest.mark.parametrize("part", ["", "../x", "a/b", ".hidden"])
def test_a_name_that_leads_elsewhere_is_refused(root: Path, part: str) -> None:
    for stage, key in ((part, KEY), ("plan", part)):
        with pytest.raises(ValueError, match="can't name a folder"):
            Store(root).find(stage, key)


# What goes wrong while building


@pytest.mark.parametrize("error", [ValueError("x"), KeyboardInterrupt(), SystemExit(3), CheckpointError("x")])
def test_a_build_that_raises_leaves_nothing_and_can_be_tried_again(root: Path, error: BaseException) -> None:
    def fail(folder: Path) -> None:
        write(folder)
        raise error

    with pytest.raises(type(error)) as raised:
        Store(root).obtain("plan", KEY, fail)
    assert raised.value is error
    assert names(root / "plan") == []
    assert Store(root).obtain("plan", KEY, write)[2] is False


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.ENOSPC, ["No space left", "free some space", "set outputs"]),
        (errno.EDQUOT, ["quota", "free some space"]),
    ],
)
def test_a_full_disk_is_an_error_that_says_what_to_do(root: Path, number: int, words: list[str]) -> None:
    def fail(folder: Path) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(StorageError) as raised:
        Store(root).obtain("plan", KEY, fail)
    for word in [str(root / "plan"), *words]:
        assert word in str(raised.value)
    assert names(root / "plan") == []


def test_an_error_about_a_file_outside_the_cache_passes_as_it_is(root: Path, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as raised:
        Store(root).obtain("plan", KEY, lambda folder: (tmp_path / "checkpoint.bin").read_bytes())
    assert not isinstance(raised.value, StorageError)


def test_an_error_about_a_file_inside_the_cache_names_the_folder(root: Path) -> None:
    with pytest.raises(StorageError, match=r"No such file.*set outputs"):
        Store(root).obtain("plan", KEY, lambda folder: (folder / "missing" / "x").write_text(""))


@pytest.mark.parametrize("place", ["outputs", "outputs/cache", "outputs/cache/plan"])
def test_a_file_in_the_place_of_a_folder_is_an_error_that_says_what_to_do(
    root: Path, tmp_path: Path, place: str
) -> None:
    (tmp_path / place).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / place).write_text("")
    with pytest.raises(StorageError, match=r"plan: .*move it away"):
        Store(root).obtain("plan", KEY, never)
    Store(root).sweep()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_that_cannot_be_written_to_is_an_error_that_says_what_to_do(root: Path) -> None:
    root.mkdir(parents=True)
    root.chmod(0o500)
    with pytest.raises(StorageError, match=r"plan: Permission denied; change its permissions"):
        Store(root).obtain("plan", KEY, never)


def link(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/hostname")


def own_manifest(folder: Path) -> None:
    (folder / "manifest.json").write_text("{}")


@pytest.mark.parametrize(("wrong", "word"), [(link, "link"), (own_manifest, "manifest.json")])
def test_an_artifact_holds_plain_files_only(root: Path, wrong: Callable[[Path], None], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        Store(root).obtain("plan", KEY, wrong)
    assert names(root / "plan") == []


# Damage


def edit(**changes: object) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "manifest.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))

    return apply


def flip(folder: Path) -> None:
    path = folder / "shards" / "0.bin"
    path.write_bytes(b"y" + path.read_bytes()[1:])


def cut(name: str) -> Callable[[Path], None]:
    return lambda folder: os.truncate(folder / name, 30 if name == "manifest.json" else 4)


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace_by_link(folder: Path) -> None:
    (folder / "answer.json").rename(folder.parent / "elsewhere")
    (folder / "answer.json").symlink_to(folder.parent / "elsewhere")


def replace_by_folder(folder: Path) -> None:
    (folder / "answer.json").unlink()
    (folder / "answer.json").mkdir()


def empty(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


def replace_by_file(folder: Path) -> None:
    empty(folder)
    folder.rmdir()
    folder.write_text("not a folder")


ENTRY = {"size": 0, "sha256": "0" * 64}
DAMAGES = [
    (flip, "shards/0.bin doesn't match its hash"),
    (cut("shards/0.bin"), "shards/0.bin has 4 bytes instead of 5000"),
    (remove("answer.json"), "answer.json is missing"),
    (replace_by_link, "answer.json isn't a file"),
    (replace_by_folder, "answer.json isn't a file"),
    (cut("manifest.json"), "manifest.json isn't JSON"),
    (lambda folder: os.truncate(folder / "manifest.json", 0), "manifest.json isn't JSON"),
    (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe"), "manifest.json isn't JSON"),
    (lambda folder: (folder / "manifest.json").write_text("[" * 100_000), "manifest.json isn't JSON"),
    (lambda folder: (folder / "manifest.json").write_text("[1]"), "manifest.json lacks a field"),
    (remove("manifest.json"), "manifest.json is missing"),
    (edit(files=None), "manifest.json lacks a field"),
    (edit(key="f" * 64), "key ffff"),
    (edit(stage="generate"), "stage generate"),
    (edit(schema_version=2), "version 2"),
    (edit(files={"answer.json": {"size": 1}}), "wrong entry for 'answer.json'"),
    (edit(files={"answer.json": {"size": "14", "sha256": ""}}), "wrong entry for 'answer.json'"),
    (edit(files={"../../secret": ENTRY}), "wrong entry for '../../secret'"),
    (edit(files={"/etc/hostname": ENTRY}), "wrong entry for '/etc/hostname'"),
    (empty, "manifest.json is missing"),
    (replace_by_file, "manifest.json is missing"),
]


@pytest.mark.parametrize(("damage", "words"), DAMAGES)
def test_a_damaged_artifact_is_set_aside_with_a_warning_and_built_again(
    root: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[Path], None], words: str
) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    damage(artifact.folder)
    assert Store(root).find("plan", KEY) is None
    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert warning.name == "offstage"
    for word in (str(artifact.folder), words, ".damaged-"):
        assert word in warning.getMessage()
    assert any(name.startswith(".damaged-") for name in names(root / "plan"))
    assert Store(root).obtain("plan", KEY, write)[2] is False
    assert_right(root)


def test_of_a_large_file_the_size_is_compared_and_not_the_hash(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    flip(artifact.folder)
    monkeypatch.setattr(manifest, "REHASH_BYTES", 1000)
    assert Store(root).find("plan", KEY) is not None
    cut("shards/0.bin")(artifact.folder)
    assert Store(root).find("plan", KEY) is None


def test_a_damaged_artifact_that_another_process_is_mending_is_left_to_it(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    flip(artifact.folder)
    with FileLock(root / "plan" / f".{KEY}.lock"):
        assert Store(root).find("plan", KEY) is None
    assert names(root / "plan") == [KEY]


# Without locks


def test_the_slower_of_two_builds_takes_the_artifact_of_the_faster(root: Path, no_locks: None) -> None:
    def overtaken(folder: Path) -> str:
        (folder / "slow").write_text("slow")
        Store(root).obtain("plan", KEY, write)
        return "mine"

    artifact, made, cached = Store(root).obtain("plan", KEY, overtaken)
    assert (made, cached) == ("mine", False)
    assert set(artifact.files) == set(CONTENT)
    assert names(root / "plan") == [KEY]
    assert_right(root)


def test_a_build_that_finds_rubbish_in_its_place_sets_it_aside(root: Path, no_locks: None) -> None:
    def obstructed(folder: Path) -> None:
        write(folder)
        (root / "plan" / KEY).mkdir()
        (root / "plan" / KEY / "rubbish").write_text("")

    assert Store(root).obtain("plan", KEY, obstructed)[2] is False
    assert len(names(root / "plan")) == 2
    assert_right(root)


def test_an_artifact_that_was_mended_since_it_was_judged_is_left_alone(
    root: Path, no_locks: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Store(root).obtain("plan", KEY, write)[0].folder
    flip(folder)
    verify, calls = manifest.verify, 0

    def mended_meanwhile(*arguments: Path, **options: str) -> object:
        nonlocal calls
        calls += 1
        try:
            return verify(*arguments, **options)
        finally:
            if calls == 2:  # the verdict has been reached, and isn't acted on yet
                monkeypatch.setattr(store, "verify", verify)
                Store(root).obtain("plan", KEY, write)

    monkeypatch.setattr(store, "verify", mended_meanwhile)
    Store(root).find("plan", KEY)
    assert_right(root)
    assert len(names(root / "plan")) == 2


def test_a_stand_in_lock_that_a_killed_process_left_is_not_waited_for(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "FileLock", SoftFileLock)
    (root / "plan").mkdir(parents=True)
    held, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        with SoftFileLock(root / "plan" / f".{KEY}.lock"):
            held.set()
            go_on.wait(5)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(5)
    assert Store(root).obtain("plan", KEY, write)[2] is False
    assert holder.is_alive()
    go_on.set()
    holder.join()


# Many processes

PROGRAM = """
import errno, json, os, random, sys, time
from pathlib import Path
from pipeline.cache import store

root, locks, keys, count = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

class Lock(store.FileLock):
    def acquire(self, *arguments, **options):
        if locks == "refused":
            raise OSError(errno.ENOLCK, "No locks available")
        if locks == "works":
            return super().acquire(*arguments, **options)

store.FileLock = Lock

def write(folder):
    (folder / "who.json").write_text(str(os.getpid()))
    with (root.parent / "builds").open("a") as log:
        log.write(folder.parent.name + "\\n")
    time.sleep(0.3 if len(keys) == 1 else 0.01)
    (folder / "filler.bin").write_bytes(os.urandom(100_000))

random.shuffle(keys)
(root.parent / f"ready-{os.getpid()}").touch()
while len(list(root.parent.glob("ready-*"))) < count:
    time.sleep(0.001)
found = {key: store.Store(root).obtain("plan", key, write)[0].json("who.json") for key in keys}
sys.stdout.write(json.dumps(found))
"""


def run_together(root: Path, *, locks: str, keys: list[str], count: int = 8) -> list[dict[str, int]]:
    command = [sys.executable, "-c", PROGRAM, str(root), locks, json.dumps(keys), str(count)]
    processes = [
        subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(count)
    ]
    results = [(process.communicate(timeout=60), process.returncode) for process in processes]
    assert [code for _, code in results] == [0] * count, [errors for (_, errors), _ in results]
    return [json.loads(output) for (output, _), _ in results]


@pytest.mark.parametrize("locks", ["works", "refused", "granted to all"])
def test_eight_processes_that_want_one_key_all_get_the_same_artifact(root: Path, locks: str) -> None:
    root.mkdir(parents=True)
    results = run_together(root, locks=locks, keys=[KEY])
    assert len({result[KEY] for result in results}) == 1
    builds = (root.parent / "builds").read_text().splitlines()
    assert len(builds) == 1 if locks == "works" else len(builds) > 1
    assert names(root / "plan") == [KEY]


@pytest.mark.parametrize("locks", ["works", "refused"])
def test_eight_processes_that_want_many_keys_all_get_the_same_artifacts(root: Path, locks: str) -> None:
    root.mkdir(parents=True)
    keys = [f"{number:064x}" for number in range(12)]
    results = run_together(root, locks=locks, keys=keys)
    assert all(result == results[0] for result in results)
    if locks == "works":
        assert len((root.parent / "builds").read_text().splitlines()) == len(keys)
    assert names(root / "plan") == keys


def test_a_process_that_waits_for_another_says_so_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slowly(folder: Path) -> str:
        started.set()
        go_on.wait(10)
        return write(folder)

    builder = threading.Thread(target=lambda: Store(root).obtain("plan", KEY, slowly))
    with caplog.at_level(logging.INFO, logger="offstage"):
        builder.start()
        started.wait(10)
        threading.Timer(0.3, go_on.set).start()
        _, made, cached = Store(root).obtain("plan", KEY, never)
    builder.join()
    assert (made, cached) == (None, True)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "waiting for another process that builds plan" in message


# Kills

KILLED_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path
from pipeline.cache.store import Store

CHANGES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree"}

def write(folder):
    (folder / "shards").mkdir()
    (folder / "answer.json").write_bytes(b'{"answer": 42}')
    (folder / "shards" / "0.bin").write_bytes(b"x" * 5000)

def build_until(step, root):
    steps = 0
    def die_at_step(event, arguments):
        nonlocal steps
        steps += event in CHANGES
        if steps == step:
            signal.raise_signal(signal.SIGKILL)
    sys.addaudithook(die_at_step)
    Store(root).obtain("plan", sys.argv[2], write)
    os._exit(0)

status, step = 1, 0
while status:
    step += 1
    child = os.fork()
    if child == 0:
        build_until(step, Path(sys.argv[1], str(step)))
    status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) in (0, -signal.SIGKILL)
sys.stdout.write(str(step))
"""


def test_a_kill_at_any_step_of_a_build_leaves_a_cache_that_works(tmp_path: Path) -> None:
    command = [sys.executable, "-c", KILLED_AT_EACH_STEP, str(tmp_path), KEY]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True)
    steps = int(run.stdout)
    built = 0
    for step in range(1, steps + 1):
        root = tmp_path / str(step)
        _, _, cached = Store(root).obtain("plan", KEY, write)
        built += not cached
        assert_right(root)
        Store(root).sweep(older_than_seconds=-60)
        assert [path.name for path in (root / "plan").iterdir()] == [KEY]
    assert steps > 10
    assert 10 < built < steps


BUILDING_FOREVER = """
import os, sys, itertools
from pathlib import Path
from pipeline.cache.store import Store

def write(folder):
    (folder / "shards").mkdir()
    (folder / "answer.json").write_bytes(b'{"answer": 42}')
    with (folder / "shards" / "0.bin").open("wb") as file:
        for _ in range(50):
            file.write(b"x" * 100)
            file.flush()

for number in itertools.count(int(sys.argv[2])):
    sys.stdout.write("\\n")
    sys.stdout.flush()
    Store(Path(sys.argv[1])).obtain("plan", f"{number:064x}", write)
"""


def test_kills_at_random_moments_leave_a_cache_that_works(root: Path) -> None:
    for attempt in range(6):
        command = [sys.executable, "-c", BUILDING_FOREVER, str(root), str(attempt * 1000)]
        with subprocess.Popen(command, cwd=REPOSITORY, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            time.sleep(random.uniform(0.0, 0.1))
            process.send_signal(signal.SIGKILL)
            seen = 1 + process.stdout.read().count(b"\n")
        for number in range(seen):
            key = f"{attempt * 1000 + number:064x}"
            _, _, cached = Store(root).obtain("plan", key, write)
            assert cached or number == seen - 1
            assert_right(root, key)


# The sweep


def aged(path: Path, *, days: float) -> None:
    moment = time.time() - days * 86400
    for each in (path, *path.rglob("*")):
        os.utime(each, (moment, moment))


@pytest.mark.parametrize("name", [".tmp-1", ".damaged-1", f".{KEY}.lock"])
def test_leftovers_are_swept_once_they_are_a_day_old(root: Path, name: str) -> None:
    path = root / "plan" / name
    path.parent.mkdir(parents=True)
    if name.endswith(".lock"):
        path.touch()
    else:
        (path / "shards").mkdir(parents=True)
        (path / "shards" / "0.bin").write_text("")
    aged(path, days=0.9)
    Store(root).sweep()
    assert path.exists()
    aged(path, days=1.1)
    Store(root).sweep()
    assert not path.exists()


def test_a_folder_in_which_something_is_new_is_not_swept(root: Path) -> None:
    folder = root / "plan" / ".tmp-1"
    folder.mkdir(parents=True)
    (folder / "old").write_text("")
    (folder / "new").write_text("")
    aged(folder, days=2)
    os.utime(folder / "new")
    Store(root).sweep()
    assert folder.exists()


def test_artifacts_and_what_else_lies_there_are_never_swept(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    (root / "plan" / ".keep").write_text("")
    aged(root, days=400)
    Store(root).sweep()
    assert artifact.folder.exists()
    assert (root / "plan" / ".keep").exists()


def test_an_old_artifact_that_was_set_aside_today_is_kept_for_a_day(root: Path) -> None:
    artifact, _, _ = Store(root).obtain("plan", KEY, write)
    flip(artifact.folder)
    aged(artifact.folder, days=400)
    assert Store(root).find("plan", KEY) is None
    Store(root).sweep()
    assert [name[:9] for name in names(root / "plan")] == [".damaged-"]


def test_a_lock_that_is_held_is_not_swept(root: Path) -> None:
    path = root / "plan" / f".{KEY}.lock"
    path.parent.mkdir(parents=True)
    with FileLock(path):
        aged(path, days=2)
        Store(root).sweep()
        assert path.exists()
    aged(path, days=2)
    Store(root).sweep()
    assert not path.exists()


def test_a_sweep_of_a_cache_that_is_not_there_does_nothing(root: Path) -> None:
    Store(root).sweep()
    assert not root.exists()
