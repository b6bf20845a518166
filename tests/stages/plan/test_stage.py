from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.decoding import decode
from offstage.pipeline.errors import BudgetError, ConfigError
from offstage.stages.machine.host_memory import Host
from offstage.stages.plan import options
from offstage.stages.plan.checks import require_process_room
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.placement import all_homes, fold
from offstage.stages.plan.plan import Plan, plan_of
from offstage.stages.plan.policies.whole_layers import sequential
from offstage.stages.plan.stage import PlanStage
from offstage.stages.units import CPU, DISK
from tests.stages.plan.plans import make_plan, of
from tests.stages.plan.skeletons import outline, stack


def config(**changes: Any) -> dict[str, Any]:
    base = {"max_memory": {"cpu": "30"}, "device_map": "auto", "device_map_overrides": {}, "hardware": {}}
    return {**base, "generate": {}, **changes}


def two_accelerators(size: str = "1GB") -> dict[str, Any]:
    return {"devices": [{"memory": size}, {"memory": size}]}


@pytest.mark.parametrize(
    ("changes", "key", "words"),
    [
        ({"max_memory": {"cpu": "10gb"}}, "max_memory.cpu", "'10gb' is not a size"),
        ({"max_memory": {"0": "-1GB"}}, "max_memory.0", "is not a size"),
        ({"max_memory": {"gpu": "1GB"}}, "max_memory.gpu", "'gpu' is not a device"),
        ({"device_map": "balancd"}, "device_map", "did you mean 'balanced'"),
        ({"device_map": "/nowhere/map.json"}, "device_map", "can't be read"),
        ({"device_map": {"a": "gpu"}}, "device_map.a", "'gpu' is not a device"),
        ({"device_map": {}}, "device_map", "the map is empty"),
        ({"device_map": None}, "device_map", "no policy"),
        ({"device_map": {"cpu_offload_gb": -1}}, "device_map.cpu_offload_gb", "no number of gigabytes"),
        ({"hardware": {"devices": 3}}, "hardware.devices", "no list"),
        ({"hardware": {"devices": [{"memory": "24gb"}]}}, "hardware.devices[0].memory", "is not a size"),
        ({"hardware": {"devices": [{}]}}, "hardware.devices[0].memory", "is not a size"),
        ({"hardware": {"devices": [{"memory": 9, "ledger": "x"}]}}, "hardware.devices[0].ledger", "is not a size"),
        ({"hardware": {"host": {"memory": "x"}}}, "hardware.host.memory", "is not a size"),
        ({"hardware": {"devices": ["24GB"]}}, "hardware.devices[0]", "'24GB' is no accelerator; give {memory: SIZE}"),
        ({"hardware": {"host": "64GB"}}, "hardware.host", "'64GB' is no host; give {memory: SIZE}"),
        ({"hardware": {"rates": "3GB"}}, "hardware.rates", "'3GB' is no mapping; give {storage: 3GB}"),
        ({"hardware": {"rates": {"storage": 0}}}, "hardware.rates.storage", "0 is no speed; give 1 or more"),
        ({"hardware": {"rates": {"root": "0GB"}}}, "hardware.rates.root", "'0GB' is no speed; give 1 or more"),
        ({"hardware": {"rates": {"storge": "1GB"}}}, "hardware.rates.storge", "did you mean 'storage'"),
        ({"device_map_overrides": {"a": "x"}}, "device_map_overrides.a", "'x' is not a device"),
    ],
)
def test_a_bad_config_is_named_with_its_key(changes: dict[str, Any], key: str, words: str) -> None:
    (fault,) = PlanStage().check(config(**changes))
    assert fault.key == key
    assert words in fault.message


def test_all_faults_are_reported_together() -> None:
    faulty = config(max_memory={"cpu": "x", "0": "y"}, device_map="z", device_map_overrides={"a": "b"})
    assert len(list(PlanStage().check(faulty))) == 4


@pytest.mark.parametrize(("content", "words"), [("{", "no JSON"), ("[]", "no map"), ('{"a": "b"}', "device")])
def test_a_bad_map_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    path = tmp_path / "map.json"
    path.write_text(content)
    (fault,) = PlanStage().check(config(device_map=str(path)))
    assert words in fault.message


@pytest.mark.parametrize("device_map", ["cpu", 0, "cuda:0", {"": 1}, "sequential", "auto"])
def test_a_good_map_has_no_faults(device_map: Any) -> None:
    assert not list(PlanStage().check(config(device_map=device_map)))


def test_one_device_holds_the_whole_model() -> None:
    assert make_plan(stack(3), config(device_map="cpu")).device_map == {"": "cpu"}


def test_an_absent_accelerator_is_unused_and_said_so() -> None:
    plan = make_plan(stack(3), config(max_memory={"0": "100", "cpu": "20"}))
    assert set(plan.homes.values()) == {"cpu", "disk"}
    assert plan.notes == ("max_memory.0 is unused: no accelerator 0 here",)


