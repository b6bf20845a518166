"""How many batches go in lockstep: what they take of memory, and where more bring nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offstage.pipeline.typed_config import type_faults
from offstage.stages.empty_init.skeleton import Moment
from offstage.stages.generate.stage import GenerateConfig
from offstage.stages.inputs.generate_options import read_generate
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.request.choose import lockstep_sizes
from tests.stages.plan.plans import make_plan
from tests.stages.plan.skeletons import stack

MB = 10**6
PEAK, RESULT = 10 * MB, 4 * MB
"""What a sequence's widest moment takes, and how much of it is the result of the product that is computed then."""


def model(layers: int = 4, size: int = 100 * MB) -> Outline:
    moment = Moment(
        (0, PEAK, 0, 0, 0, 0), "mm float32", ((0,) * 6, (0,) * 6, (0, RESULT, 0, 0, 0, 0))
    )  # fmt: skip
    return Outline(replace(stack(layers, size).skeleton, moments=(moment,)))


def planned(lockstep: object, *, memory: str = "100GB", rates: Rates | None = None, **changes: Any) -> Plan:
    """Return the plan for many prompts one by one, of which so many go together, on a host with so much ``memory``."""
    generate = {"prompts": [[1]] * 100, "lockstep": lockstep, "exact": True, **changes.pop("generate", {})}
    machine = {"hardware": {"devices": [], "host": {"memory": memory}}, "storage": {"io": "direct"}}
    return make_plan(model(), {**machine, "max_memory": {}, **changes, "generate": generate}, rates=rates)


def test_each_has_what_it_keeps_while_it_waits_and_one_has_the_widest_moment() -> None:
    activations = {size: planned(size).predicted["cpu"]["activations"] for size in (1, 4, 16)}
    assert activations[1] == PEAK
    assert activations[4] - activations[1] == 3 * (PEAK - RESULT)
    assert activations[16] - activations[1] == 15 * (PEAK - RESULT)


def test_no_more_go_together_than_there_are_batches() -> None:
    few = planned(16, generate={"prompts": [[1]] * 3})
    assert few.predicted == planned(3, generate={"prompts": [[1]] * 3}).predicted
    pairs = {"prompts": [[1]] * 6, "batch_size": 2, "exact": False}
    alone, batches = (planned(size, generate=pairs).predicted["cpu"]["activations"] for size in (1, 16))
    assert batches == alone + 2 * 2 * (PEAK - RESULT)


def test_what_is_streamed_is_shared_out_and_what_is_computed_with_is_not() -> None:
    rates = Rates(
        storage=100 * MB, host=1000 * MB, host_to_device=1000 * MB, device=10_000 * MB, calls=10**9, loops=10**9
    )
    budget = {"max_memory": {"cpu": "150MB"}, "device_map": "sequential"}
    alone, together = (planned(size, rates=rates, **budget) for size in (1, 4))
    streamed = alone.forecast["streamed_bytes_per_token"]
    assert together.forecast["streamed_bytes_per_token"] == streamed / 4
    computing = (streamed + alone.used_bytes["cpu"]) / rates.host
    for plan, reading in ((alone, streamed / rates.storage), (together, streamed / rates.storage / 4)):
        no_room = streamed / rates.host  # for another layer, while one computes for each of them
        expected = max(reading + no_room, computing) + min(reading, computing) / 4
        assert plan.forecast["seconds_per_token"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(("storage", "least", "most"), [(1000, 3, 8), (250, 8, 16), (50, 32, 64)])
def test_auto_takes_as_many_as_pay(storage: int, least: int, most: int) -> None:
    rates = Rates(storage=storage * MB, host=1000 * MB, host_to_device=1000 * MB, device=10_000 * MB)
    count = planned("auto", rates=rates, max_memory={"cpu": "210MB"}).lockstep
    assert count is not None
    assert least <= count <= most


def test_auto_takes_no_more_than_fit() -> None:
    rates = Rates(storage=10 * MB, host=1000 * MB, host_to_device=1000 * MB, device=10_000 * MB)
    wide, narrow = (
        planned("auto", rates=rates, memory=memory, max_memory={"cpu": "110MB"}) for memory in ("100GB", "750MB")
    )
    assert wide.lockstep == 64
    assert narrow.lockstep is not None
    assert 1 < narrow.lockstep < 64
    assert sum(narrow.predicted["cpu"].values()) <= 75 * 10**7


def test_sizes_are_each_doubling_and_all() -> None:
    assert lockstep_sizes(10) == [10, 8, 4, 2, 1]
    assert lockstep_sizes(10_000)[0] == 64


@pytest.mark.parametrize("bad", [0, True, "many"])
@pytest.mark.parametrize("key", ["lockstep", "batch_size"])
def test_what_is_no_number_is_told_with_what_may_stand_there(key: str, bad: object) -> None:
    (fault,) = type_faults(GenerateConfig, {"generate": {key: bad}})
    rule = f"{bad!r} is neither a whole number from 1, auto nor null"
    assert str(fault) == f"generate.{key}: {rule}; the default is None"


@pytest.mark.parametrize("good", [None, 1, 8, "auto"])
def test_a_number_or_auto_passes(good: object) -> None:
    assert not list(type_faults(GenerateConfig, {"generate": {"lockstep": good}}))
    assert not list(read_generate({"lockstep": good}).faults())


@pytest.mark.parametrize(
    ("node", "words"),
    [
        ({"lockstep": "auto", "batch_size": "auto"}, "batch_size is auto too"),
        (
            {"lockstep": 2, "assistant_model": "/small", "speculation": "batched"},
            "with assistant_model and speculation=batched prompts are answered one at a time",
        ),
        ({"lockstep": 2, "cache_implementation": "static"}, "a model has one static cache"),
    ],
)
def test_what_does_not_go_together_is_named(node: dict[str, object], words: str) -> None:
    (fault,) = read_generate(node).faults()
    assert fault.key == "generate.lockstep"
    assert words in fault.message
