"""Operators that start no threads beside the one that calls them."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
import os, threading, torch
from stages.machine.operator_threads import alone, elements_alone

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
