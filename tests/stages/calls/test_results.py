"""What a forward returns, by name, and one vector of each row."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.modeling_outputs import BaseModelOutput

from offstage.pipeline.errors import ConfigError
from offstage.stages.calls.options import ForwardOptions
from offstage.stages.calls.results import kept_cache, named_tensors, pool, select
from tests.stages.dispatch.streaming.lockstep_grid import CONFIGS

A, B = torch.zeros(2, 3, 4), torch.ones(2)


class Pair(NamedTuple):
    left: torch.Tensor
    right: torch.Tensor


@pytest.mark.parametrize(
    ("output", "names"),
    [
        (A, ["output"]),
        ((A,), ["output"]),
        ((A, B), ["output.0", "output.1"]),
        ([A, {"x": B}], ["output.0", "output.1.x"]),
        ({"logits": A, "past_key_values": (B, B), "inner": {"deep": B}}, ["logits", "inner.deep"]),
        (
            BaseModelOutput(last_hidden_state=A, hidden_states=(A, B)),
            ["last_hidden_state", "hidden_states.0", "hidden_states.1"],
        ),
        (Pair(A, B), ["left", "right"]),
        ("no tensor", []),
    ],
)  # fmt: skip
def test_every_tensor_has_a_name(output: Any, names: list[str]) -> None:
    assert [name for name, _ in named_tensors(output)] == names


def test_pooling_counts_what_the_mask_counts_wherever_the_padding_is() -> None:
    hidden = torch.arange(2 * 3 * 1, dtype=torch.float32).reshape(2, 3, 1)
    right, left = torch.tensor([[1, 1, 0], [1, 1, 1]]), torch.tensor([[0, 1, 1], [1, 1, 1]])
    assert pool(hidden, right, "mean").flatten().tolist() == [0.5, 4.0]
    assert pool(hidden, right, "cls").flatten().tolist() == [0.0, 3.0]
    assert pool(hidden, right, "last").flatten().tolist() == [1.0, 5.0]
    assert pool(hidden, left, "mean").flatten().tolist() == [1.5, 4.0]
    assert pool(hidden, left, "cls").flatten().tolist() == [1.0, 3.0]
    assert pool(hidden, left, "last").flatten().tolist() == [2.0, 5.0]


def test_what_is_kept_is_asked_for_by_name() -> None:
    output = {"last_hidden_state": A, "more": {"deep": B}}
    model = torch.nn.Identity()
    assert list(select(model, output, {}, ForwardOptions())) == ["last_hidden_state"]
    assert list(select(model, output, {}, ForwardOptions(outputs=["more"]))) == ["more.deep"]
    kept = select(model, output, {}, ForwardOptions(pooling="mean", outputs=["more.deep", "embeddings"]))
    assert list(kept) == ["more.deep", "embeddings"]
    with pytest.raises(ConfigError, match=r"returns no 'deep'.*; it returns last_hidden_state, more.deep"):
        select(model, output, {}, ForwardOptions(outputs=["deep"]))
    with pytest.raises(ConfigError, match="returned str, with no tensor in it"):
        select(model, "words", {}, ForwardOptions())


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral, which slides"])
def test_what_a_call_keeps_is_taken_by_the_next_one(name: str) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    tokens = torch.arange(3, 9)[None]
    with torch.no_grad():
        whole = model(tokens, use_cache=False)
        first = model(tokens[:, :-1], use_cache=True)
        second = model(tokens[:, -1:], **kept_cache(first), use_cache=True)
    torch.testing.assert_close(second.logits[:, -1], whole.logits[:, -1])
    assert kept_cache(second) == kept_cache(first)
    assert kept_cache(whole) == kept_cache(A) == {}
