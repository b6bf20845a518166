"""Plans for mixtures whose experts are modules in a list: they count those that a token is routed to."""

from functools import cache

import pytest

from stages.empty_init.describe import describe
from stages.machine.rates import Rates
from stages.plan.expert_slots import ROOMY, Routing
from stages.plan.outline import Outline
from stages.plan.placement import Placement, reserves
from stages.plan.plan import Plan
from stages.plan.predict import Work, predict
from stages.plan.serving import serve
from stages.units import CPU, DISK
from tests.stages.empty_init.test_expert_lists import described
from tests.stages.listed_experts import EXPERTS, LAYERS, TOP, WIDTH, mixture

EXPERT = 3 * 4 * WIDTH * 2 * WIDTH
"""The bytes of one expert."""


@cache
def outline() -> Outline:
    return Outline(described(mixture()))


def planned(here: Outline, *, tokens: int = 1) -> dict[str, float | int | str]:
    """Return what is forecast for a token where all is on disk."""
    homes = dict.fromkeys(here.sizes, DISK)
    execution = {name.rpartition(".")[0]: CPU for name in homes}
    plan = Plan("explicit", CPU, homes, homes, execution, serve(here, homes, execution, io="direct"), {}, {}, 0, {})
    return dict(predict(here, plan, Work(0, 0), Rates(), routing=Routing(tokens)).forecast)


def dense_bytes(here: Outline) -> int:
    return sum(size for name, size in here.sizes.items() if name not in here.listed and not name.startswith("embed"))


def test_a_token_is_expected_to_bring_the_experts_that_it_is_routed_to() -> None:
    assert planned(outline())["streamed_bytes_per_token"] == dense_bytes(outline()) + LAYERS * TOP * EXPERT


def test_two_tokens_of_a_pass_share_some_of_their_experts() -> None:
    routed = planned(outline(), tokens=2)["streamed_bytes_per_token"] - dense_bytes(outline())
    assert routed == pytest.approx(LAYERS * EXPERT * EXPERTS * (1 - (1 - TOP / EXPERTS) ** 2), rel=1e-6)


def test_all_experts_are_expected_where_nothing_says_how_many_a_token_uses() -> None:
    here = Outline(describe(mixture(), rehearsed=False))
    assert planned(here)["streamed_bytes_per_token"] == dense_bytes(here) + LAYERS * EXPERTS * EXPERT


def test_the_reserve_of_a_layer_is_for_two_of_its_experts() -> None:
    skeleton = describe(mixture(), no_split=["Block"], rehearsed=False)
    here = Outline(skeleton)
    kept = reserves(here, Placement(dict.fromkeys(here.sizes, DISK), CPU))
    block = sum(size for name, size in here.sizes.items() if name.startswith("layers.0.") and name not in here.listed)
    assert kept == {CPU: block + ROOMY * EXPERT}


def test_the_layers_that_the_fields_functions_see_have_all_their_experts() -> None:
    here = Outline(describe(mixture(), no_split=["Block"], rehearsed=False), gathers=False, routes=False)
    kept = reserves(here, Placement(dict.fromkeys(here.sizes, DISK), CPU))
    assert kept[CPU] > EXPERTS * EXPERT
