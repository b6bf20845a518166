"""The command on several hosts, which torchrun starts: processes of one machine, each with a budget and a disk.

Where a test isn't about that start, its hosts are forks with the environment that torchrun gives, and its rendezvous
is the test's: the imports of three processes take most of such a test.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.deadline import deadline
from tests.e2e.conftest import Finished, environment, records_in
from tests.e2e.forked_hosts import run_forks
from tests.e2e.warm_server import ROOT
from tests.long_form import in_ci

Here = Callable[..., Finished]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
ARGUMENTS = ["generate.max_new_tokens=12", "max_memory.cpu=2MB"]
LONG = ["generate.max_new_tokens=900", "generate.min_new_tokens=900", "generate.prompts=[Once]", "max_memory.cpu=6MB"]


def start(folder: Path, count: int, command: Sequence[str]) -> subprocess.Popen[str]:
    """Start ``command`` (torchrun's words for it) on so many hosts, in ``folder``."""
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [*TORCHRUN, "--log-dir", str(folder / "torchrun"), "--nproc-per-node", str(count), *command],
        cwd=folder,
        env=environment({"OMP_NUM_THREADS": "1"}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def run(folder: Path, count: int, *arguments: str) -> tuple[int, str, str]:
    with deadline(), start(folder, count, ["-m", "offstage", *arguments]) as process:
        out, err = process.communicate()
        return process.returncode, out, err


def by_rank(folder: Path) -> list[dict[str, Any]]:
    """Return the records of the hosts of the last run, in their order."""
    records = records_in(folder)
    named = {host["record"]: number for record in records.values() for number, host in enumerate(record["hosts"])}
    return [records[Path(path)] for path in sorted(named, key=named.__getitem__)]


def own_lines(text: str) -> list[str]:
    """Return what offstage itself said, not torchrun."""
    return [line for line in text.splitlines() if line.startswith("offstage: ")]


def process_of(process: subprocess.Popen[str], rank: int) -> psutil.Process:
    """Return the process of the host ``rank``, once it is there."""
    while True:
        for child in psutil.Process(process.pid).children(recursive=True):
            try:
                if child.environ().get("RANK") == str(rank):
                    return child
            except psutil.Error:
                continue
        time.sleep(0.05)


def wait_for(folder: Path, text: str) -> None:
    """Wait until each of two hosts has ``text`` in its log."""
    while sum(text in log.read_text() for log in folder.glob("outputs/runs/*/*/run.log")) < 2:
        time.sleep(0.05)


def test_two_hosts_give_the_tokens_of_one_and_each_has_a_record(fresh_folder: Path, offstage_here: Here) -> None:
    code, out, err = run(fresh_folder, 2, *ARGUMENTS)
    assert code == 0, err
    first, second = by_rank(fresh_folder)
    one = offstage_here(*ARGUMENTS).record
    tokens = [output["token_ids"] for output in one["outputs"]]
    assert [[output["token_ids"] for output in record["outputs"]] for record in (first, second)] == [tokens, tokens]
    assert out.count("time a token") == 1, "the first host alone shows what came out"
    assert "0 (below)" in out
    memories = [
        {name: record["memory"][name] for name in host["memory"]}
        for host, record in zip(first["hosts"], (first, second), strict=True)
    ]
    assert [host["memory"] for host in first["hosts"]] == memories
    maps = [set(record["device_map"]) for record in (first, second)]
    assert any(name.startswith("model.layers.0") for name in maps[0])
    assert not any(name.startswith("model.layers.0") for name in maps[1])
    for record in (first, second):
        assert record["metrics"]["streamed_bytes_per_token"] == record["metrics"]["predicted_streamed_bytes_per_token"]
    assert [host["metrics"]["sent_bytes"] for host in first["hosts"]] == sent_bytes(first), "and no more"


def sent_bytes(record: dict[str, Any]) -> list[int]:
    """Return what each of two hosts is to send for the outputs of ``record``: a hidden state a position, the logits."""
    positions = sum(output["prompt_tokens"] + len(output["token_ids"]) - 1 for output in record["outputs"])
    tokens = sum(len(output["token_ids"]) for output in record["outputs"])
    config = json.loads((ROOT / "conf/checkpoints/tiny/config.json").read_text())
    wide = torch.finfo(getattr(torch, config["dtype"])).bits // 8
    return [positions * config["hidden_size"] * wide, tokens * config["vocab_size"] * wide]


def test_prompts_of_a_run_go_together_as_many_as_the_plan_says(fresh_folder: Path, offstage_here: Here) -> None:
    asked = [*ARGUMENTS, "generate.prompts=[Once,The,A long time ago,And,So,He]"]
    hosts = run_forks(fresh_folder, asked, asked)
    assert [code for code, _, _ in hosts] == [0, 0], hosts
    first, second = by_rank(fresh_folder)
    assert first["metrics"]["lockstep"] == second["metrics"]["lockstep"] >= 4, "two for each host"
    assert "in lockstep" in hosts[0][1]
    assert [host["metrics"]["sent_bytes"] for host in first["hosts"]] == sent_bytes(first), (
        "each prompt what it has alone"
    )
    one = offstage_here(*asked).record
    assert first["outputs"] == second["outputs"] == one["outputs"]


@pytest.mark.long_form
def test_a_second_run_of_hosts_builds_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        code, _, err = run(tmp_path, 2, *ARGUMENTS)
        assert code == 0, err
    last = list(records_in(tmp_path).values())[-2:]
    assert all(stage["cached"] for record in last for stage in record["stages"])


ASKED = {
    "score": ["stages=score"],
    "forward": ["stages=forward"],
    "embed": ["stages=forward", "forward.pooling=mean", "model.class=AutoModel"],
}


@pytest.mark.parametrize("asked", in_ci("score", of=ASKED))
def test_scores_and_forwards_are_those_of_one_host(fresh_folder: Path, offstage_here: Here, asked: str) -> None:
    stage = ASKED[asked][0].removeprefix("stages=")
    given = [*ASKED[asked], f"{stage}.texts=[Once upon a time, The end]"]
    hosts = run_forks(fresh_folder, *[[*given, "max_memory.cpu=2MB"]] * 2)
    assert [code for code, _, _ in hosts] == [0, 0], hosts
    first, second = by_rank(fresh_folder)
    assert first["outputs"] == second["outputs"] == offstage_here(*given).record["outputs"]


@pytest.mark.long_form
def test_a_run_of_hosts_is_replayed_by_one(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, 2, *ARGUMENTS)
    assert code == 0, err
    replay = [sys.executable, "-c", "from offstage.pipeline.commands import replay; replay()"]
    folder = next(iter(records_in(tmp_path))).parent
    done = subprocess.run([*replay, str(folder)], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.long_form
def test_a_run_of_hosts_is_replayed_by_as_many(tmp_path: Path) -> None:
    code, _, err = run(tmp_path, 2, *ARGUMENTS)
    assert code == 0, err
    recorded = next(iter(records_in(tmp_path))).parent
    replay = ["--no-python", sys.executable, "-c", "from offstage.pipeline.commands import replay; replay()"]
    with deadline(), start(tmp_path, 2, [*replay, str(recorded)]) as process:
        out, err = process.communicate()
    assert process.returncode == 0, out + err
    assert out.count("tokens    the same") == 1, "the first host alone shows what came out"


REFUSED = {
    "stages=finetune": "hardware.hosts: a model that is divided among hosts isn't trained",
    "hardware.hosts=3": "hardware.hosts: 3 hosts are described, and the run has 2 processes",
    "generate.batch_size=auto": "generate.batch_size: 'auto' is chosen by each host",
    "measure.repeats=2": "measure.repeats: hosts that run together measure once",
    "-m": "hardware.hosts: a sweep isn't started by torchrun",
}


@pytest.mark.parametrize("argument", in_ci("hardware.hosts=3", of=REFUSED))
def test_what_hosts_dont_serve_is_refused_by_name(fresh_folder: Path, argument: str) -> None:
    hosts = run_forks(fresh_folder, [argument], [argument])
    assert all(code and not out for code, out, _ in hosts), hosts
    lines = [line for _, _, err in hosts for line in own_lines(err)]
    assert any(line.startswith(f"offstage: {REFUSED[argument]}") for line in lines), lines


def test_hosts_with_different_configs_end_and_say_which_key_differs(fresh_folder: Path) -> None:
    hosts = run_forks(fresh_folder, ["seed=0"], ["seed=1"])
    assert all(code for code, _, _ in hosts), hosts
    lines = [line for _, _, err in hosts for line in own_lines(err)]
    assert any("seed is " in line and "have the same on both" in line for line in lines), lines
    assert {record["status"] for record in records_in(fresh_folder).values()} == {"failed"}


@pytest.mark.long_form
@pytest.mark.parametrize("is_exact", in_ci(True, False, of=[True, False]))
def test_hosts_with_unlike_kernels_are_told_or_refused_where_exact_ones_are_asked_for(
    fresh_folder: Path, *, is_exact: bool
) -> None:
    asked = [*ARGUMENTS, f"+hardware.exact_hosts={is_exact}"]
    hosts = run_forks(fresh_folder, asked, asked, own={1: {"MKL_CBWR": "AVX2"}})
    said = "host 1 computes with MKL_CBWR AVX2, host 0 with MKL_CBWR unset"
    records = records_in(fresh_folder).values()
    if is_exact:
        assert [code for code, _, _ in hosts] == [5, 5], hosts
        assert any(f"hardware.exact_hosts: {said}" in line for line in own_lines(hosts[0][2])), hosts
        assert all(said in record["error"]["message"] for record in records)
        return
    assert [code for code, _, _ in hosts] == [0, 0], hosts
    assert said.removeprefix("h") in " ".join(hosts[0][1].split())
    assert [record["hosts"][1]["kernels"]["MKL_CBWR"] for record in records] == ["AVX2", "AVX2"]


@pytest.mark.long_form
@pytest.mark.parametrize("rank", [0, 1])
def test_a_host_that_is_killed_ends_all_and_the_next_run_is_right(tmp_path: Path, rank: int) -> None:
    with deadline(), start(tmp_path, 2, ["-m", "offstage", *LONG]) as process:
        wait_for(tmp_path, "generate: begins")
        process_of(process, rank).send_signal(signal.SIGKILL)
        _, err = process.communicate()
    assert process.returncode != 0
    statuses = sorted(record["status"] for record in records_in(tmp_path).values())
    assert statuses == ["failed", "running"], "who was killed can say nothing"
    (reason,) = own_lines_of(tmp_path)
    assert reason.startswith(f"host {rank} went away"), reason
    assert not [line for line in err.splitlines() if "unforeseen" in line], err
    hosts = run_forks(tmp_path, ARGUMENTS, ARGUMENTS)
    assert [code for code, _, _ in hosts] == [0, 0], hosts


@pytest.mark.long_form
def test_a_host_that_hangs_is_named_and_all_end(tmp_path: Path) -> None:
    with deadline(), start(tmp_path, 2, ["-m", "offstage", *LONG]) as process:
        wait_for(tmp_path, "generate: begins")
        hung = process_of(process, 1)
        hung.send_signal(signal.SIGSTOP)
        stopped = time.monotonic()
        while not own_lines_of(tmp_path):
            time.sleep(0.1)
        assert time.monotonic() - stopped < 30
        hung.send_signal(signal.SIGKILL)
        process.communicate()
    (reason,) = own_lines_of(tmp_path)
    assert reason.startswith("host 1 has said nothing for 20 s")


def own_lines_of(folder: Path) -> list[str]:
    """Return what the records of runs that failed give as the reason."""
    return [record["error"]["message"] for record in records_in(folder).values() if record["status"] == "failed"]


@pytest.mark.long_form
def test_an_interrupt_ends_every_host(tmp_path: Path) -> None:
    with deadline(), start(tmp_path, 2, ["-m", "offstage", *LONG]) as process:
        wait_for(tmp_path, "generate: begins")
        os.kill(process_of(process, 0).pid, signal.SIGINT)
        process.communicate()
    statuses = {record["status"] for record in records_in(tmp_path).values()}
    assert statuses <= {"interrupted", "failed"}
    assert "interrupted" in statuses


def test_hosts_that_arent_there_are_planned_for(fresh_folder: Path, offstage_here: Here) -> None:
    hosts = "hardware.hosts=[{host: {memory: 1GB}}, {host: {memory: 2GB}, max_memory: {cpu: 5MB}}, {}]"
    asked = ("stages=plan_only", hosts, "max_memory.cpu=1MB", "hardware=2x24gb", "max_memory.0=2MB")
    record = offstage_here(*asked).record
    (plan,) = fresh_folder.glob("outputs/cache/plan/*/plan.json")
    hosts_planned = json.loads(plan.read_text())["hosts"]
    assert len(hosts_planned) == len(record["hosts"]) == 3
    assert [{*map(str, host["device_map"].values())} for host in hosts_planned] == [
        {*host["weights"]} for host in hosts_planned
    ]
    for host, recorded in zip(hosts_planned, record["hosts"], strict=True):
        sums = {device: sum(parts.values()) for device, parts in host["predicted"].items()}
        assert recorded["memory"] == {"budget": host["budgets"], "predicted": sums}
        assert recorded["metrics"]["predicted_seconds_per_token"] == host["seconds"]
    assert hosts_planned[1]["budgets"]["cpu"] == 5 * 10**6
    own = [host["seconds"] for host in hosts_planned]
    assert record["metrics"]["predicted_seconds_per_token"] > sum(own), "what is sent takes time too"
