"""The commands' front doors."""

import subprocess
import sys
from pathlib import Path

_DEEP = """
import resource

def main():
    print(max(faults_at(depth) for depth in range(400)))

def faults_at(depth):
    return faults_at(depth - 1) if depth else faults_of_calls()

def faults_of_calls():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(2000):
        one_call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def one_call():
    return another()

def another():
    return None
"""


def test_no_call_below_a_commands_door_maps_memory_for_its_frame_again_and_again(tmp_path: Path) -> None:
    tmp_path.joinpath("deep.py").write_text(_DEEP)
    enter = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from offstage.pipeline.commands import _enter; "
    done = subprocess.run(
        [sys.executable, "-P", "-c", f"{enter}_enter('offstage', 'deep')"],
        cwd=tmp_path, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert int(done.stdout) < 1000
