"""A mixture on a real accelerator whose experts wait on the host and on disk: the bits of the model that lies there."""

from pathlib import Path

import pytest
import torch

import offstage
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