def test_an_explicit_map_with_an_absent_accelerator_is_an_error() -> None:
    wrong = config(device_map={"": 3}, hardware=two_accelerators())
    (fault,) = PlanStage().examine(wrong)
    assert fault.key == "device_map"
    with pytest.raises(ConfigError, match="no accelerator 3 here, the last is 1"):
        make_plan(stack(3), wrong)


def test_a_limit_that_no_process_of_a_run_fits_in_is_refused_before_it_imports() -> None:
    told = "^group: 266.00 MB are allowed, and a run's process takes some 313.00 MB beside weights; allow more$"
    with pytest.raises(BudgetError, match=told):
        require_process_room(Host(266 * 10**6, 200 * 10**6, limit="group"))
    require_process_room(Host(313 * 10**6, 200 * 10**6, limit="group"))
    require_process_room(Host(266 * 10**6, 200 * 10**6))


def test_a_map_that_a_run_wrote_gives_the_same_plan(tmp_path: Path) -> None:
    given = {"max_memory": {"0": "20", "1": "10", "cpu": "15"}, "hardware": two_accelerators()}
    first = make_plan(stack(7), config(**given))
    first.save(tmp_path)
    again = make_plan(stack(7), config(**given, device_map=str(tmp_path / "device_map.json")))
    assert (again.homes, again.main_device, again.execution) == (first.homes, first.main_device, first.execution)


def test_an_explicit_map_over_budget_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"max_memory\.cpu.*the least that works is 30 bytes"):
        make_plan(stack(3), config(max_memory={"cpu": "29"}, device_map="cpu"))


def test_a_device_that_max_memory_does_not_list_holds_nothing() -> None:
    plan = make_plan(stack(3), config(max_memory={"1": "100"}, hardware=two_accelerators()))
    assert plan.device_map == {"": 1}


def test_shares_are_of_the_device() -> None:
    plan = make_plan(stack(3), config(max_memory={"0": "50%"}, hardware=two_accelerators("60MB")))
    assert plan.budgets[0] == 30 * 10**6
    assert plan.device_map == {"": 0}


def test_automatic_budgets_are_the_sum_of_their_terms() -> None:
    plan = make_plan(stack(3), config(max_memory=None))
    assert plan.budgets["cpu"] == sum(plan.devices["cpu"].budget_terms.values())
    assert plan.device_map == {"": "cpu"}


def test_a_plan_comes_back_from_its_file(tmp_path: Path) -> None:
    plan = make_plan(stack(7), config(max_memory={"0": "20", "cpu": "15"}, hardware=two_accelerators()))
    plan.save(tmp_path)
    assert decode(Plan, json.loads((tmp_path / "plan.json").read_text())) == plan


def test_layers_that_lie_alike_are_written_once(tmp_path: Path) -> None:
    sizes = {f"model.layers.{i}.experts.{j}.{k}": 10 for i in range(40) for j in range(8) for k in ("up", "down")}
    layers = [f"model.layers.{i}" for i in range(40)]
    model = outline(sizes, classes=dict.fromkeys(layers, "Block"), no_split=["Block"])
    plan = make_plan(model, config(max_memory={"0": "1600", "cpu": "2400"}, hardware=two_accelerators()))
    plan.save(tmp_path)
    data = json.loads(tmp_path.joinpath("plan.json").read_text())
    assert sorted(name for alike in data["layers"] for name in alike["names"]) == sorted(layers)
    assert sum(len(alike["lines"]) for alike in data["layers"]) == 16 * len(data["layers"]) <= 16 * 3
    again = decode(Plan, data)
    assert list(again.tensors) == list(sizes), "in the order of execution"
    assert again.tensors == plan.tensors


def test_a_plan_is_the_layout_that_it_was_made_of() -> None:
    model = outline({"embed.weight": 8, "block.norm": 1, "block.fc.weight": 9, "head.weight": 8},
                    tied=[["embed.weight", "head.weight"]], classes={"block": "Block"}, no_split=["Block"])  # fmt: skip
    layout = lay_out(model, sequential(model, {CPU: 19, DISK: None}), {CPU: 19, DISK: None})
    plan = plan_of(layout, policy="sequential")
    assert plan.tensors == layout.tensors
    assert (plan.homes, plan.execution, plan.serving) == (
        {line.name: line.home for line in layout.lines}, layout.execution, layout.serving,
    )  # fmt: skip
    assert plan.device_map == fold(all_homes(model, layout.placement.homes))
    assert plan.tensors["head.weight"].leader == "embed.weight"


