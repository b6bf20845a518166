"""What a command's process is made before anything else of it runs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from offstage.pipeline.process_setup import WAIT_POLICIES

HUSHED = """
from offstage.pipeline.process_setup import hush_libraries
{first}
hush_libraries()
import transformers
print(transformers.logging.get_verbosity() == transformers.logging.ERROR)
"""


ORPHANED = """
import os, time
from offstage.pipeline.process_setup import die_with_parent
parent = os.getpid()
if os.fork():
    os._exit(0)
while {waits} and os.getppid() == parent:
    time.sleep(0.01)
die_with_parent(parent)
time.sleep({sleeps})
print("lives")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells nobody of the end of a parent")
@pytest.mark.parametrize("waits", [True, False])
def test_a_process_whose_parent_is_gone_ends_whether_it_went_before_or_after_the_kernel_was_asked(waits: bool) -> None:
    code = ORPHANED.format(waits=waits, sleeps=5)
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60).stdout == ""


def test_a_process_whose_parent_waits_goes_on() -> None:
    code = "import os; from offstage.pipeline.process_setup import die_with_parent; die_with_parent(os.getppid())"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("first", "said", "expected"), [("", None, "True"), ("import transformers", None, "True"), ("", "info", "False")]
)
def test_libraries_tell_errors_alone_unless_the_environment_says_more(
    first: str, said: str | None, expected: str
) -> None:
    variables = {name: value for name, value in os.environ.items() if name != "TRANSFORMERS_VERBOSITY"}
    variables |= {} if said is None else {"TRANSFORMERS_VERBOSITY": said}
    command = [sys.executable, "-c", HUSHED.format(first=first)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == expected


HOST = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [
        (HOST, "10000"),
        ({}, "None"),
        ({**HOST, "LOCAL_WORLD_SIZE": "1"}, "None"),
        ({**HOST, "LOCAL_WORLD_SIZE": "?"}, "None"),
        ({**HOST, "OMP_WAIT_POLICY": "active"}, "None"),
        ({**HOST, "GOMP_SPINCOUNT": "5"}, "5"),
    ],
)
def test_teams_soon_let_other_hosts_on_the_machine_have_the_cores_unless_the_environment_says_otherwise(
    variables: dict[str, str], spin_count: str
) -> None:
    theirs = {*HOST, *WAIT_POLICIES}
    clean = {name: value for name, value in os.environ.items() if name not in theirs}
    code = "import os; from offstage.pipeline.process_setup import set_up; set_up('offstage'); "
    code += "print(os.environ.get('GOMP_SPINCOUNT'))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**clean, **variables}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spin_count
