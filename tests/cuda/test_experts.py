"""A mixture on a real accelerator whose experts wait on the host and on disk: the bits of the model that lies there."""

from pathlib import Path

import pytest
import torch

import offstage
from offstage.stages.dispatch.experts.expert_stack import _multiply_one
from tests.stages.dispatch.experts.mixtures import CONFIGS, mixture

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


@pytest.mark.parametrize("experts", ["grouped_mm", "batched_mm", "eager"])
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_that_are_brought_answer_like_those_that_lie_there(name: str, experts: str, tmp_path: Path) -> None:
    model = mixture(name)
    model.save_pretrained(tmp_path / "checkpoint")
    whole = sum(parameter.nbytes for parameter in model.parameters())
    model = model.to("cuda")
    try:
        model.set_experts_implementation(experts)
    except ValueError as error:  # of an older transformers
        pytest.skip(str(error))
    tokens = torch.arange(2, 82, device="cuda").reshape(2, 40)
    budgets = {0: whole // 2, "cpu": whole // 4}
    with (
        torch.inference_mode(),
        offstage.load(tmp_path / "checkpoint", max_memory=budgets, cache=tmp_path, batch_size=2, max_length=64) as ours,
    ):
        ours.model.set_experts_implementation(experts)
        assert torch.equal(ours.model(tokens).logits, model(tokens).logits)
        given = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(ours.model.generate(tokens, **given), model.generate(tokens, **given))
        assert ours.traffic.expert_misses > 0


SHAPES = [(8, 64, 128), (32, 512, 256), (128, 256, 512)]
"""Experts, and the rows and columns of each one's matrix."""


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("tokens", [4, 60, 900])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_grouped_product_by_some_experts_has_the_bits_of_the_one_by_all(
    shape: tuple[int, int, int], tokens: int, dtype: torch.dtype
) -> None:
    """That is what slots of experts go by: those of one batch are a stretch of what a resident model has."""
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("torch has no grouped product")
    count, inside, outside = shape
    generator = torch.Generator("cuda").manual_seed(0)
    stack = torch.randn(count, inside, outside, generator=generator, device="cuda", dtype=dtype)
    rows = torch.randn(tokens, inside, generator=generator, device="cuda", dtype=dtype)
    edges = torch.linspace(0, tokens, count + 1, device="cuda").to(torch.int32)
    try:
        whole = torch._grouped_mm(rows, stack, offs=edges[1:])
    except RuntimeError as error:  # of a device or a dtype that has none
        pytest.skip(str(error))
    half = count // 2
    middle = int(edges[half])
    first = torch._grouped_mm(rows[:middle], stack[:half], offs=edges[1 : half + 1])
    second = torch._grouped_mm(rows[middle:], stack[half:], offs=edges[half + 1 :] - middle)
    assert torch.equal(torch.cat([first, second]), whole)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 16, 200])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_batched_product_of_two_has_the_bits_of_one_of_all_experts(
    shape: tuple[int, int, int], tokens: int, dtype: torch.dtype
) -> None:
    count, inside, outside = shape
    generator = torch.Generator("cuda").manual_seed(0)
    stack = torch.randn(count, inside, outside, generator=generator, device="cuda", dtype=dtype)
    left = torch.randn(count, tokens, inside, generator=generator, device="cuda", dtype=dtype)
    whole = torch.bmm(left, stack)
    for expert in range(0, count, 7):
        assert torch.equal(_multiply_one(torch.bmm, left[expert], stack[expert]), whole[expert])