def test_every_tensor_and_every_module_with_tensors_has_a_device() -> None:
    model = outline({"embed.weight": 8, "block.norm": 1, "block.fc.weight": 9, "head.weight": 8},
                    tied=[["embed.weight", "head.weight"]], classes={"block": "Block"}, no_split=["Block"])  # fmt: skip
    plan = make_plan(model, config(max_memory={"cpu": "19"}))
    assert set(plan.homes) == set(model.sizes)
    assert set(plan.execution) == {"embed", "block", "block.fc", "head"}


def test_the_cached_path_imports_no_torch() -> None:
    code = "import sys, offstage.stages.plan.stage; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_choice_reads_map_keys_as_text() -> None:
    assert options.read_choice({"a.b": "cuda:1"}).entries == {"a.b": 1}


def test_cpu_offload_gb_offloads_the_first_layers_parameter_by_parameter() -> None:
    tensors = {"embed.weight": 10**9, **{f"l.{i}.{k}": 10**9 for i in range(3) for k in "ab"}}
    model = outline(tensors, classes={f"l.{i}": "Block" for i in range(3)}, no_split=["Block"])
    changes = {"max_memory": {"0": "7GB", "cpu": "9GB"}, "hardware": two_accelerators("8GB")}
    plan = make_plan(model, config(**changes, device_map={"cpu_offload_gb": 2.5}))
    assert plan.device_map == {"embed": 0, "l.0": "cpu", "l.1.a": "cpu", "l.1.b": 0, "l.2": 0}
    assert (set(plan.execution.values()), of(plan, "reserve")) == ({0}, {0: 2 * 10**9})


def test_a_host_that_cannot_hold_the_plan_is_refused_with_the_most_that_works() -> None:
    weights = outline({f"l.{index}.w": 10**9 for index in range(3)})
    given = config(max_memory={"cpu": "3GB"}, hardware={"host": {"memory": "2GB"}})
    with pytest.raises(BudgetError, match=r"max_memory\.cpu: the plan takes .* on the host .*; the most that works is"):
        make_plan(weights, given)
    make_plan(weights, config(max_memory={"cpu": "3GB"}, hardware={"host": {"memory": "5GB"}}))


def short_host(memory: int) -> Any:
    """Return the plan of 90 MB of weights by a worked-out budget, on a host of so much memory."""
    weights = outline({f"l.{index}.w": 3 * 10**7 for index in range(3)})
    return make_plan(weights, config(max_memory={}, hardware={"host": {"memory": str(memory)}}))


def test_a_worked_out_budget_is_the_least_that_works_where_the_host_has_no_more() -> None:
    roomy, tight = short_host(2 * 10**9), short_host(430 * 10**6)
    assert roomy.devices["cpu"].weights == 9 * 10**7
    assert tight.budgets["cpu"] == tight.devices["cpu"].reserve == 3 * 10**7
    assert sum(tight.devices["cpu"].budget_terms.values()) == 3 * 10**7
    assert sum(tight.predicted["cpu"].values()) < (430 - 75) * 10**6, "libraries are left so much in any case"
    assert any("the host's memory is short" in note for note in tight.notes)
    assert not any("short" in note for note in roomy.notes)


def test_a_host_that_truly_cannot_is_refused_by_its_own_limit_and_the_least_named_works() -> None:
    with pytest.raises(BudgetError) as refused:
        short_host(330 * 10**6)
    message = str(refused.value)
    assert message.startswith("hardware.host.memory: 330.00 MB are free on the host, and the run takes ")
    assert "max_memory" not in message
    (least,) = re.findall(r"the least that works is (\d+) bytes", message)
    assert short_host(int(least)).devices["cpu"].reserve == 3 * 10**7


def test_an_accelerator_that_cannot_hold_the_plan_is_refused() -> None:
    with pytest.raises(
        BudgetError,
        match=r"max_memory\.0: the plan takes 41.94 MB on accelerator 0 .*allocator.*most that works is 21",
    ):
        make_plan(stack(3, 9 * 2**20), config(max_memory={"0": "30MiB"}, hardware=two_accelerators("35MB")))


def test_simulated_accelerators_have_ledgers_and_a_note() -> None:
    devices = {"devices": [{"memory": "9MB"}, {"memory": "9MB", "ledger": "7"}, {"memory": "9MB"}]}
    plan = make_plan(stack(3), config(max_memory={"0": "20", "1": "20"}, hardware=devices))
    assert of(plan, "simulated") == {0: 20, 1: 7, 2: 0}
    assert plan.notes == ("3 simulated accelerators: times are those of the cpu",)


def test_an_automatic_budget_leaves_room_for_the_libraries() -> None:
    terms = make_plan(stack(3), config(max_memory=None)).devices["cpu"].budget_terms
    assert list(terms) == ["available", "process", "libraries", "request", "margin"]
    assert -100 * 10**6 <= terms["libraries"] <= -80 * 10**6, "75 MB is what a mixture needs"
