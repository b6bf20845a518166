"""Operators that start no threads beside the one that calls them, and teams that don't keep others from the cores."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, threading, torch
from offstage.stages.machine.operator_threads import alone, elements_alone

torch.set_num_threads(3)
values = torch.ones(elements_alone(2**20))
started = []

def work():
    before = set(os.listdir("/proc/self/task"))
    values * 2
    started.append(len(set(os.listdir("/proc/self/task")) - before))

def work_alone():
    with alone():
        work()
    assert torch.get_num_threads() == 3

for target in (work_alone, work):
    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
print(*started, torch.get_num_threads())
"""


def test_operators_start_no_threads_where_they_are_told_to_stay_alone_and_others_do() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "2", "3"]


TEAMS = """
import os, torch
from offstage.stages.machine.operator_threads import let_idle_teams_sleep

for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
    os.environ.pop(name, None)
torch.set_num_threads(3)
torch.ones(2**20) * 2
before = len(os.listdir("/proc/self/task"))

def started():
    torch.ones(2**20) * 2
    assert torch.get_num_threads() == 3
    return len(os.listdir("/proc/self/task")) - before

os.environ["OMP_WAIT_POLICY"] = "active"
let_idle_teams_sleep()
told = started()
del os.environ["OMP_WAIT_POLICY"]
let_idle_teams_sleep.cache_clear()
for _ in range(2):
    let_idle_teams_sleep()
cores = len(os.sched_getaffinity(0))
assert started() == max(2, cores - 3 + 2), started()
assert 3 + started() - 1 > cores, "more threads in teams than cores"
print(told)
"""


def test_one_more_team_than_there_are_cores_for_puts_idle_ones_to_sleep_unless_the_environment_says() -> None:
    done = subprocess.run([sys.executable, "-c", TEAMS], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == (["0"], "")
