"""The field's functions and accelerate's, asked the same: what they return, and how they are called."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, T5Config, T5ForConditionalGeneration

import offstage

pytest.importorskip("accelerate")
HOOKS, BIG_MODELING, MODELING, OFFLOAD = MODULES = tuple(
    importlib.import_module(f"accelerate.{name}")
    for name in ("hooks", "big_modeling", "utils.modeling", "utils.offload")
)
THEIRS = {name: getattr(module, name) for module in MODULES for name in vars(module) if name in offstage.__all__}


def gpt2(**changes: object) -> nn.Module:
    config = GPT2Config(vocab_size=64, n_positions=16, n_embd=8, n_layer=2, n_head=2, **changes)
    with offstage.init_empty_weights():
        return GPT2LMHeadModel(config)


def t5() -> nn.Module:
    config = T5Config(vocab_size=64, d_model=8, d_kv=4, d_ff=16, num_layers=2, num_heads=2)
    with offstage.init_empty_weights():
        return T5ForConditionalGeneration(config)


def custom() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4)), nn.Embedding(3, 2))
    model[0].register_buffer("mask", torch.ones(3), persistent=False)
    return model.half()


@pytest.mark.parametrize("name", sorted(THEIRS))
def test_it_is_called_the_same_way(name: str) -> None:
    ours, theirs = (
        [(parameter.name, parameter.kind, parameter.default) for parameter in inspect.signature(f).parameters.values()]
        for f in (getattr(offstage, name), THEIRS[name])
    )
    assert ours == theirs


@pytest.mark.parametrize("make", [gpt2, t5, custom])
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("calculate_maximum_sizes", ()),
        ("find_tied_parameters", ()),
        ("has_offloaded_params", ()),
    ],
)
def test_it_says_the_same_of_a_model(make: Callable[[], nn.Module], name: str, arguments: tuple) -> None:
    model = make()
    ours, theirs = getattr(offstage, name)(model, *arguments), THEIRS[name](model, *arguments)
    assert (dict(ours) if isinstance(ours, dict) else ours) == (dict(theirs) if isinstance(theirs, dict) else theirs)


def test_it_says_the_same_of_a_model_that_is_not_tied() -> None:
    model = gpt2(tie_word_embeddings=False)
    for name in ("calculate_maximum_sizes", "find_tied_parameters"):
        assert getattr(offstage, name)(model) == THEIRS[name](model)
    for dtype in (None, torch.float16):  # where tied, ours tells the size of each name in full
        assert offstage.compute_module_sizes(model, dtype) == THEIRS["compute_module_sizes"](model, dtype)


@pytest.mark.parametrize("size", ["0MB", "100kB", "1.5GB", "200KiB", "30GIB", "2gib", 12])
def test_it_reads_the_same_size(size: int | str) -> None:
    assert offstage.get_max_memory({"cpu": size}) == THEIRS["get_max_memory"]({"cpu": size})


@pytest.mark.parametrize("offload", ["cpu_offload", "disk_offload"])
def test_it_saves_the_same_of_an_offloaded_model(tmp_path: Path, offload: str) -> None:
    states, seen = [], []
    for library in (offstage, BIG_MODELING):
        torch.manual_seed(0)
        folder = [str(tmp_path / library.__name__)] if offload == "disk_offload" else []
        model = getattr(library, offload)(custom(), *folder)
        functions = offstage if library is offstage else MODELING
        states.append(functions.get_state_dict_offloaded_model(model))
        with functions.align_module_device(model[0]):
            seen.append(model[0].weight.clone())
        entries = functions.get_state_dict_from_offload(model[0], "0.weight", {"0.bias": None, "1.1.bias": None})
        states[-1]["entries"] = entries["0.bias"]
    assert states[0].keys() == states[1].keys()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert torch.equal(*seen)


def test_accelerate_takes_back_the_weights_that_were_offloaded(tmp_path: Path) -> None:
    source, model = custom(), custom()
    offstage.offload_state_dict(tmp_path, source.state_dict())
    MODELING.load_offloaded_weights(model, offstage.OffloadedWeightsLoader(save_folder=tmp_path).index, str(tmp_path))
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in source.state_dict().items())
