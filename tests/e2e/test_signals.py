"""Signals at any moment: exit 130, one line, no traceback, no record that goes on saying running."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import COMMAND, enter, environment, heed_signals, records_in, start, wait_for
from tests.long_form import in_ci

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_while_a_run_works_ends_it_as_interrupted(number: signal.Signals, fresh_folder: Path) -> None:
    process = start(fresh_folder, "generate.max_new_tokens=100000", "generate.prompts=[[5,6,7]]")
    wait_for(lambda: records_in(fresh_folder), process)
    time.sleep(0.3)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    (record,) = records_in(fresh_folder).values()
    assert (process.returncode, record["status"]) == (130, "interrupted"), err
    assert "Traceback" not in err


PROMPTS = "generate.prompts=[[5,6,7],[8,9],[10]]"
LOCKSTEP = ["generate.lockstep=2", "max_memory.cpu=1500kB", "storage.io=direct", "generate.max_new_tokens=100000"]


@pytest.mark.parametrize("number", in_ci(signal.SIGHUP, of=SIGNALS))
def test_a_signal_while_prompts_are_decoded_in_lockstep_ends_the_run_as_interrupted(
    number: signal.Signals, fresh_folder: Path
) -> None:
    process = start(fresh_folder, *LOCKSTEP, PROMPTS)
    wait_for(lambda: list(fresh_folder.glob("outputs/cache/generate/.tmp-*")), process)
    time.sleep(0.5)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    (record,) = records_in(fresh_folder).values()
    assert (process.returncode, record["status"]) == (130, "interrupted"), err
    assert err.count("\n") == 1


@pytest.mark.long_form
def test_a_sweep_that_is_ended_as_a_job_decodes_in_lockstep_is_finished_with_the_right_answers(
    fresh_folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked = [*LOCKSTEP, PROMPTS, "generate.max_new_tokens=80"]
    sweep = start(fresh_folder, "-m", *asked, "generate.lockstep=2,3", "hydra.sweep.dir=outputs/it")
    wait_for(lambda: list(fresh_folder.glob("outputs/cache/generate/.tmp-*")), sweep)
    sweep.send_signal(signal.SIGTERM)
    out, err = sweep.communicate(timeout=300)
    statuses = [record["status"] for _, record in sorted(records_in(fresh_folder).items())]
    assert (sweep.returncode, statuses) == (130, ["interrupted"]), err
    assert "to run what isn't completed: offstage-sweep resume outputs/it" in out
    resumed = start(fresh_folder, "resume", "outputs/it", entry="sweep")
    _, err = resumed.communicate(timeout=300)
    assert resumed.returncode == 0, err
    assert enter(fresh_folder, *asked, "generate.lockstep=1", "generate.exact=true") == 0
    alone, *together = ([one["token_ids"] for one in record["outputs"]] for record in _completed(fresh_folder))
    assert together == [alone, alone]


def _completed(folder: Path) -> list[dict[str, Any]]:
    """Return the records of what was completed, that of a run by itself first."""
    records = sorted(records_in(folder).items(), key=lambda item: "outputs/it" in str(item[0]))
    return [record for _, record in records if record["status"] == "completed"]


@pytest.mark.parametrize(
    ("milliseconds", "number"),
    [
        pytest.param(after, number, marks=[pytest.mark.long_form] * (number != signal.SIGINT and after != 60))
        for after in (0, 5, 20, 60, 150, 400)
        for number in SIGNALS
    ],
)
def test_a_signal_during_imports_leaves_no_traceback(number: signal.Signals, milliseconds: int, tmp_path: Path) -> None:
    """The command says that it has begun; what the interpreter itself does before that is beyond it."""
    begin = "import sys; from offstage.pipeline.command_exit import exit_at_signals; exit_at_signals('offstage');"
    program = f"{begin} print('.'); sys.stdout.flush(); from offstage.pipeline.commands import offstage; offstage()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "generate.max_new_tokens=100000", "generate.prompts=[[5,6,7]]"],
        cwd=tmp_path, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        preexec_fn=heed_signals,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.read(1)
    time.sleep(milliseconds / 1000)
    process.send_signal(number)
    _, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "offstage: interrupted\n")
    assert all(record["status"] == "interrupted" for record in records_in(tmp_path).values())


def test_a_hangup_that_is_ignored_stays_ignored(fresh_folder: Path) -> None:
    ignoring = "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN);"
    process = subprocess.Popen(
        [sys.executable, "-c", ignoring + COMMAND[2], "stop_after=plan"],
        cwd=fresh_folder, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    wait_for(lambda: records_in(fresh_folder), process)
    os.kill(process.pid, signal.SIGHUP)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err


def require_interrupted(program: str) -> str:
    """Run ``program``, which is sent a signal and else sleeps and ends well: it ends by the signal, and says so.

    Returns what it wrote.
    """
    process = subprocess.run(
        [sys.executable, "-c", program], env=environment(), text=True, capture_output=True, preexec_fn=heed_signals
    )
    assert (process.returncode, process.stderr) == (130, "offstage: interrupted\n")
    return process.stdout


@pytest.mark.parametrize("number", in_ci(signal.SIGTERM, of=SIGNALS))
def test_a_signal_at_first_imports_is_told_where_others_are_to_be_told(number: signal.Signals) -> None:
    program = f"""
