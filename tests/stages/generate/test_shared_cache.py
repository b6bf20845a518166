"""Forwards of several positions over one cache: each sees what lies before it, and writes in its turn."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from offstage.stages.dispatch.streaming.lockstep import Shared
from offstage.stages.generate.shared_cache import LayerView, strange_layer, take_back, view_of, why_not_shared

CONFIG = transformers.Gemma3TextConfig(
    num_hidden_layers=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
)


def states(first: int, count: int) -> torch.Tensor:
    """Return keys or values of so many positions, each with its number in it, of shape (1, 1, count, 1)."""
    return torch.arange(first, first + count, dtype=torch.float32).reshape(1, 1, count, 1)


def filled(positions: int) -> DynamicCache:
    cache = DynamicCache(config=CONFIG)
    for layer in range(2):
        cache.update(states(0, positions), states(0, positions), layer)
    cache.activate_past_recording()
    return cache


def no_turn(_shared: Shared) -> None:
    raise AssertionError("nothing is waited for")


@pytest.mark.parametrize("before", [2, 9])
def test_each_position_sees_what_it_sees_in_plain_decoding(before: int) -> None:
    shared, plain = filled(before), filled(before)
    views = [view_of(shared, number, no_turn) for number in range(3)]
    for number, view in enumerate(views):
        place = before + number
        for layer in range(2):
            assert view.get_seq_length(layer) == place
            assert view.get_mask_sizes(1, layer) == plain.get_mask_sizes(1, layer)
            cached, wanted = (one.update(states(place, 1), states(place, 1), layer) for one in (view, plain))
            assert all(torch.equal(*pair) and pair[0].is_contiguous() for pair in zip(cached, wanted, strict=True))
        plain.crop(0)
    take_back(shared, 2)
    plain = filled(before + 1)
    for layer in range(2):
        cached, wanted = (one.update(states(77, 1), states(77, 1), layer)[0] for one in (shared, plain))
        assert torch.equal(cached, wanted)


def test_a_position_waits_until_the_one_before_has_written() -> None:
    layer, waited = DynamicLayer(), []
    layer.update(states(0, 3), states(0, 3))
    first, second = (LayerView(layer, 3 + number, waited.append) for number in range(2))
    assert first.position < (0,) < (10**9,) < second.position
    with pytest.raises(RuntimeError, match=r"position 4 have come before those of the one before it"):
        second.update(states(4, 1), states(4, 1))
    assert waited == [second]
    first.update(states(3, 1), states(3, 1))
    assert second.position < (0,)
    assert second.update(states(4, 1), states(4, 1))[0].flatten().tolist() == [0, 1, 2, 3, 4]


def test_what_can_not_be_taken_back_is_named() -> None:
    assert strange_layer(filled(2)) is None
    assert strange_layer(DynamicCache(config=transformers.Mamba2Config(num_hidden_layers=1))) == "LinearAttentionLayer"
    assert strange_layer((DynamicLayer(), DynamicSlidingWindowLayer(4))) == "tuple"


@pytest.mark.parametrize(
    ("config", "architecture", "words"),
    [
        ("LlamaConfig", "LlamaForCausalLM", None),
        ("T5Config", "T5ForConditionalGeneration", None),
        ("MambaConfig", "MambaForCausalLM", "keeps what it has read as LinearAttentionLayer"),
        ("RwkvConfig", "RwkvForCausalLM", "has a cache of a kind of its own"),
        ("WhisperConfig", "WhisperForConditionalGeneration", "may decode a part of a recording twice"),
        ("LlamaConfig", "OneOfItsOwn", None),
    ],
)
def test_models_are_told_apart_by_their_config(
    config: str, architecture: str, words: str | None, tmp_path: Path
) -> None:
    getattr(transformers, config)().save_pretrained(tmp_path)
    assert why_not_shared(architecture, tmp_path) == (words and f"{architecture} {words}")
