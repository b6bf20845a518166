"""Plans that stream over several links: layers take turns, each link has its share, and no plan is slower for it."""

from __future__ import annotations

import json
import random
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from hashlib import sha256
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from offstage.pipeline.errors import BudgetError
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.policies.optimal import Search
from offstage.stages.plan.policies.partly_streamed import share_layers
from offstage.stages.plan.table import render
from offstage.stages.plan.traffic import Step, forecast, lower_bound_seconds
from offstage.stages.units import CPU, DISK, DeviceId
from tests.stages.plan.plans import make_plan, of
from tests.stages.plan.skeletons import at_rest, outline
from tests.stages.plan.test_optimal import llama

MB = 10**6
LINK = 25 * 10**9
FAST = {"storage": "1TB", "host": "100GB", "host_to_device": "25GB", "device": "900GB", "launches": "1GB"}
many = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


def planned(model: Outline, *accelerators: int, host: int | None = None, **rates: str) -> Plan:
    """Return the plan on accelerators with these budgets; the host holds ``host`` bytes, or all."""
    room = model.skeleton.bytes if host is None else host
    given = {str(index): str(count) for index, count in enumerate(accelerators)} | {"cpu": str(room)}
    hardware = {"devices": [{"memory": "1TB"}] * len(accelerators), "host": {"memory": "8TB"}, "rates": FAST | rates}
    config = {"max_memory": given, "device_map": "optimal", "hardware": hardware, "generate": {}}
    return make_plan(model, {**config, "storage": {"io": "direct"}})


def seconds(plan: Plan) -> float:
    return float(plan.forecast["seconds_per_token"])


def layers_on(plan: Plan) -> list[DeviceId]:
    """Return where each of a Llama's layers computes, in their order."""
    return [plan.execution[name] for name in plan.execution if name.endswith(".q")]


def counted_seconds(model: Outline, plan: Plan, passes: int = 6) -> float:
    """Return how long a pass takes over links that run ahead part by part, as far as reserves have room; counted."""
    parts: list[tuple[DeviceId, int]] = []
    for layer in model.layers:
        modules = dict.fromkeys(map(parent, layer.tensors))
        sizes = [sum(model.sizes[name] for name in model.direct[one] if name in plan.serving) for one in modules]
        parts += [(plan.execution[one], size) for one, size in zip(modules, sizes, strict=True) if size]
    now, ends = 0.0, []
    free = dict.fromkeys(of(plan, "reserve"), 0.0)
    queues: dict[DeviceId, deque[tuple[float, int]]] = {device: deque() for device in of(plan, "reserve")}
    for _ in range(passes):
        for device, size in parts:
            begin, queue = free[device], queues[device]
            while sum(count for _, count in queue) + size > plan.devices[device].reserve:
                begin = max(begin, queue.popleft()[0])
            free[device] = begin + size / LINK
            now = max(now, free[device])
            queue.append((now, size))
        ends.append(now)
    return ends[-1] - ends[-2]


