"""Which weights may come by blocks of rows, when they do, and what the least is then."""

from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, strategies as st
from torch import nn

from offstage.pipeline.errors import BudgetError
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.empty_init.skeleton import PackedProducts, PackedSpec
from offstage.stages.machine.row_products import LEAST_ROWS
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement, resident_bytes
from offstage.stages.plan.reserves import block_sizes, divisible, may_divide, possible_dtypes
from offstage.stages.units import CPU, DISK
from tests.stages.plan.plans import make_plan

WIDTH, WORDS = 16, 8200
HEAD, BIAS = WORDS * WIDTH * 4, WORDS * 4
LEAST = LEAST_ROWS * WIDTH * 4
SMALL = (WIDTH + 1) * WIDTH * 4
"""The bytes of the other layer."""


class Tuned(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def outline(*, head: nn.Module | None = None, exact: tuple[str, ...] = ("float32",)) -> Outline:
    with init_empty_weights():
        layers = nn.Linear(WIDTH, WIDTH), head or nn.Linear(WIDTH, WORDS, bias=False)
    return described(*layers, exact=exact)


@cache
def deep(wide: int) -> Outline:
    with init_empty_weights():
        layers = nn.Linear(WIDTH, wide), nn.Linear(wide, WIDTH), nn.Linear(WIDTH, WORDS)
    return described(*layers, exact=("float32",))


def described(*layers: nn.Module, exact: tuple[str, ...]) -> Outline:
    import torch

    outline = Outline(describe(nn.Sequential(*layers), call=lambda m: m(torch.zeros(1, WIDTH))))
    return replace(outline, exact=lambda: exact)


def plan(model: Outline, budget: int, device_map: Any = "optimal", **storage: Any) -> Any:
    return make_plan(
        model,
        {
            "max_memory": {"cpu": budget},
            "device_map": device_map,
            "hardware": {"devices": [], "host": {"memory": "10GB"}},
            "storage": {"io": "direct", **storage},
            "model": {},
        },
    )


def test_a_linear_layer_of_many_rows_is_divisible_in_dtypes_that_are_exact() -> None:
    assert divisible(outline()) == {"1.weight"}
    assert divisible(outline(exact=())) == frozenset()
    with init_empty_weights():
        assert divisible(outline(head=Tuned(WIDTH, WORDS))) == frozenset()


def test_what_rests_packed_is_divisible_where_rows_can_be_had_alone() -> None:
    model = outline()
    for by_row in (True, False):
        packed = PackedSpec("q", 100, 10, by_row=by_row)
        tensors = [replace(t, packed=packed) if t.name == "1.weight" else t for t in model.skeleton.tensors]
        names = divisible(replace(model, skeleton=replace(model.skeleton, tensors=tuple(tensors))))
        assert names == ({"1.weight"} if by_row else frozenset())


def test_what_is_multiplied_as_it_rests_is_divisible_and_never_asked_for() -> None:
    plain = outline(exact=())
    packed = PackedProducts("", (("uint8", (WORDS, 17)),), None, False, ("1.weight",))
    skeleton = plain.skeleton
    for by_rows in (True, False):
        modules = [replace(m, multiplies=False, multiplies_packed=by_rows and m.name == "1") for m in skeleton.modules]
        model = replace(plain, skeleton=replace(skeleton, modules=tuple(modules), products=(packed,)))
        for asked in (pytest.fail, None):
            assert divisible(replace(model, exact=asked)) == ({"1.weight"} if by_rows else frozenset())
            assert may_divide(replace(model, exact=asked)) == by_rows
        assert possible_dtypes(model) == []


@pytest.mark.parametrize("bias", [True, False])
def test_the_least_is_a_block_and_what_is_beside_it_instead_of_the_weight(bias: bool) -> None:
    with init_empty_weights():
        head = nn.Linear(WIDTH, WORDS, bias=bias)
    for model, least in (
        (outline(head=head), LEAST + bias * BIAS),
        (outline(head=head, exact=()), HEAD + bias * BIAS),
    ):
        with pytest.raises(BudgetError, match=f"the least that works is {least} bytes"):
            plan(model, least - 1)
        assert bool(plan(model, least).block_rows) == bool(divisible(model))


def test_blocks_are_as_large_as_two_have_room_beside_what_stays_and_whole_where_the_weight_has() -> None:
    model = outline()
    for budget, rows in (
        (LEAST, LEAST_ROWS),
        (2 * LEAST - 1, LEAST_ROWS),
        (4 * LEAST + SMALL, 2 * LEAST_ROWS),
        (HEAD - 1, 2 * LEAST_ROWS),
        (HEAD, 0),
    ):
        rows_of = plan(model, budget).block_rows
        assert rows_of == ({"1.weight": rows} if rows else {}), budget
        assert block_sizes(model, rows_of) == ({HEAD: rows * WIDTH * 4} if rows else {})


@pytest.mark.parametrize("order", [(WORDS, 2 * WORDS), (2 * WORDS, WORDS)])
def test_of_weights_of_the_same_bytes_the_largest_block_counts(order: tuple[int, int]) -> None:
    """As of a layer that widens and the one after it."""
    with init_empty_weights():
        layers = [nn.Linear(2 * WORDS * WIDTH // rows, rows, bias=False) for rows in order]
    model = Outline(describe(nn.Sequential(*layers), rehearsed=False))
    names = [f"{number}.weight" for number in range(2)]
    assert {model.sizes[name] for name in names} == {2 * HEAD}
    assert block_sizes(model, dict.fromkeys(names, LEAST_ROWS)) == {2 * HEAD: 2 * LEAST}


def test_what_is_mapped_is_used_where_it_lies() -> None:
    assert plan(outline(), LEAST, io="mmap").block_rows == {}


def listening(model: Outline) -> tuple[Outline, list[str]]:
    """Return ``model``, and what grows each time that it is asked which products are exact."""
    asked: list[str] = []

    def exact() -> list[str]:
        asked.append("float32")
        return asked

    return replace(model, exact=exact), asked


@pytest.mark.parametrize("policy", ["optimal", "balanced", "sequential", {"": "disk"}])
def test_what_is_exact_is_asked_only_where_the_largest_weight_has_no_room(policy: Any) -> None:
    model, asked = listening(outline())
    for budget in (HEAD, HEAD + 1, 2 * HEAD, 10**9):
        plan(model, budget, policy)
        assert not asked, budget
    plan(model, HEAD - 1, policy)
    assert asked


def test_it_is_asked_where_a_map_leaves_too_little_room_however_large_the_budget() -> None:
    model, asked = listening(deep(100_000))
    resident = sum(size for name, size in model.sizes.items() if not name.startswith("2"))
    device_map = {"": "cpu", "2": "disk"}
    plan(model, resident + HEAD + BIAS, device_map)
    assert not asked
    assert plan(model, resident + HEAD + BIAS - 1, device_map).block_rows
    assert asked


def test_it_is_never_asked_of_a_model_without_such_weights() -> None:
    model, asked = listening(outline(head=nn.Linear(WIDTH, LEAST_ROWS)))
    with pytest.raises(BudgetError):
        plan(model, 1)
    assert not asked


@given(
    away=st.lists(st.booleans(), min_size=6, max_size=6),
    budget=st.integers(0, 8 * HEAD),
    wide=st.sampled_from((100, 2000, 9000)),
)
def test_what_is_kept_is_the_same_as_if_it_were_asked_at_once(away: list[bool], budget: int, wide: int) -> None:
    model = deep(wide)
    homes = dict(zip(model.sizes, (DISK if one else CPU for one in away), strict=True))
    placement = Placement(homes, CPU)
    blocks = {
        name: LEAST_ROWS * model.sizes[name] // model.skeleton.by_name[name].shape[0] for name in divisible(model)
    }
    parts: dict[str, int] = {}
    for name in (name for name, home in homes.items() if home == DISK):
        module = name.partition(".")[0]
        parts[module] = parts.get(module, 0) + blocks.get(name, model.sizes[name])
    least, layers = max(parts.values(), default=0), lay_out(model, placement).layer_reserves
    left = budget - resident_bytes(model, homes).get(CPU, 0)
    kept = {CPU: max(least, min(layers[CPU], left))} if parts else {}
    assert lay_out(model, placement, {CPU: budget, DISK: None}).reserves == kept
    short = lay_out(model, placement, {CPU: budget, DISK: None}).shortage(tight=True)
    assert (short is None) == (least <= left)
    assert short is None or short.reserve == least
