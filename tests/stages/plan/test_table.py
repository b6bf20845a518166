from __future__ import annotations

from offstage.stages.plan.plan import Plan
from offstage.stages.plan.table import ranges, render, rows
from tests.stages.plan.plans import make_plan
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
