"""What a plan depends on: free memory is a part of its key only where it can change the plan."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offstage.pipeline.stage import keyed
from offstage.stages.empty_init.skeleton import CacheSpec
from offstage.stages.machine.hardware import Accelerator, Hardware
from offstage.stages.machine.host_memory import PROCESS_BYTES, Host
from offstage.stages.machine.kernels import NOMINAL
from offstage.stages.machine.rates import read_rates
from offstage.stages.plan.inputs import Demand, PlanInputs, gather_inputs
from tests.stages.plan.skeletons import outline, stack
from tests.stages.plan.test_stage import config

GB = 10**9


def gathered(free: int) -> PlanInputs:
    """Return the inputs of a plan whose batch size is open, on a machine with so many bytes ``free``."""
    machine = Hardware(accelerators=(), host=Host(total_bytes=64 * GB, available_bytes=free))
    asked = {"prompts": [[1, 2, 3]] * 4, "batch_size": "auto", "max_new_tokens": 4}
    given = config(generate=asked, stages=["generate"])
    return gather_inputs(stack(3), given, machine=machine, rates=read_rates({}), kernels=NOMINAL)


def test_an_open_batch_size_has_the_same_key_however_much_more_than_enough_is_free() -> None:
    assert not gathered(20 * GB).rooms
    assert keyed(gathered(20 * GB)) == keyed(gathered(14 * GB))


def test_a_plan_hangs_on_kernels_where_a_budget_is_worked_out_or_they_take_more_than_steps_hide() -> None:
    machine = Hardware(accelerators=(), host=Host(total_bytes=64 * GB, available_bytes=20 * GB))

    def hangs(prompt: int, **given: object) -> bool:
        asked = config(generate={"prompts": [[1] * prompt]}, stages=["generate"], **given)
        inputs = gather_inputs(stack(3), asked, machine=machine, rates=read_rates({}), kernels=NOMINAL)
        return inputs.hangs_on_kernels

    assert not hangs(3)
    assert hangs(3, max_memory={})


@pytest.mark.parametrize("free", [PROCESS_BYTES // 2, PROCESS_BYTES])
def test_where_memory_may_be_too_little_for_one_of_the_sizes_it_is_a_part_of_the_key(free: int) -> None:
    assert gathered(free).rooms
    assert keyed(gathered(free)) != keyed(gathered(20 * GB))


def test_the_free_memory_of_an_accelerator_is_a_part_of_the_key_where_a_given_budget_may_be_too_much_for_it() -> None:
    def planned(free: int) -> PlanInputs:
        host = Host(total_bytes=64 * GB, available_bytes=20 * GB)
        machine = Hardware((Accelerator("real", 24 * GB, free, simulated=False),), host)
        given = config(generate={"prompts": [[1, 2, 3]]}, max_memory={"0": "2GB", "cpu": "1GB"}, stages=["generate"])
        model = outline({f"l.{index}.w": GB for index in range(3)})
        return gather_inputs(model, given, machine=machine, rates=read_rates({}), kernels=NOMINAL)

    assert keyed(planned(20 * GB)) == keyed(planned(14 * GB))
    assert not planned(20 * GB).rooms
    assert keyed(planned(GB)) != keyed(planned(20 * GB))
    assert planned(GB).rooms.keys() == {0}


def test_a_quantised_cache_is_fewer_bytes_and_takes_a_token_longer() -> None:
    machine = Hardware(accelerators=(), host=Host(total_bytes=64 * GB, available_bytes=20 * GB))
    kept = CacheSpec(tuple(f"layers.{index}" for index in range(3)), position_bytes=1024)
    model = replace(stack(3), skeleton=replace(stack(3).skeleton, caches=(kept,)))

    def demanded(**options: object) -> Demand:
        asked = {"prompts": [[1] * 2000], "max_new_tokens": 2, "lockstep": 1, **options}
        given = config(generate=asked, stages=["generate"])
        inputs = gather_inputs(model, given, machine=machine, rates=read_rates({}), kernels=NOMINAL)
        return inputs.demands[0]

    whole, quantised = demanded(), demanded(cache_implementation="quantized", cache_config={"nbits": 2})
    assert 0 < quantised.needs.cache_bytes < whole.needs.cache_bytes / 4
    (before, after) = (sum(cache.finished for cache in one.step.caches) for one in (whole, quantised))
    assert after == pytest.approx(before * (5.5 + 8 / 128), rel=0.01)
