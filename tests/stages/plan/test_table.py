from __future__ import annotations

import re

import pytest

from offstage.stages.machine.rates import Rates
from offstage.stages.plan.memory_needs import BlockCache, MemoryNeeds
from offstage.stages.plan.plan import DevicePlan, Plan
from offstage.stages.plan.table import ranges, render, rows
from offstage.stages.units import DeviceId
from tests.stages.plan.plans import make_plan, plan_by_hand, predicted
from tests.stages.plan.skeletons import outline


def planned() -> Plan:
    tensors = {"model.embed.weight": 10, **{f"model.layers.{i}.weight": 10 for i in range(12)}, "head.weight": 20}
    model = outline(tensors)
    config = {"max_memory": {"0": "70", "cpu": "50"}, "device_map": "sequential", "device_map_overrides": {}}
    return make_plan(model, {**config, "hardware": {"devices": [{"memory": "1GB"}]}, "generate": {}})


def test_numbered_modules_on_one_device_are_one_row() -> None:
    plan = planned()
    assert [(row.name, row.device, row.bytes) for row in rows(plan)] == [
        ("model.embed", 0, 10),
        ("model.layers.0-3", 0, 40),
        ("model.layers.4-8", "cpu", 50),
        ("model.layers.9-11", "disk", 30),
        ("head", "disk", 20),
    ]


def test_a_model_on_one_device_is_one_row() -> None:
    model = outline({"a.weight": 1, "b.weight": 2})
    config = {"max_memory": {"cpu": "3"}, "device_map": "auto", "device_map_overrides": {}, "hardware": {}}
    plan = make_plan(model, {**config, "generate": {}})
    assert [(row.name, row.bytes) for row in rows(plan)] == [("the model", 3)]


def test_the_table_shows_modules_and_devices() -> None:
    plan = planned()
    text = render(plan)
    assert "model.layers.4-8" in text
    assert "unlimited" in text


def cells(text: str) -> dict[str, list[str]]:
    """Return the table of devices in what a plan shows: its columns by their titles."""
    table = next(part for part in text.split("\n\n") if "of budget" in part).splitlines()
    ends = [match.end() for match in re.finditer(r"\S+(?: \S+)*", table[0])]
    begins = [0, *ends[:-1]]
    cut = [[line[begin:end].strip() for begin, end in zip(begins, ends, strict=True)] for line in table]
    return {title: column for title, *column in map(list, zip(*cut, strict=True))}


def with_a_request(**budgets: str) -> Plan:
    """Return the plan of four blocks that keep a cache, on two accelerators and a host."""
    names = [f"model.layers.{index}" for index in range(4)]
    sizes = {f"{name}.weight": 100_000_000 for name in names}
    model = outline(sizes, classes=dict.fromkeys(names, "Block"), no_split=["Block"])
    config = {"max_memory": budgets, "device_map": "sequential", "device_map_overrides": {}, "generate": {}}
    machine = {"devices": [{"memory": "1GB"}, {"memory": "1GB"}], "host": {"memory": "4GB"}}
    caches = tuple(BlockCache(name, 30_000_000, 20_000_000) for name in names)
    return predicted(
        model, make_plan(model, {**config, "hardware": machine}), MemoryNeeds(7_000_000, 3, caches=caches), Rates()
    )


def test_what_each_device_holds_is_shown_by_what_it_is_for_and_the_sum() -> None:
    plan = with_a_request(**{"0": "200MB", "1": "100MB", "cpu": "300MB"})
    shown = cells(render(plan))
    titles = ["MB on", "weights", "reserve", "of budget", "KV cache", "activations", "process", "allocator", "sum"]
    assert list(shown) == titles
    assert shown["MB on"] == ["0", "1", "cpu", "disk"]
    assert (shown["weights"], shown["reserve"]) == (["100.0", "100.0", "200.0", ""], ["100.0", "", "", ""])
    assert shown["of budget"] == ["200.0", "100.0", "300.0", "unlimited"]
    assert shown["KV cache"] == ["90.0", "30.0", "", ""]
    for place, device in enumerate((0, 1, "cpu")):
        ledger = plan.devices[device].own_parts
        assert float(shown["sum"][place]) == pytest.approx(sum(ledger.values()) / 1e6, abs=0.05)
        parts = [shown[title][place] for title in titles if title not in ("MB on", "of budget", "sum")]
        assert sum(float(part or 0) for part in parts) == pytest.approx(float(shown["sum"][place]), abs=0.3)


