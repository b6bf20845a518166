"""Simulated accelerators: the embedded model runs on machines that nobody here has."""

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from tests.e2e.conftest import Finished
from tests.long_form import in_ci

Run = Callable[..., Finished]
BUDGET_EXIT = 4
TOKENS = "generate.max_new_tokens=6"
DEVICES = 4


def machine(*, memory: str = "60MB", ledger: str | None = None) -> str:
    """Return an override: four accelerators, the last of which holds only ``ledger``, whatever it says."""
    last = f"{{memory: {memory}, ledger: {ledger}}}" if ledger else f"{{memory: {memory}}}"
    return f"hardware.devices=[{', '.join([f'{{memory: {memory}}}'] * (DEVICES - 1) + [last])}]"


def budgets(accelerator: str, host: str) -> str:
    return f"max_memory={{{', '.join(f'{i}: {accelerator}' for i in range(DEVICES))}, cpu: {host}}}"


ON_ACCELERATORS, SOME_STREAMED = budgets("2.4MB", "2MB"), budgets("2MB", "1.2MB")


@pytest.mark.parametrize("given", in_ci(SOME_STREAMED, of=[ON_ACCELERATORS, SOME_STREAMED]))
def test_four_simulated_accelerators_give_the_tokens_of_the_cpu_within_their_budgets(
    given: str, offstage_here: Run
) -> None:
    on_cpu = offstage_here("device_map=cpu", "max_memory.cpu=8MB", TOKENS)
    for policy in ("balanced", "balanced_low_0", "sequential", "optimal"):
        done = offstage_here(machine(), given, f"device_map={policy}", TOKENS)
        assert done.code == 0, done.err
        assert done.tokens == on_cpu.tokens, policy
        memory = done.record["memory"]
        used = [device for device in map(str, range(DEVICES)) if memory["measured"][device]]
        assert len(used) >= DEVICES - 1, (policy, memory)
        assert all(memory["measured"][device] <= memory["budget"][device] for device in used), (policy, memory)
        assert done.record["metrics"]["simulated_accelerators"] == DEVICES


