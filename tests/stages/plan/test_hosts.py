"""How a model is divided among hosts: as soon as any division, by plans like those of one host."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import pytest

from offstage.pipeline.errors import BudgetError, ConfigError
from offstage.stages.hosts.partition import Partition, chain_of, partition_of, share
from offstage.stages.machine.hardware import Hardware
from offstage.stages.machine.hardware_faults import hardware_faults
from offstage.stages.machine.host_memory import Host
from offstage.stages.machine.hosts import Network
from offstage.stages.machine.kernels import NOMINAL
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.hosts import (
    HANDING_SECONDS,
    Division,
    PlannedHost,
    around_seconds,
    divide,
    soonest_together,
    with_division,
)
from offstage.stages.plan.inputs import gather_inputs
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.soonest_plan import plan_from
from offstage.stages.units import CPU
from tests.long_form import in_ci
from tests.stages.hosts.test_partition import decoder
from tests.stages.plan.test_stage import config

GB = 10**9
NETWORK = Network(rate=10**9, latency=0.0)


def model(sizes: Sequence[int]) -> Outline:
    """Return a decoder whose blocks have so many bytes each."""
    plain = decoder(len(sizes))
    wide = {f"layers.{index}.weight": size // 4 for index, size in enumerate(sizes)}
    specs = (replace(spec, shape=(wide.get(spec.name, 2),)) for spec in plain.tensors)
    return Outline(replace(plain, tensors=tuple(specs)))


def host(memory: int, *, storage: int = GB) -> PlannedHost:
    """Return one that may hold so many bytes of weights, and reads others at that many bytes a second."""
    machine = Hardware((), Host(64 * GB, 64 * GB))
    return PlannedHost(machine, Rates(storage=storage), NOMINAL, {"cpu": str(memory), "disk": "1TB"})


def planned(outline: Outline, hosts: Sequence[PlannedHost], number: int, partition: Partition) -> Plan:
    one, part = hosts[number], replace(outline, skeleton=share(outline.skeleton, partition.away(number)))
    given = config(max_memory=one.max_memory, storage={"io": "direct"})
    return plan_from(gather_inputs(part, given, machine=one.machine, rates=one.rates, kernels=one.kernels))


def divided(outline: Outline, hosts: Sequence[PlannedHost]) -> Division:
    chain = chain_of(outline.skeleton)
    return divide(
        outline.skeleton, chain, lambda number, partition: planned(outline, hosts, number, partition), hosts, NETWORK
    )


def seconds_of(outline: Outline, hosts: Sequence[PlannedHost], cuts: Sequence[int]) -> float:
    partition = partition_of(chain_of(outline.skeleton), cuts)
    try:
        plans = [planned(outline, hosts, number, partition) for number in range(len(hosts))]
    except BudgetError:
        return float("inf")
    return sum(float(plan.forecast["seconds_per_token"]) for plan in plans)


@pytest.mark.parametrize("seed", in_ci(0, 1, 2, of=range(40)))
def test_no_division_is_sooner_than_the_one_that_is_found(seed: int) -> None:
    chance = random.Random(seed)
    blocks = chance.randint(4, 8)
    even = chance.random() < 0.5
    sizes = [10**7 if even else chance.randint(1, 20) * 10**6 for _ in range(blocks)]
    count = chance.choice([2, 3])
    hosts = [host(chance.randint(15, 60) * 10**6, storage=chance.choice([GB // 2, 3 * GB])) for _ in range(count)]
    outline = model(sizes)
    division = divided(outline, hosts)
    cuts = (*division.partition.cuts["layers"],)
    every = [(0, *inner, blocks) for inner in combinations(range(1, blocks), count - 1)]
    best = min(seconds_of(outline, hosts, one) for one in every)
    assert seconds_of(outline, hosts, cuts) <= best * 1.02


def test_a_host_with_more_memory_has_more_blocks_and_nothing_is_streamed_where_all_fits() -> None:
    division = divided(model([10**7] * 12), [host(45 * 10**6), host(95 * 10**6)])
    assert division.partition.cuts["layers"][1] <= 4
    assert [one.streamed_bytes for one in division.hosts] == [0, 0]


def test_what_is_sent_takes_time_too() -> None:
    outline, hosts = model([10**7] * 4), [host(10**9)] * 2
    chain = chain_of(outline.skeleton)

    def took(network: Network) -> float:
        return divide(
            outline.skeleton, chain, lambda number, part: planned(outline, hosts, number, part), hosts, network
        ).seconds

    assert took(Network(rate=10**9, latency=0.5)) - took(NETWORK) == pytest.approx(1.0)


def test_with_several_prompts_under_way_a_token_takes_what_the_slowest_host_takes() -> None:
    outline, hosts = model([10**8] * 8), [host(10**9)] * 2
    chain = chain_of(outline.skeleton)

    def divided_for(members: int) -> Division:
        return divide(
            outline.skeleton, chain, lambda number, part: planned(outline, hosts, number, part), hosts, NETWORK,
            members=members,
        )  # fmt: skip

    alone, several = divided_for(1), divided_for(4)
    around = around_seconds(hosts)
    assert several.seconds == pytest.approx(max(one.seconds for one in several.hosts)), "for all tokens"
    own = sum(one.seconds for one in alone.hosts) - around  # which all do at once
    assert alone.seconds == pytest.approx(own + 2 * HANDING_SECONDS), "a hidden state there, the logits back"
    assert alone.seconds / several.seconds > 1.6
    assert several.partition.cuts["layers"] == (0, 4, 8), "alike hosts have as much to compute"


@pytest.mark.parametrize(("count", "chosen"), [(1, 1), (3, 3), (40, 4)])
def test_so_many_prompts_go_together_that_hosts_are_filled_and_no_more(count: int, chosen: int) -> None:
    def divided_for(given: Mapping[str, Any]) -> Division:
        members = given["generate"]["lockstep"] or 1
        blank = divided(model([10**7] * 4), [host(10**9)] * 2)
        return replace(blank, seconds=1.0 if members >= 4 else 4.0 / members)

    asked = config(generate={"prompts": ["Once"] * count, "lockstep": None}, hardware={"hosts": 2})
    assert soonest_together(asked, divided_for).lockstep == chosen


def test_where_no_division_has_room_the_host_is_named() -> None:
    outline, hosts = model([10**7] * 4), [host(10**9), host(10**6)]
    with pytest.raises(BudgetError, match=r"^host 1 \(layers 1-3\): max_memory\.cpu"):
        divided(outline, hosts)


def test_more_hosts_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"^hardware\.hosts: 3 hosts for 2 blocks; take 2 at most"):
        divided(model([10**7] * 2), [host(10**9)] * 3)


def test_a_hosts_plan_says_what_a_token_takes_on_all() -> None:
    outline, hosts = model([10**7] * 4), [host(10**9)] * 2
    division = divided(outline, hosts)
    plan = with_division(planned(outline, hosts, 1, division.partition), division, 1)
    assert plan.forecast["seconds_per_token"] == division.seconds
    assert plan.hosts[1].weights == {CPU: plan.devices[CPU].weights}
    assert {spec.name for spec in plan.share(outline.skeleton).tensors} == set(plan.tensors)


@pytest.mark.parametrize(
    ("hardware", "keys"),
    [
        ({"hosts": "auto", "network": {"rate": "1GB", "latency": 0.001}}, []),
        ({"hosts": 4}, []),
        ({"hosts": [{"host": {"memory": "1GB"}}, {}]}, []),
        ({"hosts": 1}, ["hardware.hosts"]),
        ({"hosts": True}, ["hardware.hosts"]),
        ({"hosts": "two"}, ["hardware.hosts"]),
        ({"hosts": [{"memory": "1GB"}, 3]}, ["hardware.hosts[0].memory", "hardware.hosts[1]"]),
        ({"network": {"rate": "fast", "latency": -1, "mtu": 9}}, ["mtu", "rate", "latency"]),
        ({"network": 3}, ["hardware.network"]),
    ],
)
def test_what_is_wrong_with_hosts_is_said_by_key(hardware: dict[str, object], keys: list[str]) -> None:
    assert [fault.key.removeprefix("hardware.network.") for fault in hardware_faults(hardware)] == keys
