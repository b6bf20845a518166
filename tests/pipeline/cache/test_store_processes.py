"""The store among many processes, and under kills."""

from __future__ import annotations

import json
import logging
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from offstage.pipeline.cache.store import Store
from tests.pipeline.cache.stores import KEY, assert_right, names, never, write

REPOSITORY = Path(__file__).parents[3]


# Many processes

PROGRAM = """
import errno, fcntl, json, os, random, sys, time, traceback
from pathlib import Path
from offstage.pipeline.cache import store

root, locks, keys, count = Path(sys.argv[1]), sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])

flock = fcntl.flock

def lock(descriptor, kind):
    if locks == "refused":
        raise OSError(errno.ENOLCK, "No locks available")
    if locks == "works":
        flock(descriptor, kind)

fcntl.flock = lock

def write(folder):
    (folder / "who.json").write_text(str(os.getpid()))
    with (root.parent / "builds").open("a") as log:
        log.write(folder.parent.name + "\\n")
    time.sleep(0.3 if len(keys) == 1 else 0.01)
    (folder / "filler.bin").write_bytes(os.urandom(100_000))

def work():
    random.shuffle(keys)
    (root.parent / f"ready-{os.getpid()}").touch()
    while len(list(root.parent.glob("ready-*"))) < count and os.getppid() == parent:
        time.sleep(0.001)
    found = {key: store.Store(root).obtain("plan", key, write)[0].json("who.json") for key in keys}
    (root.parent / f"found-{os.getpid()}").write_text(json.dumps(found))

parent = os.getpid()
for _ in range(count):
    if not os.fork():
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
for _ in range(count):
    assert os.wait()[1] == 0
"""


def run_together(root: Path, *, locks: str, keys: list[str], count: int = 32) -> list[dict[str, int]]:
    """Have ``count`` processes, forked from one that has imported the store, begin at once; return what each found."""
    command = [sys.executable, "-c", PROGRAM, str(root), locks, json.dumps(keys), str(count)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(path.read_text()) for path in root.parent.glob("found-*")]
    assert len(reports) == count
    return reports


@pytest.mark.parametrize("locks", ["works", "refused", "granted to all"])
def test_32_processes_that_want_one_key_all_get_the_same_artifact(root: Path, locks: str) -> None:
    root.mkdir(parents=True)
    results = run_together(root, locks=locks, keys=[KEY])
    assert len({result[KEY] for result in results}) == 1
    builds = (root.parent / "builds").read_text().splitlines()
    assert len(builds) == 1 if locks == "works" else len(builds) > 1
    assert names(root / "plan") == [KEY]


@pytest.mark.parametrize("locks", ["works", "refused"])
def test_32_processes_that_want_many_keys_all_get_the_same_artifacts(root: Path, locks: str) -> None:
    root.mkdir(parents=True)
    keys = [f"{number:064x}" for number in range(32)]
    results = run_together(root, locks=locks, keys=keys)
    assert all(result == results[0] for result in results)
    if locks == "works":
        assert len((root.parent / "builds").read_text().splitlines()) == len(keys)
    assert names(root / "plan") == keys


def test_a_process_that_waits_for_another_says_so_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    started, go_on = threading.Event(), threading.Event()

    def slowly(folder: Path) -> str:
        started.set()
        go_on.wait(120)
        return write(folder)

    def set_once_logged() -> None:
        while not caplog.records and builder.is_alive():
            time.sleep(0.01)
        time.sleep(0.3)  # whatever is said again is said meanwhile
        go_on.set()

    builder = threading.Thread(target=lambda: Store(root).obtain("plan", KEY, slowly))
    with caplog.at_level(logging.INFO, logger="offstage"):
        builder.start()
        started.wait(120)
        threading.Thread(target=set_once_logged).start()
        _, made, cached = Store(root).obtain("plan", KEY, never)
    builder.join()
    assert (made, cached) == (None, True)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "waiting for another process that builds plan" in message


# Kills

KILLED_AT_EACH_STEP = """
import os, signal, sys
from pathlib import Path
from offstage.pipeline.cache.store import Store

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
from offstage.pipeline.cache.store import Store

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
