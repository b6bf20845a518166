"""Pruning and verifying, also while other processes read and build."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from offstage.pipeline.cache.housekeeping import CacheEntry, choose, entries, find_damage, prune, set_aside
from offstage.pipeline.cache.locks import SHARED, Leases, lease_path, sole_use
from offstage.pipeline.cache.store import Store

REPOSITORY = Path(__file__).parents[3]
KEY = "a" * 64


def write(folder: Path) -> None:
    folder.joinpath("answer.json").write_text('{"answer": 42}')


def entry(name: str, size: int, used: float, stage: str = "plan") -> CacheEntry:
    return CacheEntry(stage, name, Path("cache", stage, name), size, used)


@pytest.mark.parametrize(
    ("older_than", "most", "expected"),
    [
        (None, None, []),
        (50, None, ["old"]),
        (None, 5, ["old", "middle"]),
        (None, 6, ["old"]),
        (None, 0, ["old", "middle", "new"]),
        (50, 6, ["old"]),
        (5, 100, ["old", "middle"]),
    ],
)
def test_the_least_recently_used_goes_first(older_than: float | None, most: int | None, expected: list[str]) -> None:
    entries = [entry("old", 4, 0), entry("middle", 3, 60), entry("new", 3, 99)]
    chosen = choose(entries, older_than_seconds=older_than, max_bytes=most, now=100)
    assert [each.key for each in chosen] == expected


def test_an_artifact_is_taken_only_when_no_store_uses_it(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.obtain("plan", KEY, write)
    (entry,) = entries(tmp_path)
    assert entry.bytes > 0
    assert prune([entry]) == []
    assert store.find("plan", KEY) is not None
    store.release()
    assert prune([entry]) == [entry]
    assert entries(tmp_path) == []
    assert not list(tmp_path.glob("plan/.*.use.lock")), "its lease is gone too"


def test_finding_an_artifact_keeps_it_and_makes_it_recent(tmp_path: Path) -> None:
    Store(tmp_path).obtain("plan", KEY, write)
    os.utime(tmp_path / "plan" / KEY, (0, 0))
    store = Store(tmp_path)
    assert store.find("plan", KEY) is not None
    (entry,) = entries(tmp_path)
    assert time.time() - entry.used < 60
    assert prune([entry]) == []


def test_an_offload_store_stays_while_any_run_works(tmp_path: Path) -> None:
    tensors = tmp_path / "offload" / KEY
    tensors.mkdir(parents=True)
    tensors.joinpath("index.json").write_text("{}")
    store = Store(tmp_path)
    store.obtain("plan", KEY, write)
    shared = next(each for each in entries(tmp_path) if each.stage == "offload")
    assert shared.lease == tmp_path / SHARED
    assert prune([shared]) == []
    store.release()
    assert prune([shared]) == [shared]


def test_a_lease_ends_with_its_process_however_it_ends(tmp_path: Path) -> None:
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom offstage.pipeline.cache.locks import Leases\n"
        "leases = Leases()\nleases.hold(Path(sys.argv[1]))\nos.kill(os.getpid(), 9)\n"
    )
    path = lease_path(tmp_path / KEY)
    subprocess.run([sys.executable, "-c", code, str(path)], cwd=REPOSITORY, check=False)
    assert path.exists()
    with sole_use(path) as ours:
        assert ours


def test_where_no_lock_is_granted_runs_go_on_and_nothing_is_pruned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offstage.pipeline.cache.locks.fcntl", None)
    store = Store(tmp_path)
    assert store.obtain("plan", KEY, write)[0].json("answer.json") == {"answer": 42}
    store.release()
    assert prune(entries(tmp_path)) == []


def test_a_lease_that_cannot_be_closed_fails_no_run(tmp_path: Path) -> None:
    leases = Leases()
    leases.hold(tmp_path / "a.use.lock")
    for number in Path("/proc/self/fd").iterdir():
        if number.exists() and number.resolve() == tmp_path / "a.use.lock":
            os.close(int(number.name))
    leases.release()


def test_a_lease_whose_file_was_removed_meanwhile_is_taken_anew(tmp_path: Path) -> None:
    path = tmp_path / ".a.use.lock"
    first, second = Leases(), Leases()
    first.hold(path)
    path.unlink()
    second.hold(path)
    with sole_use(path) as ours:
        assert not ours
    first.release()
    second.release()


@pytest.mark.parametrize("size", [100, 17 * 2**20])
def test_verifying_hashes_large_files_too_and_sets_damage_aside(size: int, tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.obtain("plan", KEY, lambda folder: folder.joinpath("data").write_bytes(b"x" * size))
    store.release()
    (entry,) = entries(tmp_path)
    assert find_damage(entry) is None
    with entry.folder.joinpath("data").open("r+b") as file:
        file.write(b"y")
    assert find_damage(entry) == "data doesn't match its hash"
    aside = set_aside(entry)
    assert aside is not None
    assert aside.joinpath("data").is_file()
    assert entries(tmp_path) == []


def test_damage_that_a_run_uses_is_left_where_it_is(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.obtain("plan", KEY, write)
    (entry,) = entries(tmp_path)
    entry.folder.joinpath("answer.json").write_text("{}")
    assert find_damage(entry) is not None
    assert set_aside(entry) is None
    store.release()
    assert set_aside(entry) is not None


READERS = """
import os, sys, time, traceback
from pathlib import Path
from offstage.pipeline.cache.store import Store

root, rounds, count, keys = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])

def write(folder):
    for index in range(3):
        (folder / f"{index}.txt").write_text("whole" * 100)

def read(number):
    for turn in range(rounds):
        store = Store(root)
        artifact, _, _ = store.obtain("plan", f"{number % keys:064x}", write)
        for index in range(3):
            time.sleep(0.002)
            assert artifact.path(f"{index}.txt").read_text() == "whole" * 100
        store.release()

for number in range(count):
    if not os.fork():
        code = 1
        try:
            read(number)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
codes = [os.wait()[1] for _ in range(count)]
assert codes == [0] * count, codes
"""


@pytest.mark.parametrize("keys", [1, 32])
def test_pruning_under_32_processes_loses_nothing_that_is_read(keys: int, tmp_path: Path) -> None:
    command = [sys.executable, "-c", READERS, str(tmp_path), "15", "32", str(keys)]
    readers = subprocess.Popen(command, cwd=REPOSITORY, stderr=subprocess.PIPE, text=True)
    taken = 0
    while readers.poll() is None:
        taken += len(prune(entries(tmp_path)))
        time.sleep(0.003)
    assert readers.communicate()[1] == ""
    assert readers.returncode == 0
    assert taken > 0, "the pruner found something to take between two uses"
    assert not list(tmp_path.glob("plan/.damaged-*"))
