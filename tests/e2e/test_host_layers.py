"""``execution=fastest``, as users run it, beside simulated accelerators."""

import json
from collections.abc import Callable
from pathlib import Path

from offstage.pipeline.decoding import decode
from offstage.stages.plan.plan import Plan
from tests.e2e.conftest import Finished

Run = Callable[..., Finished]
MACHINE = ("hardware.devices=[{memory: 60MB}, {memory: 60MB}]", "max_memory={0: 1.5MB, 1: 1MB, cpu: 8MB}")
RATES = "hardware.rates={storage: 1GB, host: 400MB, host_to_device: 100MB, device: 100GB}"
TOKENS = ("generate.max_new_tokens=6", "generate.prompts=[If the array is, The the the]")


def test_some_layers_compute_on_the_host_and_the_run_says_so(offstage_here: Run) -> None:
    exact = offstage_here(*MACHINE, RATES, *TOKENS)
    fastest = offstage_here(*MACHINE, RATES, *TOKENS, "execution=fastest")
    assert fastest.code == 0, fastest.err
    assert not fastest.cached["plan"], "the key is the plan's"
    assert fastest.cached["empty_init"]
    assert fastest.tokens == exact.tokens, "all of it computes here"
    plan = decode(Plan, json.loads(Path(fastest.record["stages"][1]["artifact"], "plan.json").read_text()))
    metrics = fastest.record["metrics"]
    assert metrics["host_layers"] == len(plan.host_layers) > 0
    assert {0, "cpu"} <= set(plan.execution.values())
    assert metrics["predicted_seconds_per_token"] < exact.record["metrics"]["predicted_seconds_per_token"]
    assert metrics["streamed_bytes_per_token"] < exact.record["metrics"]["streamed_bytes_per_token"]
    assert "compute on the host, where they lie" in fastest.out
    assert "(execution=fastest): the last bits of what is computed" in " ".join(fastest.out.split())
    assert "host_layers" not in exact.record["metrics"]
    memory = fastest.record["memory"]
    assert all(memory["measured"][device] <= memory["budget"][device] for device in "01")


def test_calls_in_lockstep_and_guesses_have_the_same_tokens(offstage_here: Run) -> None:
    plain = offstage_here("device_map=cpu", "max_memory.cpu=8MB", *TOKENS, "generate.batch_size=1")
    given = (*MACHINE, RATES, *TOKENS, "execution=fastest")
    for more in ("generate.lockstep=2", "generate.prompt_lookup_num_tokens=3"):
        done = offstage_here(*given, more)
        assert done.code == 0, done.err
        assert done.record["metrics"]["host_layers"] > 0
        assert done.tokens == plain.tokens, more


def test_where_it_can_mean_nothing_it_is_refused_in_a_line(offstage_here: Run) -> None:
    for more in ("device_map=balanced", "stages=finetune"):
        done = offstage_here(*MACHINE, "execution=fastest", more)
        assert done.code == 2
        assert "execution: 'fastest' is" in done.err
        assert "execution=exact" in done.err
        assert "Traceback" not in done.err