@pytest.mark.long_form
@pytest.mark.of_the_process("what it holds is measured, and a fork shares memory with its server")
def test_the_host_is_predicted_with_what_the_simulated_accelerators_hold(
    tmp_path: Path, offstage: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    config = LlamaConfig(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, vocab_size=8000)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    devices = f"hardware.devices=[{', '.join(['{memory: 300MB}'] * DEVICES)}]"
    given = (f"model.path={folder}", "generate.prompts=[[5,6,7]]", devices, "device_map=balanced")
    done = offstage(*given, budgets("60MB", "100MB"), TOKENS)
    assert done.code == 0, done.err
    memory = done.record["memory"]
    device_bytes = sum(memory["measured"][str(device)] for device in range(DEVICES))
    assert device_bytes > 100 * 10**6
    assert memory["predicted"]["cpu"] == pytest.approx(memory["measured"]["cpu"], rel=0.1)


def test_streaming_to_a_simulated_accelerator_reaches_its_reserve_and_lets_go(offstage_here: Run) -> None:
    given = ("hardware.devices=[{memory: 60MB}]", "max_memory={0: 2MB, cpu: 2MB}", "device_map=sequential")
    done = offstage_here(*given, TOKENS)
    assert done.code == 0, done.err
    metrics = done.record["metrics"]
    speed = metrics["streamed_bytes_per_token"] / metrics["decode_seconds_per_token"]
    assert metrics["streamed_bytes_per_second"] == pytest.approx(speed, rel=1e-3)
    assert 0 < metrics["stall_seconds_per_token"] < metrics["decode_seconds_per_token"]
    assert metrics["bottleneck"] in ("storage", "host-to-device", "compute")
    plan = json.loads(Path(done.record["stages"][1]["artifact"], "plan.json").read_text())
    peak = done.record["memory"]["measured"]["0"]
    device = plan["devices"]["0"]
    assert device["weights"] < peak <= device["weights"] + device["reserve"] <= 2 * 10**6


def test_a_ledger_below_the_plan_raises_as_a_full_device_would(offstage_here: Run) -> None:
    done = offstage_here(machine(ledger="500KB"), ON_ACCELERATORS, "device_map=balanced", TOKENS)
    assert done.code == BUDGET_EXIT
    assert "the simulated accelerator 3 is full" in done.err
    assert "Traceback" not in done.err
    assert done.record["status"] == "failed"


def test_a_plan_that_an_accelerator_cannot_hold_is_refused_before_a_weight_is_read(offstage_here: Run) -> None:
    done = offstage_here(machine(memory="26MB"), ON_ACCELERATORS, "device_map=balanced", TOKENS)
    assert done.code == BUDGET_EXIT
    assert "max_memory.0: the plan takes" in done.err
    assert "the most that works is" in done.err
    assert "shard_load" not in done.cached


MACHINES = {"1x24gb": 1, "2x24gb": 2, "4x24gb": 4, "4x80gb": 4, "8x80gb": 8, "24gb-12gb": 2}


@pytest.mark.parametrize(("name", "count"), MACHINES.items(), ids=MACHINES)
def test_a_config_alone_is_enough_to_plan_for_a_machine(
    name: str, count: int, tmp_path: Path, offstage_here: Run
) -> None:
    folder = tmp_path / "config_only"
    folder.mkdir()
    shutil.copy(str(resources.files("offstage.conf") / "checkpoints" / "tiny" / "config.json"), folder)
    done = offstage_here(f"hardware={name}", "stages=plan_only", f"model.path={folder}", "max_memory=null")
    assert done.code == 0, done.err
    assert len(done.record["memory"]["budget"]) == count + 2


def test_accelerators_with_links_of_their_own_are_planned_named_and_run_as_they_are(offstage_here: Run) -> None:
    first, second = "name: RTX 4090, host_to_device: 200MB", "name: RTX 3060, rates: {host_to_device: 50MB}"
    devices = f"[{{memory: 60MB, {first}}}, {{memory: 60MB, {second}}}]"
    rates = "hardware.rates={storage: 1MB, host: 10GB, host_to_device: 200MB, device: 10GB}"
    given = (rates, "max_memory={0: 2MB, 1: 2MB, cpu: 7MB}", TOKENS)
    alike = offstage_here(*given, "hardware.devices=[{memory: 60MB}, {memory: 60MB}]")
    unlike = offstage_here(*given, f"hardware.devices={devices}")
    assert (alike.code, unlike.code) == (0, 0), unlike.err
    assert unlike.tokens == alike.tokens
    plan = json.loads(Path(unlike.record["stages"][1]["artifact"], "plan.json").read_text())
    brought = {device: one["transfer_bytes"] for device, one in plan["devices"].items() if one["transfer_bytes"]}
    assert brought["0"] > 2 * brought["1"] > 0
    took = max(brought["0"] / (200 * 10**6), brought["1"] / (50 * 10**6))
    assert plan["forecast"]["seconds_per_token"] == pytest.approx(took, rel=0.01)
    assert (
        unlike.record["metrics"]["predicted_seconds_per_token"] > alike.record["metrics"]["predicted_seconds_per_token"]
    )
    assert [plan["devices"][device]["name"] for device in "01"] == ["RTX 4090", "RTX 3060"]
    assert plan["devices"]["1"]["rates"]["host_to_device"] == 50 * 10**6
    assert "1 (RTX 3060)" in unlike.out


def test_a_key_of_the_hardware_that_nobody_reads_is_refused_with_its_place(offstage_here: Run) -> None:
    done = offstage_here("hardware.devices=[{memory: 60MB, nam: x}]", "+hardware.hosst={memory: 1GB}")
    assert done.code == 2
    assert "hardware.devices[0].nam: unknown key (did you mean 'name'?); here may stand memory, name" in done.err
    assert "hardware.hosst: unknown key (did you mean 'host'?); here may stand devices, host, rates" in done.err
