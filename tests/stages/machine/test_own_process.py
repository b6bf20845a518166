"""What runs in a process of its own: what is heard of it, how long it may take, and that it goes before this one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from offstage.stages.machine import own_process
from offstage.stages.machine.host_memory import PROCESS_BYTES, host_memory
from offstage.stages.machine.own_process import has_room, measure_apart


def test_what_it_prints_is_heard_and_of_one_that_fails_nothing() -> None:
    assert measure_apart("machine.row_products", "float32") in (True, False)
    assert measure_apart("machine.row_products", "no dtype") is None
    assert measure_apart("no probe") is None


def test_one_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_process, "_SECONDS", 0.01)
    assert measure_apart("machine.row_products", "float32") is None


@pytest.mark.skipif(not Path("/proc/self/oom_score_adj").exists(), reason="the system ranks no processes")
def test_it_is_the_first_to_be_ended_where_memory_is_short() -> None:
    code = (
        "import os; from offstage.stages.machine.own_process import be_expendable; be_expendable(parent=os.getppid()); "
        "print(open('/proc/self/oom_score_adj').read())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1000"


def test_there_is_room_for_what_is_available_and_no_more() -> None:
    available = host_memory().available_bytes
    assert has_room((available - 2 * PROCESS_BYTES) // 2)
    assert not has_room(available)
    assert measure_apart("machine.row_products", "float32", beside=available) is None
    assert measure_apart("machine.row_products", "float32", beside=available, here=lambda: "here") == "here"