@pytest.mark.parametrize(("count", "factor"), [(2, 1.8), (4, 3.2), (8, 6.4)])
def test_as_many_links_are_about_as_many_times_as_fast(count: int, factor: float) -> None:
    model = llama(48)
    room = model.skeleton.bytes // 20
    one, several = planned(model, room), planned(model, *[room] * count)
    assert (one.forecast["bottleneck"], several.forecast["bottleneck"]) == ("host-to-device", "host-to-device")
    assert seconds(one) > factor * seconds(several)
    assert list(of(several, "transfer_bytes")) == list(range(count))
    assert sum(of(several, "transfer_bytes").values()) == several.forecast["streamed_bytes_per_token"]


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("share", [20, 12])
def test_links_that_run_ahead_by_their_reserves_take_as_long_as_predicted(count: int, share: int) -> None:
    model = llama(48)
    plan = planned(model, *[model.skeleton.bytes // share] * count)
    assert counted_seconds(model, plan) == pytest.approx(max(of(plan, "transfer_bytes").values()) / LINK, rel=0.1)


def test_one_stretch_of_layers_for_each_accelerator_is_predicted_as_slow_as_it_is() -> None:
    model = llama(24)
    names = [layer.name for layer in model.layers if layer.name.startswith("layers.")]
    device_map: dict[str, DeviceId] = {"embed": 0, "norm": 1, "head": 1}
    for place, name in enumerate(names):
        device_map |= {name: CPU, f"{name}.norm1": place // 12}
    hardware = {"devices": [{"memory": "1TB"}] * 2, "host": {"memory": "8TB"}, "rates": FAST}
    given = {"max_memory": {"0": "1GB", "1": "1GB", "cpu": "8GB"}, "hardware": hardware, "generate": {}}
    plan = make_plan(model, {**given, "device_map": device_map, "storage": {"io": "direct"}})
    assert seconds(plan) == pytest.approx(counted_seconds(model, plan), rel=0.02)
    assert seconds(plan) > 0.9 * sum(of(plan, "transfer_bytes").values()) / LINK, "hardly better than one link"


def test_layers_take_turns_and_parts_of_them_stay_on_each_accelerator() -> None:
    model = llama(24)
    plan = planned(model, 5 * 10**8, 5 * 10**8)
    turns = layers_on(plan)
    changes = sum(before != after for before, after in pairwise(turns))
    assert changes > len(turns) // 2
    for device in (0, 1):
        budget = plan.budgets[device]
        assert budget is not None
        assert 0.9 * budget < plan.devices[device].weights + plan.devices[device].reserve <= budget
    least, most = sorted(of(plan, "transfer_bytes").values())
    assert most < 1.25 * least, "as even as whole layers can be"


def test_links_with_a_root_in_common_take_what_that_takes() -> None:
    model = llama(24)
    apart, shared = planned(model, 10**9, 10**9), planned(model, 10**9, 10**9, root="30GB")
    assert seconds(shared) == pytest.approx(sum(of(shared, "transfer_bytes").values()) / (30 * 10**9))
    assert seconds(apart) < seconds(shared) < seconds(planned(model, 10**9))


def test_the_least_seconds_of_what_was_measured_are_those_of_the_slowest_link() -> None:
    plan = planned(llama(24), 5 * 10**8, 5 * 10**8)
    streamed = sum(of(plan, "transfer_bytes").values())
    assert lower_bound_seconds(plan, streamed_bytes=streamed, storage_bytes=0) == pytest.approx(
        max(of(plan, "transfer_bytes").values()) / LINK
    )


def test_layers_that_share_a_tensor_stay_together() -> None:
    tensors = {"embed.w": 20, **{f"l.{index}.w": 20 for index in range(4)}, "head.w": 20}
    model = outline(tensors, tied=[["embed.w", "head.w"]])
    shares = share_layers(model, model.layers, {0: 50, 1: 50})
    (together,) = (layers for layers in shares.values() if any(layer.name == "embed" for layer in layers))
    assert {"embed", "head"} <= {layer.name for layer in together}
    assert sorted(layer.name for layers in shares.values() for layer in layers) == sorted(
        layer.name for layer in model.layers
    )


def test_the_screen_shows_each_link() -> None:
    plan = planned(llama(24), 10**9, 10**9)
    assert "side by side" in render(plan)
    assert "side by side" not in render(planned(llama(24), 10**9))


def random_model(draw: random.Random) -> Outline:
    count = draw.randrange(2, 14)
    shapes = [draw.choice([1, 2, 4, 8, 16]) * draw.randrange(1, 40) * 10**4 for _ in range(draw.randrange(1, 7))]
    tensors = {f"l.{index}.{place}.w": size for index in range(count) for place, size in enumerate(shapes)}
    tensors = {"embed.w": draw.randrange(1, 60) * MB, **tensors, "head.w": draw.randrange(1, 60) * MB}
    return outline(tensors, classes={f"l.{index}": "Layer" for index in range(count)}, no_split=["Layer"])


@many
@given(seed=st.integers(0, 10**6))
def test_plans_fit_and_are_never_slower_than_where_one_link_streams(seed: int) -> None:
    draw = random.Random(seed)
    model = random_model(draw)
    count = draw.choice([2, 3, 4])
    rooms = [draw.randrange(1, model.skeleton.bytes // count) for _ in range(count)]
    host = draw.choice([None, model.skeleton.bytes // 2])
    try:
        plan = planned(model, *rooms, host=host, storage="5GB")
    except BudgetError:
        return
    rates = Rates(**plan.rates)
    alone = Search(rates, links=1).optimal(model, plan.budgets)
    assert not alone.computes
    assert lay_out(model, alone, plan.budgets).shortage(tight=True) is not None or (
        seconds(plan) <= forecast(lay_out(model, alone, plan.budgets), Step(), rates).seconds * (1 + 1e-9)
    )
    for device, budget in plan.budgets.items():
        taken = plan.devices[device].weights + plan.devices[device].reserve
        assert budget is None or taken <= budget
    assert set(of(plan, "transfer_bytes")) <= set(of(plan, "reserve"))


BEFORE: Mapping[str, tuple[str, str]] = {
    "plain": ("9e7bc038db54", "559261763754"),
    "tables": ("ddaa09321fd6", "559261763754"),
    "packed": ("f6077024d3b5", "4696cd5f273d"),
}
"""What ``optimal`` came to before links were several, without an accelerator and with one.

On the host alone it is what it comes to since storage waits for room where staging has none beside the part in use, a
tensor that is read ahead takes the host as long as two and a half calls, and the fewest tensors are tried beside the
fewest bytes; of what rests packed since four parts have room, too."""


@pytest.mark.parametrize("kind", BEFORE)
def test_with_one_accelerator_or_none_a_plan_is_what_it_was_before_links_were_several(kind: str) -> None:
    model = llama()
    none: list[dict[DeviceId, int | None]] = [{CPU: room * MB} for room in (350, 600, 1000, 1500, 2000, 3000)]
    one: list[dict[DeviceId, int | None]] = [
        {0: room * MB, CPU: host * MB} for room in (150, 400, 900, 1600, 3000) for host in (0, 500, 3000)
    ]
    if kind == "tables":
        modules = (replace(one, looks_up=one.name == "embed") for one in model.skeleton.modules)
        model = Outline(replace(model.skeleton, modules=tuple(modules)))
    elif kind == "packed":
        model = at_rest(model, {name: size // 2 for name, size in model.sizes.items() if "layers" in name})
        none, one = [{CPU: 600 * MB}], [{0: 400 * MB, CPU: 500 * MB}]
    assert tuple(map(digest, (model, model), (none, one))) == BEFORE[kind]


def digest(model: Outline, cases: list[dict[DeviceId, int | None]]) -> str:
    """Return what stands for the placements under all these budgets."""
    checksum = sha256()
    for budgets in cases:
        placement = Search().optimal(model, {**budgets, DISK: None})
        summary = [sorted(placement.homes.items()), str(placement.main), sorted(placement.packed)]
        checksum.update(json.dumps(summary).encode())
    return checksum.hexdigest()[:12]


def unlike(model: Outline, *devices: tuple[int, str | None], **rates: str) -> Plan:
    """Return the plan on accelerators with these budgets and links; null: the link that all have."""
    given = {str(index): str(room) for index, (room, _) in enumerate(devices)} | {"cpu": str(model.skeleton.bytes)}
    listed = [{"memory": "1TB", **({"host_to_device": link} if link else {})} for _, link in devices]
    hardware = {"devices": listed, "host": {"memory": "8TB"}, "rates": FAST | rates}
    config = {"max_memory": given, "device_map": "optimal", "hardware": hardware, "generate": {}}
    return make_plan(model, {**config, "storage": {"io": "direct"}})


def test_a_faster_link_brings_more_and_both_take_about_as_long() -> None:
    model, room = llama(48), 10**9
    alike, mixed = unlike(model, (room, None), (room, None)), unlike(model, (room, None), (room, "5GB"))
    streamed = sum(of(mixed, "transfer_bytes").values())
    took = {0: mixed.devices[0].transfer_bytes / LINK, 1: mixed.devices[1].transfer_bytes / (5 * 10**9)}
    assert seconds(mixed) == pytest.approx(max(took.values()))
    assert seconds(mixed) == pytest.approx(streamed / (30 * 10**9), rel=0.2), "as links of 25 and 5 GB bring together"
    assert seconds(alike) == pytest.approx(max(of(alike, "transfer_bytes").values()) / LINK)
    assert seconds(alike) < seconds(mixed)
    assert lower_bound_seconds(mixed, streamed_bytes=streamed, storage_bytes=0) == pytest.approx(seconds(mixed))


def test_links_of_their_own_that_are_alike_are_as_one_rate_of_all() -> None:
    model, room = llama(24), 10**9
    own, shared = unlike(model, (room, "25GB"), (room, "25GB")), unlike(model, (room, None), (room, None))
    assert (own.homes, own.execution, own.forecast) == (shared.homes, shared.execution, shared.forecast)


@pytest.mark.parametrize("slow", [0, 1])
def test_a_link_that_hardly_brings_anything_is_left_to_layers_that_stay(slow: int) -> None:
    model, room = llama(24), 5 * 10**8
    plan = unlike(model, *((room, "1MB" if index == slow else None) for index in (0, 1)))
    assert set(of(plan, "transfer_bytes")) == {1 - slow}
    assert plan.devices[slow].weights > room / 2
    assert seconds(plan) == pytest.approx(plan.devices[1 - slow].transfer_bytes / LINK)


def test_a_memory_with_a_rate_of_its_own_is_read_at_it() -> None:
    model = llama(24)
    rates = {"host_to_device": "1TB", "device": "100GB"}
    weight_bytes = model.skeleton.bytes
    config = {"max_memory": {"0": str(weight_bytes), "1": str(weight_bytes)}, "device_map": "balanced", "generate": {}}
    listed = [{"memory": "1TB", "name": "RTX 4090"}, {"memory": "1TB", "rates": {"device": "25GB"}}]
    hardware = {"devices": listed, "host": {"memory": "8TB"}, "rates": FAST | rates}
    plan = make_plan(model, {**config, "hardware": hardware})
    read = plan.used_bytes
    assert seconds(plan) == pytest.approx(int(read[0]) / 10**11 + int(read[1]) / (25 * 10**9))
    assert of(plan, "rates") == {
        0: {"host_to_device": 10**12, "device": 10**11},
        1: {"host_to_device": 10**12, "device": 25 * 10**9},
    }
    shown = render(plan)
    assert "0 (RTX 4090)" in shown
    assert "1 1.00 TB from the host and 25.00 GB from its memory" in shown


@many
@given(seed=st.integers(0, 10**6))
def test_plans_over_unlike_links_fit_and_are_never_slower_than_over_one(seed: int) -> None:
    draw = random.Random(seed)
    model, count = random_model(draw), draw.choice([2, 3])
    devices = [
        (draw.randrange(1, model.skeleton.bytes // count), draw.choice([None, "1GB", "6GB", "50GB"]))
        for _ in range(count)
    ]
    try:
        plan = unlike(model, *devices)
    except BudgetError:
        return
    rates = plan.known_rates
    alone = Search(rates, links=1).optimal(model, plan.budgets)
    assert lay_out(model, alone, plan.budgets).shortage(tight=True) is not None or (
        seconds(plan) <= forecast(lay_out(model, alone, plan.budgets), Step(), rates).seconds * (1 + 1e-9)
    )
    for device, budget in plan.budgets.items():
        taken = plan.devices[device].weights + plan.devices[device].reserve
        assert budget is None or taken <= budget


@pytest.mark.parametrize("swift", [0, 1])
@pytest.mark.parametrize("share", [0.9, 1.2, 1.5])
def test_where_nothing_streams_the_fastest_memory_is_filled_first(swift: int, share: float) -> None:
    model = llama(24)
    whole, largest = model.skeleton.bytes, max(layer.bytes for layer in model.layers)
    room = round(whole / share) + largest
    listed = [{"memory": "1TB", "rates": {"device": "1TB" if index == swift else "100GB"}} for index in (0, 1)]
    config = {"max_memory": {"0": str(room), "1": str(room)}, "device_map": "optimal", "generate": {}}
    plan = make_plan(model, {**config, "hardware": {"devices": listed, "host": {"memory": "8TB"}, "rates": FAST}})
    assert plan.forecast["streamed_bytes_per_token"] == 0
    assert plan.devices[1 - swift].weights <= max(0, whole - room) + 2 * largest
    assert plan.devices[swift].weights > 0.6 * whole
