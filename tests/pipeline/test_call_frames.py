"""No call below where frames have room maps memory for its frame again and again."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offstage.pipeline.interpreter import with_frame_room
from offstage.stages.dispatch.streaming.lockstep import Lockstep
from offstage.stages.dispatch.streaming.module_state import ModuleState
from tests.pipeline.frame_faults import CALLS, most_faults

_DOOR = """
import sys, types
from offstage.pipeline import commands
from tests.pipeline.frame_faults import most_faults
sys.modules["deep"] = types.SimpleNamespace(main=lambda: print(most_faults()))
commands._enter("offstage", "deep")
"""


def with_room() -> int:
    return with_frame_room(lambda: most_faults())()


def in_lockstep() -> int:
    fault_counts: list[int] = []
    with torch.no_grad():
        Lockstep(1, ModuleState(nn.Module())).run([lambda: fault_counts.append(most_faults())])
    return fault_counts[0]


def below_a_commands_door() -> int:
    done = subprocess.run([sys.executable, "-c", _DOOR], capture_output=True, text=True, check=True)
    return int(done.stdout)


def test_without_room_there_is_a_depth_where_each_call_maps_memory() -> None:
    assert most_faults() >= CALLS


@pytest.mark.parametrize("faults", [with_room, in_lockstep, below_a_commands_door])
def test_with_room_there_is_none(faults: Callable[[], int]) -> None:
    assert faults() < CALLS / 2
