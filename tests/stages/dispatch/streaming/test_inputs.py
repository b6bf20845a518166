"""Activations go to where a layer computes, whatever passes between layers, and keys and values stay there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM
from transformers.modeling_outputs import BaseModelOutput

from offstage.stages.calls.results import kept_cache
from offstage.stages.dispatch.dispatch_plan import make_dispatch_plan
from offstage.stages.dispatch.streaming.inputs import move_inputs
from offstage.stages.dispatch.streaming.thread_state import ThreadState
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.units import CPU, DeviceId
from tests.stages.dispatch.fake_accelerators import fake_accelerators, place
from tests.stages.dispatch.streaming.lockstep_grid import CONFIGS
from tests.stages.plan.plans import plan_by_hand

DEVICES: tuple[DeviceId, ...] = (0, 1, CPU)
IDS = torch.zeros(2, 5, dtype=torch.long)


def torch_device(device: DeviceId) -> torch.device:
    return torch.device("cuda", device) if isinstance(device, int) else torch.device("cpu")


def in_turn(skeleton: Skeleton) -> dict[str, DeviceId]:
    """Return where each module computes that holds tensors: block after block on another device."""
    number = dict.fromkeys(name for name in skeleton.by_module for name in [_block(name)])
    devices = {block: DEVICES[turn % len(DEVICES)] for turn, block in enumerate(number)}
    return {module: devices[_block(module)] for module in skeleton.by_module}


def _block(module: str) -> str:
    """Return the name up to its number, or all of it."""
    parts = module.split(".")
    numbered = [place for place, part in enumerate(parts) if part.isdecimal()]
    return ".".join(parts[: numbered[0] + 1]) if numbered else module


def dealt(name: str, *, moves: bool = True) -> tuple[Any, dict[str, DeviceId]]:
    """Return a model whose blocks compute on several devices in turn, and which computes where."""
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name]).eval()
    if name in ("mixtral", "qwen3_moe"):
        model.set_experts_implementation("batched_mm")
    skeleton = describe(model, rehearsed=False)
    execution = in_turn(skeleton)
    homes = {tensor.name: execution[tensor.name.rpartition(".")[0]] for tensor in skeleton.tensors}
    plan = make_dispatch_plan(skeleton, plan_by_hand(homes, execution, main=0))
    entries = {entry: torch_device(device) for entry, device in plan.entries.items()}
    place(model, lambda module: torch_device(execution.get(module, 0)))
    for _ in move_inputs(model, entries, main=torch_device(0)) if moves else ():
        pass
    return model, execution


def kept_on(cache: Any) -> list[torch.device]:
    return [layer.keys.device for layer in cache.layers]


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt2"])
def test_layers_on_devices_in_turn_get_their_inputs_there_and_keep_their_keys_there(name: str) -> None:
    with fake_accelerators():
        model, execution = dealt(name)
        cache: dict[str, Any] = {}
        for ids, seen in ((IDS, 5), (IDS[:, :1], 6), (IDS[:, :1], 7)):
            mask = torch.ones(2, seen, dtype=torch.long)
            out = model(input_ids=ids, attention_mask=mask, **cache, use_cache=True)
            cache = kept_cache(out)
            assert out.logits.device == ids.device, "the output is where the input was"
        blocks = dict.fromkeys(_block(module) for module in execution if _block(module) != module)
        devices = {_block(module): torch_device(device) for module, device in execution.items()}
        (kept,) = cache.values()
        assert kept_on(kept) == [devices[block] for block in blocks]
        assert len(set(kept_on(kept))) == len(DEVICES)
        assert {layer.keys.shape[2] for layer in kept.layers} == {7}, "all that was seen"


def test_an_encoder_and_a_decoder_on_devices_in_turn() -> None:
    with fake_accelerators():
        model, _ = dealt("t5")
        out = model(input_ids=IDS, decoder_input_ids=IDS[:, :1], use_cache=True)
        again = model(
            encoder_outputs=BaseModelOutput(out.encoder_last_hidden_state),
            decoder_input_ids=IDS[:, :1],
            **kept_cache(out),
            use_cache=True,
        )
        (cache,) = kept_cache(again).values()
        assert kept_on(cache.self_attention_cache) == kept_on(cache.cross_attention_cache)
        assert len(set(kept_on(cache.self_attention_cache))) == 2


def test_a_model_that_moves_its_own_inputs_gives_its_output_where_they_were_before() -> None:
    with fake_accelerators():
        model, x = nn.Linear(4, 2), torch.ones(1, 4)
        place(model, lambda _module: torch_device(0))
        for _ in move_inputs(model, {"": torch_device(0)}, main=torch_device(0)):
            pass
        assert model(x).device == x.device
        assert model(x.to(torch_device(0))).device == torch_device(0)


def test_without_moves_such_a_model_fails() -> None:
    with fake_accelerators():
        model, _ = dealt("llama", moves=False)
        with pytest.raises(RuntimeError, match=r"two (different )?devices"):
            model(input_ids=IDS)


class Words(nn.Module):
    """Looks words up, and answers where the model's own code finds them."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(8, 4)

    def forward(self, ids: torch.Tensor) -> str:
        return str(self.words(ids).device)


def test_what_the_host_computes_beside_accelerators_goes_to_the_main_one_at_once() -> None:
    model, ids, elsewhere = Words(), torch.tensor([1, 2]), torch.device("meta")
    hooks = list(move_inputs(model, {"words": torch.device("cpu")}, main=elsewhere))
    assert model(ids) == "meta", "which stands for an accelerator"
    for unhook in hooks:
        unhook()
    assert model(ids) == "cpu"


class Current:
    """The current accelerator of a machine that has two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.index = 0
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("xpu"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: self.index)
        monkeypatch.setattr(torch.accelerator, "set_device_index", partial(setattr, self, "index"))


class Asks(nn.Module):
    """Asks which accelerator is the current one, as a kernel does that doesn't look at its operands."""

    def __init__(self, current: Current, *, fails: bool = False) -> None:
        super().__init__()
        self.current, self.fails, self.seen = current, fails, list[int]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(self.current.index)
        if self.fails:
            raise RuntimeError("it fails")
        return x


def test_what_computes_on_an_accelerator_has_it_as_the_current_one_and_gives_it_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    current = Current(monkeypatch)
    model = nn.Sequential(Asks(current), Asks(current), Asks(current), Asks(current, fails=True))
    entries = {str(place): torch.device("meta", place % 2) for place in range(4)}
    hooks = list(move_inputs(model, entries, main=torch.device("meta", 0)))
    with pytest.raises(RuntimeError, match="it fails"):
        model(torch.ones(1))
    assert [module.seen for module in model] == [[0], [1], [0], [1]]
    assert current.index == 0
    for unhook in hooks:
        unhook()
    with pytest.raises(RuntimeError, match="it fails"):
        model(torch.ones(1))
    assert [module.seen[-1] for module in model] == [0, 0, 0, 0]


def test_calls_that_take_turns_each_have_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    current = Current(monkeypatch)
    with torch.no_grad():  # as calls in lockstep are
        before = ThreadState.current()
        current.index = 1
        with before.in_place():
            assert current.index == 0
        assert current.index == 1
        before.restore()
        assert current.index == 0
