"""Which weights may come by blocks of rows, when they do, and what the least is then."""

from dataclasses import replace
from typing import Any

import pytest
from torch import nn

from pipeline.errors import BudgetError
from stages.empty_init.describe import describe
from stages.empty_init.init import init_empty_weights
from stages.empty_init.skeleton import PackedSpec
from stages.machine.row_ranges import LEAST_ROWS
from stages.plan.outline import Outline
from stages.plan.row_blocks import block_sizes, divisible
from tests.stages.plan.plans import make_plan

WIDTH, WORDS = 16, 8200
HEAD, BIAS = WORDS * WIDTH * 4, WORDS * 4
LEAST = LEAST_ROWS * WIDTH * 4


class Tuned(nn.Linear):
    def forward(self, x: Any) -> Any:
        return super().forward(x) * 2


def outline(*, head: nn.Module | None = None, exact: tuple[str, ...] = ("float32",)) -> Outline:
    import torch

    with init_empty_weights():
        layers = [nn.Linear(WIDTH, WIDTH), head or nn.Linear(WIDTH, WORDS, bias=False)]
        model = nn.Sequential(*layers)
    found = Outline(describe(model, call=lambda m: m(torch.zeros(1, WIDTH))))
    return replace(found, divisible=divisible(found, exact))


def plan(model: Outline, budget: int, **storage: Any) -> Any:
    return make_plan(
        model,
        {
            "max_memory": {"cpu": budget},
            "hardware": {"devices": [], "host": {"memory": "10GB"}},
            "storage": {"io": "direct", **storage},
            "model": {},
        },
    )


def test_a_linear_layer_of_many_rows_is_divisible_in_dtypes_that_are_exact() -> None:
    assert outline().divisible == {"1.weight"}
    assert outline(exact=()).divisible == frozenset()
    with init_empty_weights():
        assert outline(head=Tuned(WIDTH, WORDS)).divisible == frozenset()


def test_what_rests_packed_is_divisible_where_rows_can_be_had_alone() -> None:
    model = outline()
    for by_row in (True, False):
        packed = PackedSpec("q", 100, 10, by_row=by_row)
        tensors = [replace(t, packed=packed) if t.name == "1.weight" else t for t in model.skeleton.tensors]
        found = divisible(Outline(replace(model.skeleton, tensors=tuple(tensors))), ["float32"])
        assert found == ({"1.weight"} if by_row else frozenset())


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
        assert bool(plan(model, least).block_rows) == bool(model.divisible)


def test_blocks_are_as_large_as_two_have_room_and_whole_where_the_weight_has() -> None:
    model = outline()
    for budget, rows in (
        (LEAST, LEAST_ROWS),
        (2 * LEAST - 1, LEAST_ROWS),
        (4 * LEAST, 2 * LEAST_ROWS),
        (HEAD - 1, 4 * LEAST_ROWS),
        (HEAD, 0),
    ):
        found = plan(model, budget).block_rows
        assert found == ({"1.weight": rows} if rows else {}), budget
        assert block_sizes(model, found) == ({HEAD: rows * WIDTH * 4} if rows else {})


def test_what_is_mapped_is_used_where_it_lies() -> None:
    assert plan(outline(), LEAST, io="mmap").block_rows == {}
