from __future__ import annotations

from collections.abc import Mapping

import pytest

from offstage.pipeline.errors import BudgetError
from offstage.stages.plan.checks import require_fit
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import execution_devices, fold
from offstage.stages.plan.policies import POLICIES
from tests.stages.plan.skeletons import outline, stack

Budgets = Mapping[int | str, int | None]


def placed(model: Outline, budgets: Budgets, policy: str = "sequential") -> dict[str, int | str]:
    budgets = {"disk": None, **budgets}
    placement = POLICIES[policy](model, budgets)
    require_fit(lay_out(model, placement, budgets))
    return fold(model, placement.homes)


THREE = {"a.weight": 4_000_000, "b.weight": 4_000_000, "layer.weight": 4_000_000, "layer.bias": 4_000}


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (6_000_000, {"": "disk"}),
        (8_003_999, {"": "disk"}),
        (8_004_000, {"a": "cpu", "b": "disk", "layer": "disk"}),
        (10_000_000, {"a": "cpu", "b": "disk", "layer": "disk"}),
        (12_004_000, {"": "cpu"}),
    ],
)
def test_the_reserve_for_the_largest_offloaded_layer_is_kept(budget: int, expected: dict[str, str]) -> None:
    assert placed(outline(THREE), {"cpu": budget}) == expected


@pytest.mark.parametrize("policy", POLICIES)
def test_layers_that_exactly_fill_two_accelerators_stay_there(policy: str) -> None:
    assert set(placed(stack(4), {0: 20, 1: 20, "cpu": 100}, policy).values()) == {0, 1}


def test_balanced_evens_out_layers_of_different_size() -> None:
    model = outline({f"layers.{index}.weight": size for index, size in enumerate([50, 10, 10, 10, 10, 10])})
    assert placed(model, {0: 100, 1: 100}, "balanced") == {"layers.0": 0} | {f"layers.{i}": 1 for i in range(1, 6)}


def test_balanced_low_0_uses_the_first_accelerator_last() -> None:
    assert placed(stack(4), {0: 40, 1: 20, 2: 20}, "balanced_low_0") == {
        "layers.0": 1, "layers.1": 1, "layers.2": 2, "layers.3": 2,
    }  # fmt: skip
    assert placed(stack(5), {0: 40, 1: 20, 2: 20}, "balanced_low_0")["layers.0"] == 0


def test_sequential_never_goes_back_to_an_earlier_device() -> None:
    model = outline({"a.weight": 5, "b.weight": 20, "c.weight": 5})
    assert placed(model, {0: 12, 1: 30}) == {"a": 0, "b": 1, "c": 1}


def test_an_accelerator_too_small_for_anything_holds_nothing_and_the_next_is_the_main_device() -> None:
    placement = POLICIES["sequential"](stack(9), {0: 9, 1: 30, "cpu": 100, "disk": None})
    assert (placement.main, lay_out(stack(9), placement).layer_reserves) == (1, {1: 10})


def test_an_accelerator_that_holds_only_the_reserve_still_computes() -> None:
    placement = POLICIES["sequential"](stack(9), {0: 15, "cpu": 100, "disk": None})
    assert set(placement.homes.values()) == {"cpu"}
    assert set(execution_devices(stack(9), placement).values()) == {0}


def test_where_no_accelerator_can_hold_the_reserve_the_cpu_computes() -> None:
    placement = POLICIES["sequential"](stack(3), {0: 9, "cpu": 100, "disk": None})
    assert (placement.main, set(placement.homes.values())) == ("cpu", {"cpu"})


def test_a_budget_that_cannot_hold_its_reserve_is_refused_with_the_least_that_works() -> None:
    with pytest.raises(BudgetError, match=r"max_memory\.0: 9 B .* least that works is 10 bytes"):
        placed(stack(3), {0: 9, "cpu": 9})
    with pytest.raises(BudgetError, match=r"max_memory\.cpu: 0 B .* least that works is 10 bytes"):
        placed(stack(3), {"cpu": 0})
    assert placed(stack(3), {"cpu": 10}) == {"": "disk"}


def test_a_disk_with_a_budget_keeps_it() -> None:
    with pytest.raises(BudgetError, match=r"max_memory\.disk: 5 B .* least that works is 20 bytes"):
        placed(stack(3), {"cpu": 20, "disk": 5})


def test_gaps_and_zero_budgets_are_fine() -> None:
    assert placed(stack(3), {0: 0, 3: 30, "cpu": 0}) == {"": 3}


@pytest.mark.parametrize("policy", POLICIES)
def test_tied_tensors_lie_together_wherever_their_layers_are(policy: str) -> None:
    model = outline({"embed.weight": 10, **{f"l.{i}.weight": 10 for i in range(4)}, "head.weight": 10},
                    tied=[["embed.weight", "head.weight"]])  # fmt: skip
    device_map = placed(model, {0: 30, 1: 20}, policy)
    assert device_map["embed"] == device_map["head"]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_policy_leaves_its_arguments_alone_and_gives_the_same_answer_again(policy: str) -> None:
    budgets: dict[int | str, int | None] = {0: 25, 1: 35, "cpu": 10, "disk": None}
    first = POLICIES[policy](stack(9), budgets)
    assert budgets == {0: 25, 1: 35, "cpu": 10, "disk": None}
    assert POLICIES[policy](stack(9), budgets) == first
