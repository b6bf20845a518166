"""Each accelerator has a link of its own: what they bring side by side, and what one after the other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from offstage.stages.machine.rates import Rates, read_rates
from offstage.stages.plan.token_time import (
    DEVICE,
    HOST,
    HOST_CORES,
    PassTraffic,
    expected_seconds,
    late_bytes,
    link_seconds,
    slowest,
    token_seconds,
)
from offstage.stages.units import CPU, DISK, DeviceId

RATES = Rates(storage=10, host=1000, host_to_device=100, device=1000)


def brought(runs: Sequence[tuple[DeviceId, float]], *, ahead: bool = True) -> PassTraffic:
    total = PassTraffic()
    for device, count in runs:
        total.add(CPU, count, computes=device, ahead=ahead)
    return total


def test_the_slowest_link_counts_and_what_they_share() -> None:
    streamed = brought([(0, 100), (1, 300), (0, 100)])
    assert streamed.links == {0: 200, 1: 300}
    assert link_seconds(streamed, RATES) == 300 / 100
    assert link_seconds(streamed, Rates(host_to_device=100, root=125)) == 500 / 125
    assert link_seconds(streamed, Rates(host_to_device=100, root=250)) == 300 / 100


def test_what_is_kept_of_earlier_tokens_is_read_and_written_where_they_compute() -> None:
    without, with_caches = (PassTraffic(members=2, resident={CPU: 3000, 0: 5000}) for _ in range(2))
    with_caches.kept.update({CPU: 600, 0: 400})
    before, after = (token_seconds(each, RATES) for each in (without, with_caches))
    for name in (HOST, HOST_CORES):
        assert after[name] - before[name] == pytest.approx(2 * 600 / 1000 / 2)
    assert after[DEVICE] - before[DEVICE] == pytest.approx(2 * 400 / 1000 / 2)


def test_what_is_asked_for_layer_by_layer_comes_over_one_link_at_a_time() -> None:
    experts = brought([(0, 100), (1, 100)], ahead=False)
    assert link_seconds(experts, RATES) == 200 / 100
    for device in (0, 1):
        experts.add(CPU, 300, computes=device)
    assert link_seconds(experts, RATES) == 400 / 100


@pytest.mark.parametrize(
    ("runs", "late"),
    [
        ([(0, 500), (1, 500)], 800),
        ([(0, 100), (1, 100)] * 5, 0),
        ([(0, 100), (0, 100), (1, 200)] * 2, 400),
        ([(0, 80), (1, 100), (0, 80)], 60),
        ([(0, 500), (CPU, 500)], 0),
        ([], 0),
    ],
)
def test_of_a_run_on_one_accelerator_that_is_late_which_its_reserve_has_no_room_for(
    runs: Sequence[tuple[DeviceId, float]], late: float
) -> None:
    total = brought(runs)
    assert late_bytes(total.runs, {0: 100, 1: 100}) == late
    total.reserves = {0: 100, 1: 100}
    seconds = link_seconds(total, RATES)
    assert seconds == max([late, *total.links.values()]) / 100


def test_memories_are_read_one_after_the_other() -> None:
    seconds = token_seconds(PassTraffic(resident={0: 400, 1: 400, CPU: 100}), RATES)
    assert slowest(seconds) == ("device memory", 0.9)
    assert slowest({**seconds, "dequantising": 2.0}) == ("dequantising", 2.1)


def test_a_root_of_links_is_given_or_there_is_none() -> None:
    assert read_rates({"rates": {"root": "40GB"}}).root == 40 * 10**9
    assert read_rates({"rates": {"root": None}}).root is None


def test_calls_take_the_host_a_while_however_few_weights_there_are() -> None:
    rates = Rates(host=100, calls=10)
    seconds = [token_seconds(PassTraffic(resident={CPU: 100}, host_calls=calls), rates)[HOST] for calls in (0, 20)]
    assert seconds == [1, 3]
    around = PassTraffic(2, resident={CPU: 100}, host_calls=20, loops=1)
    assert token_seconds(around, replace(rates, loops=4))[HOST] == 3.25, "each of several in lockstep has one"


def test_what_is_multiplied_quantised_is_read_at_a_rate_of_its_own() -> None:
    read, rates = PassTraffic(resident={CPU: 100}, multiplied=80), Rates(host=100)
    assert token_seconds(read, rates)[HOST] == 1
    assert token_seconds(read, replace(rates, multiplying=400))[HOST] == pytest.approx(0.4)


def test_an_accelerator_waits_for_the_host_to_give_it_work_however_little_that_is() -> None:
    rates = Rates(device=100, host_to_device=10, launches=10)
    waits = token_seconds(PassTraffic(resident={0: 100}, device_calls=20), rates)
    assert slowest(waits) == ("kernel launches", 2)
    assert expected_seconds(waits) == 2, "it computes meanwhile"
    total = PassTraffic(2, resident={0: 100}, device_calls=20)
    total.add(CPU, 5, computes=0, tensors=4)
    assert slowest(token_seconds(total, rates)) == ("kernel launches", 2.2)


def read(
    count: float, *, ahead: bool = True, unpacked: float | None = None, tensors: float = 0, mapped: bool = False
) -> PassTraffic:
    total = PassTraffic()
    total.add(DISK, count, computes=CPU, ahead=ahead, unpacked=unpacked, tensors=tensors, mapped=mapped)
    return total


@pytest.mark.parametrize(
    ("streamed", "expected"),
    [
        (read(20), 2 + 0.25 * 1.02),
        (read(5), 1.005 + 0.25 * 0.5),
        (read(5, unpacked=100, tensors=10), 1.1 + 0.2 + 0.025 + 0.25 * (0.5 + 0.2)),
        (read(20, ahead=False), 1.02 + 2),
        (read(5, ahead=False, unpacked=100), 1.1 + 3.7 * 0.2 + 0.25 * 0.5),
        (read(5, ahead=False, unpacked=400), 1.4 + 3.7 * 0.8 + 0.25 * 0.5),
        (read(0, tensors=10), 1 + 0.025),
        (read(0, tensors=10, ahead=False), 1 + 0.055),
        (read(0, tensors=10, ahead=False, unpacked=0), 1 + 0.085),
        (read(0, tensors=10, mapped=True), 1 + 0.0075),
        (PassTraffic(), 1),
    ],
)
def test_what_overlaps_on_the_host_takes_from_each_other_and_experts_wait_for_their_call(
    streamed: PassTraffic, expected: float
) -> None:
    rates = Rates(storage=10, host=1000, dequantising=500, calls=1000)
    streamed.resident = {CPU: 1000}
    seconds = token_seconds(streamed, rates)
    assert expected_seconds(seconds) == pytest.approx(expected)


def test_slots_that_are_filled_for_the_first_time_wait_for_memory_that_the_system_clears() -> None:
    waits = token_seconds(PassTraffic(2, resident={CPU: 100}, filling=7e9), Rates(host=100))
    assert expected_seconds(waits) == pytest.approx(1 + 7e9 / 3.5e9 / 2), "each of two has half of it"
    assert slowest(waits)[1] == 1, "full slots are what bounds a token"


def test_what_an_accelerator_computes_has_nothing_disturbed_but_by_what_the_host_unpacks() -> None:
    streamed = PassTraffic(resident={0: 100})
    streamed.add(DISK, 20, computes=0, unpacked=40)
    seconds = token_seconds(streamed, Rates(storage=10, dequantising=40, host_to_device=100, device=1000))
    assert expected_seconds(seconds) == pytest.approx(2 + 0.25 * 1)
    assert expected_seconds({**seconds, "dequantising": 0}) == slowest({**seconds, "dequantising": 0})[1] == 2


def test_an_accelerator_waits_for_experts_that_the_host_unpacks_as_they_are_called() -> None:
    rates = Rates(storage=10, dequantising=40, host_to_device=100, device=1000)
    seconds = {}
    for ahead in (True, False):
        streamed = PassTraffic(resident={0: 100})
        streamed.add(DISK, 20, computes=0, unpacked=40, ahead=ahead)
        seconds[ahead] = expected_seconds(token_seconds(streamed, rates))
    assert seconds == pytest.approx({True: 2.25, False: 2.25 + 0.14})
