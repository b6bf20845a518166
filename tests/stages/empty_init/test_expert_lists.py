import json
from collections.abc import Callable

import pytest
import torch
from torch import nn
from transformers import (
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    SwitchTransformersConfig,
    SwitchTransformersForConditionalGeneration,
)

from offstage.pipeline.decoding import decode
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.rehearsal import rehearse
from offstage.stages.empty_init.skeleton import FILE_NAME, Skeleton
from tests.long_form import in_ci
from tests.stages.listed_experts import EXPERTS, LAYERS, STYLES, TOP, Block, HitExperts, Mixture, mixture

LISTS = [f"layers.{layer}.mlp.experts" for layer in range(LAYERS)]


def described(model: nn.Module, **options: bool) -> Skeleton:
    return describe(model, call=lambda m: m(torch.ones((1, 8), dtype=torch.long)), **options)


@pytest.mark.parametrize("style", STYLES)
def test_a_rehearsal_decides_which_experts_are_called_where_code_asks_for_values(style: type[HitExperts]) -> None:
    with init_empty_weights():
        skeleton = described(Mixture(style))
    assert skeleton.unrehearsed is None
    assert skeleton.expert_lists == dict.fromkeys(LISTS, TOP)
    assert "layers.3.attention" in skeleton.calls
    assert skeleton.calls.index("layers.0.mlp.router") < skeleton.calls.index("layers.0.mlp.shared.gate")
    called = [name for name in dict.fromkeys(skeleton.calls) if ".mlp.experts." in name]
    assert len(called) == LAYERS * TOP * 3
    assert called[0].endswith(".gate"), "in the order of calls, which isn't that of registration"


def test_each_leaf_of_an_expert_is_known_to_be_of_it() -> None:
    expert_of = described(mixture()).expert_of
    assert expert_of["layers.1.mlp.experts.7.up"] == "layers.1.mlp.experts.7"
    assert len(expert_of) == LAYERS * EXPERTS * 3
    assert not any("shared" in name or "attention" in name for name in expert_of)


def test_without_a_rehearsal_lists_are_known_by_their_looks_and_a_decoders_layers_are_none() -> None:
    assert described(mixture(), rehearsed=False).expert_lists == dict.fromkeys(LISTS, EXPERTS)


def test_a_config_says_how_many_experts_a_token_uses_where_no_rehearsal_did() -> None:
    model = mixture()
    model.config = type("Config", (), {"num_experts_per_tok": 3})()
    assert set(described(model, rehearsed=False).expert_lists.values()) == {3}


SWITCH = SwitchTransformersConfig(
    d_model=32, d_ff=48, d_kv=8, num_heads=4, num_layers=2, num_decoder_layers=2, num_sparse_encoder_layers=1,
    num_sparse_decoder_layers=1, num_experts=8, vocab_size=64, decoder_start_token_id=0,
)  # fmt: skip
NLLB = NllbMoeConfig(
    d_model=32, encoder_ffn_dim=48, decoder_ffn_dim=48, encoder_layers=2, decoder_layers=2, num_experts=8,
    encoder_attention_heads=4, decoder_attention_heads=4, encoder_sparse_step=2, decoder_sparse_step=2,
    vocab_size=64, max_position_embeddings=64, decoder_start_token_id=2,
)  # fmt: skip


@pytest.mark.parametrize("rehearsed", in_ci(True, of=[True, False]))
@pytest.mark.parametrize(
    ("kind", "config", "lists"),
    [
        (SwitchTransformersForConditionalGeneration, SWITCH, ["block.1.layer.1.mlp", "block.1.layer.2.mlp"]),
        (NllbMoeForConditionalGeneration, NLLB, ["layers.1.ffn", "layers.1.ffn"]),
    ],
    ids=["Switch", "NLLB-MoE"],
)
def test_mixtures_of_transformers_whose_experts_are_a_list_of_modules_are_known(
    kind: type[nn.Module], config: object, lists: list[str], rehearsed: bool
) -> None:
    with init_empty_weights():
        model = kind(config)
    skeleton = describe(model, rehearsed=rehearsed)
    assert rehearsed == (skeleton.unrehearsed is None)
    list_names = {name.removeprefix("model.") for name in skeleton.expert_lists}
    assert list_names == {f"encoder.{lists[0]}.experts", f"decoder.{lists[1]}.experts"}


class AllCalled(HitExperts):
    """Calls every expert, with no token if none is routed to it, as the first mixtures of transformers did."""

    def mix(self, x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            token, rank = torch.where(chosen == index)
            out.index_add_(0, token, expert(x[token]) * weights[token, rank, None])
        return out


class Dense(nn.Module):
    """A decoder without experts, whose two layers lie beside a matrix of two rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = nn.functional.one_hot(x, 8).float()
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("build", [lambda: Mixture(AllCalled), Dense], ids=["mixture", "decoder"])
def test_what_every_forward_calls_is_no_list_of_experts(build: Callable[[], nn.Module]) -> None:
    assert described(build()).unrehearsed is None
    assert described(build()).expert_lists == {}


def test_a_decoder_that_was_not_rehearsed_has_no_list_of_experts() -> None:
    assert described(Dense(), rehearsed=False).expert_lists == {}


def test_a_list_of_experts_survives_the_file(tmp_path) -> None:
    skeleton = described(mixture())
    skeleton.save(tmp_path)
    assert decode(Skeleton, json.loads((tmp_path / FILE_NAME).read_text())) == skeleton


@pytest.mark.parametrize("style", STYLES)
def test_one_token_is_rehearsed_as_many_are(style: type[HitExperts]) -> None:
    seen = rehearse(Block(style), lambda m: m(torch.ones(1, 128)), decides=True)
    assert sum(name.count(".") == 2 and ".experts." in name for name in seen.order) == TOP


class Counting(nn.Module):
    """Asks for values that weights have no part in, and for what a comparison of its result says."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        lengths = (tokens > 0).sum(-1).tolist()
        out = self.layer(nn.functional.one_hot(tokens, 4).float())
        kept = out[(out > 0.5).all(-1)]
        assert sum(lengths) == 3
        assert not torch.isnan(out).any()
        return kept[: len(lengths)]


def test_what_no_weight_has_a_part_in_is_computed_in_a_rehearsal_that_decides() -> None:
    shapes = []
    rehearse(Counting(), lambda m: shapes.append(m(torch.tensor([[0, 1, 2, 3]])).shape), decides=True)
    assert shapes == [(1, 4)]


def test_a_forward_that_goes_by_a_computed_number_is_not_rehearsed() -> None:
    class Branching(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if float(super().forward(x).sum()) > 0 else -x

    skeleton = describe(Branching(4, 4), call=lambda m: m(torch.ones(1, 4)))
    assert skeleton.unrehearsed is not None
    assert "_local_scalar_dense" in skeleton.unrehearsed