def test_a_cache_is_on_the_device_that_computes_its_block_and_in_the_sum() -> None:
    plan = with_a_request(**{"0": "200MB", "1": "200MB", "cpu": "0"})
    assert cells(render(plan))["KV cache"] == ["60.0", "60.0", "", ""]
    assert [plan.devices[device].ledger["cache"] for device in (0, 1, "cpu")] == [60 * 10**6, 60 * 10**6, 0]


def test_a_full_table_of_devices_has_eighty_columns_at_most() -> None:
    ledger = dict.fromkeys(["weights", "reserve", "expert_cache", "cache", "activations", "process"], 987_654_321)
    devices: dict[DeviceId, DevicePlan] = {
        device: DevicePlan(987_654_321, 987_654_321, ledger=ledger) for device in (*range(16), "cpu", "disk")
    }
    shown = render(plan_by_hand({"a": 0}, devices={**devices, "disk": DevicePlan(None, 0, ledger={"weights": 1})}))
    assert max(map(len, shown.splitlines())) == 80


def test_numbers_are_folded_into_ranges() -> None:
    assert [ranges(numbers) for numbers in ([], [3], [2, 0, 1, 5, 7, 6])] == ["", "3", "0-2,5-7"]


def test_a_tied_tensor_counts_once_in_a_row() -> None:
    model = outline({"embed.weight": 8, "body.weight": 1, "head.weight": 8}, tied=[("embed.weight", "head.weight")])
    config = {"max_memory": {"cpu": "9"}, "device_map": "auto", "device_map_overrides": {}, "hardware": {}}
    plan = make_plan(model, {**config, "generate": {}})
    assert [(row.name, row.bytes) for row in rows(plan)] == [("the model", 9)]


def spread(name: str, count: int) -> Plan:
    """A plan that has every other one of ``count`` layers on the accelerator, and the others on the host."""
    model = outline({f"{name}.{i}.weight": 10 for i in range(count)})
    homes = {f"{name}.{i}": i % 2 and "cpu" for i in range(count)}
    config = {"max_memory": {"0": "500", "cpu": "500"}, "device_map": homes, "device_map_overrides": {}}
    return make_plan(model, {**config, "hardware": {"devices": [{"memory": "1GB"}]}, "generate": {}})


def test_many_ranges_are_told_by_what_they_span_and_how_many_they_are() -> None:
    plan = spread("model.layers", 40)
    names = {(row.name, row.device): row.bytes for row in rows(plan)}
    assert names == {
        ("model.layers.0-38 (20 of 40)", 0): 200,
        ("model.layers.1-39 (20 of 40)", "cpu"): 200,
    }
    assert plan.device_map["model.layers.38"] == 0, "each of them is in the map"
    plan = spread("model.layers", 8)
    assert {row.name for row in rows(plan)} == {"model.layers.0,2,4,6", "model.layers.1,3,5,7"}


def test_no_line_of_the_table_is_wider_than_eighty_letters() -> None:
    plan = spread("a_module_of_a_long_name." * 8 + "layers", 40)
    first, *table = render(plan).partition("\n\n")[0].splitlines()
    assert first.startswith("module")
    assert all(len(line) == 80 for line in table)
    assert all("…" in line and ".layers.0-38 (20 of 40)" in line.replace("1-39", "0-38") for line in table)