import os, sys, time
from offstage.pipeline.command_exit import exit_at_signals, run_command

exit_at_signals("offstage", keeps_first=True)
os.kill(os.getpid(), {int(number)})
sys.stdout.write("goes on")
run_command("offstage", lambda: time.sleep(120) or 0, tell=lambda code: sys.stdout.write(f", and tells {{code}}"))
"""
    assert require_interrupted(program) == "goes on, and tells 130"


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_that_falls_into_a_callback_isnt_lost(number: signal.Signals, tmp_path: Path) -> None:
    """Python drops what a weak reference's callback raises, and every import has such callbacks."""
    program = f"""
import os, time, weakref
from offstage.pipeline.command_exit import run_command

class Owner: pass

def work():
    owner = Owner()
    kept = weakref.ref(owner, lambda _: (os.kill(os.getpid(), {int(number)}), time.sleep(0.2)))
    del owner
    time.sleep(120)
    return 0

run_command("offstage", work)
"""
    require_interrupted(program)


def test_a_signal_during_an_import_that_loses_exceptions_isnt_lost(tmp_path: Path) -> None:
    caught = "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.2)\nexcept BaseException:\n    pass\n"
    tmp_path.joinpath("lossy.py").write_text(f"import os, signal, time\n{caught}")
    program = f"""
import sys, time
from offstage.pipeline.command_exit import run_command

def work():
    sys.path.insert(0, {str(tmp_path)!r})
    import lossy
    time.sleep(120)
    return 0

run_command("offstage", work)
"""
    require_interrupted(program)


INTERRUPTED_CALLS = """
import os, signal, time
import torch
from offstage.pipeline.command_exit import run_command
from offstage.stages.empty_init.fake_weights import Faking

class Interrupted(Faking):
    calls = 0

    def __torch_dispatch__(self, *given, **named):
        self.calls += 1
        if self.calls == number:
            os.kill(os.getpid(), signal.SIGINT)
        return super().__torch_dispatch__(*given, **named)

def work():
    with Interrupted():
        layer, given = torch.nn.Linear(8, 8), torch.ones(2, 8)
        summed = layer(given).sum()
        if number:
            summed.backward()  # before a fork it may have threads of its own
            time.sleep(5)  # it may come when that is over
    return 0

def script():
    try:
        work()
    except KeyboardInterrupt:
        raise SystemExit(130)

number = 0
work()  # it imports much
for number in range(5, 15):
    if not (pid := os.fork()):
        try:
            {way}
        except SystemExit as end:
            os._exit(end.code)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
"""


@pytest.mark.parametrize("way", ['run_command("offstage", work)', "script()"])
def test_an_interrupt_while_shapes_are_computed_is_no_abort(way: str) -> None:
    """From some of what torch asks of a tensor without values, as a gradient is recorded, no exception may come."""
    program = INTERRUPTED_CALLS.replace("{way}", way)
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment(), text=True, capture_output=True, check=True,
        preexec_fn=heed_signals,
    )  # fmt: skip
    assert done.stdout.split() == ["130"] * 10, done.stderr


def test_what_an_interrupt_left_half_done_and_fails_as_it_is_cleared_up_is_an_interrupt() -> None:
    """As OmegaConf's flags do, which a value has while another is put into it."""
    require_interrupted("""
import os, signal
from offstage.pipeline.command_exit import run_command
from offstage.pipeline.errors import ConfigError

def work():
    try:
        try:
            os.kill(os.getpid(), signal.SIGINT)
        finally:
            None.flags
    except AttributeError as error:
        raise ConfigError(str(error)) from error

run_command("offstage", work)
""")


@pytest.mark.parametrize("whom", ["the sweep", pytest.param("the job alone", marks=pytest.mark.long_form)])
def test_a_signal_ends_the_sweep_that_got_it_and_no_other_job_than_the_one_that_got_it(
    whom: str, fresh_folder: Path
) -> None:
    process = start(
        fresh_folder, "-m", "hydra/launcher=basic", "generate.max_new_tokens=100000,1,2", "generate.prompts=[[5,6,7]]"
    )
    wait_for(lambda: any(record["stages"] for record in records_in(fresh_folder).values()), process)
    if whom == "the sweep":
        process.send_signal(signal.SIGINT)
    else:
        (job,) = (int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split())
        os.kill(job, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    statuses = [record["status"] for _, record in sorted(records_in(fresh_folder).items())]
    assert statuses == ["interrupted"] + ["completed"] * (2 if whom == "the job alone" else 0), err
    assert process.returncode == 130
    assert "Traceback" not in err
