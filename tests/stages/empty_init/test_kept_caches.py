from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, DynamicCache, T5Config, T5ForConditionalGeneration

from offstage.stages.empty_init.activation_peaks import weigh
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.empty_init.kept_caches import new_cache
from offstage.stages.empty_init.skeleton import CacheSpec
from tests.stages.empty_init.test_describe import CONFIGS, on_meta


class Block(nn.Module):
    """Keeps as much of each token in itself as its ``width``, and once its state."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(8, width)
        self.kept: Any = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        positions = self.linear(hidden)
        self.kept = positions, hidden[:, 0] + 1
        return hidden + positions.sum(dim=-1, keepdim=True)


class Keeping(nn.Module):
    """A model whose blocks keep what they need for the next token in themselves; it returns none of it."""

    def __init__(self, *widths: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.blocks = nn.ModuleList(map(Block, widths))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden[:, -1]


def test_what_blocks_keep_in_themselves_is_told_of_each_kind_also_of_those_that_are_not_run() -> None:
    with init_empty_weights():
        model = Keeping(4, 4, 6, 4, 4, 6)
    assert weigh(model, ["Block"]).caches == (
        CacheSpec(("blocks.0", "blocks.1", "blocks.3", "blocks.4"), state_bytes=8 * 4, position_bytes=4 * 4),
        CacheSpec(("blocks.2", "blocks.5"), state_bytes=8 * 4, position_bytes=6 * 4),
    )
    assert all(block.kept is None for block in model.blocks), "the model is as it was"
    (known,) = weigh(model, ()).caches
    assert known == CacheSpec(("",), state_bytes=6 * 8 * 4, position_bytes=(4 * 4 + 2 * 6) * 4), "no block is named"


def test_a_model_is_given_the_cache_that_generate_would_give_it() -> None:
    with init_empty_weights():
        others = BertModel(BertConfig()), T5ForConditionalGeneration(T5Config()), nn.Linear(2, 2)
    (given,) = new_cache(on_meta(CONFIGS["Llama"])).values()
    assert isinstance(given, DynamicCache)
    assert [new_cache(model) for model in others] == [{}, {}, {}]


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_the_cache_is_in_the_dtype_of_the_model(name: str) -> None:
    (whole,), (half,) = (
        weigh(on_meta(CONFIGS[name]).to(dtype), ["LlamaDecoderLayer", "MixtralDecoderLayer"]).caches
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert whole.position_bytes == 2 * half.position_bytes > 0
