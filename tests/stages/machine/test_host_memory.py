from __future__ import annotations

import sys
from pathlib import Path

import pytest

from offstage.stages.machine.hardware import coarse
from offstage.stages.machine.host_memory import PROCESS_BYTES, host_memory
from tests.benchmarks.caps import can_cap, run_capped

MIB = 2**20
GIB = 2**30
OWN = 250 * 2**20
V1 = "32 31 0:29 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2 = "32 31 0:29 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n"


def write(root: Path, files: dict[str, str]) -> Path:
    system = {
        "proc/meminfo": f"MemTotal: {24 * GIB // 1024} kB\nMemAvailable: {20 * GIB // 1024} kB\n",
        "proc/self/status": f"RssAnon: {OWN // 1024} kB\n",
    }
    for name, text in {**system, **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_without_a_limit_it_is_what_the_system_has_and_the_process_holds(tmp_path: Path) -> None:
    host = host_memory(write(tmp_path, {"proc/self/cgroup": "0::/\n", "proc/self/mountinfo": V2}))
    assert (host.available_bytes, host.total_bytes) == (20 * GIB + OWN, 24 * GIB)


def test_what_the_process_holds_beyond_its_libraries_is_not_available(tmp_path: Path) -> None:
    files = {
        "proc/self/status": f"RssAnon: {5 * GIB // 1024} kB\n",
        "proc/self/cgroup": "0::/\n",
        "proc/self/mountinfo": V2,
    }
    root = write(tmp_path, files)
    available = host_memory(root).available_bytes
    assert 20 * GIB + PROCESS_BYTES < available < 20 * GIB + 2 * PROCESS_BYTES
    known = host_memory(root, process_bytes=GIB).available_bytes
    assert 21 * GIB < known < 22 * GIB, "a process with a driver's context holds more by itself"


def test_the_tightest_of_nested_groups_counts_in_version_2(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "0::/job/step\n",
        "proc/self/mountinfo": V2,
        f"{folder}/job/memory.max": f"{2 * GIB}\n",
        f"{folder}/job/memory.stat": f"anon {OWN + 101 * MIB}\nfile {5 * GIB}\n",
        f"{folder}/job/step/memory.max": "max\n",
    }
    host = host_memory(write(tmp_path, files))
    assert host.total_bytes == 2 * GIB
    assert host.available_bytes == 2 * GIB - 96 * MIB, "the neighbours' share is gone, the own one is counted as free"


def test_the_tightest_of_nested_groups_counts_in_version_1(tmp_path: Path) -> None:
    folder = "sys/fs/cgroup/memory"
    files = {
        "proc/self/cgroup": "8:pids:/x\n4:memory:/job/step\n0::/\n",
        "proc/self/mountinfo": V1,
        f"{folder}/memory.limit_in_bytes": "9223372036854771712\n",
        f"{folder}/job/memory.limit_in_bytes": f"{3 * GIB}\n",
        f"{folder}/job/step/memory.limit_in_bytes": f"{2 * GIB}\n",
        f"{folder}/job/step/memory.stat": f"rss 5\ntotal_rss {OWN}\n",
    }
    assert host_memory(write(tmp_path, files)).available_bytes == 2 * GIB


@pytest.mark.parametrize(
    ("mount", "membership", "folder", "limit", "stat"),
    [
        (V2, "0::/job\n", "sys/fs/cgroup/job", "memory.max", "anon 7\nfile {}\nshmem {}\n"),
        (V1, "4:memory:/job\n", "sys/fs/cgroup/memory/job", "memory.limit_in_bytes",
         "cache 1\nshmem 1\ntotal_cache {}\ntotal_rss 7\ntotal_shmem {}\n"),
    ],
    ids=["version 2", "version 1"],
)  # fmt: skip
def test_shared_memory_counts_against_a_group_and_its_page_cache_does_not(
    mount: str, membership: str, folder: str, limit: str, stat: str, tmp_path: Path
) -> None:
    files = {
        "proc/self/cgroup": membership,
        "proc/self/mountinfo": mount,
        f"{folder}/{limit}": f"{4 * GIB}\n",
        f"{folder}/memory.stat": stat.format(2 * GIB, GIB + OWN),
    }
    host = host_memory(write(tmp_path, files))
    assert host.available_bytes == 3 * GIB, "7 bytes are the noise of counters that the kernel adds up now and then"
    assert host.limit == str(tmp_path / folder / limit)


SHARED = """
import os
from offstage.stages.machine.host_memory import host_memory
before = host_memory().available_bytes
descriptor = os.memfd_create("shared")
os.write(descriptor, bytes(64 * 2**20))
print(before - host_memory().available_bytes)
"""


@pytest.mark.skipif(not can_cap(), reason="may not make memory cgroups")
def test_shared_memory_of_a_real_group_is_not_available(tmp_path: Path) -> None:
    done = run_capped([sys.executable, "-c", SHARED], 512 * 2**20, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert 60 * 2**20 < int(done.stdout) < 80 * 2**20


def test_a_group_that_is_mounted_as_the_root_is_found(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/docker/abc\n",
        "proc/self/mountinfo": "32 31 0:29 /docker/abc /sys/fs/cgroup rw - cgroup2 cgroup2 rw\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
    }
    assert host_memory(write(tmp_path, files)).total_bytes == GIB


def test_this_machine_answers() -> None:
    host = host_memory()
    assert 0 < host.available_bytes <= host.total_bytes


@pytest.mark.parametrize("count", [1, 1000, 10**9, 23 * 10**9 + 12345, 2**30])
def test_the_grid_rounds_down_by_less_than_a_sixteenth_of_an_octave(count: int) -> None:
    assert count / 2 ** (1 / 16) - 1 <= coarse(count) <= count


def test_nothing_is_nothing() -> None:
    assert coarse(0) == coarse(-5) == 0
