"""What calls keep in the modules of a model is each call's own in lockstep, and gone after it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import offstage
from offstage.pipeline.errors import ConfigError
from offstage.stages.dispatch.streaming.module_state import ModuleState
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
from tests.stages.dispatch.streaming.lockstep_grid import WORDS, opened, saved

LENGTHS = (20, 60, 12, 5, 30)
"""Of prompts; beyond 8 tokens the rope of the model is scaled."""


class Total(nn.Module):
    """Adds all that it has seen so far to what it is given, and keeps that by ``keep``."""

    def __init__(self, keep: Callable[[Any, torch.Tensor], None], size: int = 4) -> None:
        super().__init__()
        self.keep = keep
        self.register_buffer("seen", torch.zeros(size))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.keep(self, given.sum(dim=0))
        return given + self.seen[: len(given[0])]


def wide(more: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
    """Return ``more`` with zeros behind it, as long as ``seen``."""
    return nn.functional.pad(more, (0, len(seen) - len(more)))


def set_anew(module: Any, more: torch.Tensor) -> None:
    module.seen = module.seen + wide(more, module.seen)


def register(module: Any, more: torch.Tensor) -> None:
    module.register_buffer("seen", module.seen + wide(more, module.seen))


def add_in_place(module: Any, more: torch.Tensor) -> None:
    module.seen[: len(more)].add_(more)


def set_attribute(module: Any, more: torch.Tensor) -> None:
    module.more = getattr(module, "more", 0) + more
    register(module, module.more)


def delete(module: Any, more: torch.Tensor) -> None:
    seen = module.seen
    del module.seen
    module.register_buffer("seen", more + seen)


def sums(model: nn.Module, given: torch.Tensor) -> torch.Tensor:
    """Return what three forwards over ``given`` come to."""
    return torch.stack([model(given) for _ in range(3)])


def totalling(keep: Callable[[Any, torch.Tensor], None], size: int = 4) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 4), Total(keep, size), nn.Linear(4, 4)).requires_grad_(False)


@pytest.mark.parametrize("keep", [set_anew, register, add_in_place, set_attribute, delete])
def test_what_a_call_writes_no_other_sees_however_it_is_written(keep: Any, tmp_path: Path) -> None:
    model = totalling(keep)
    asked = [torch.randn(rows, 4) for rows in (2, 1, 3, 5)]
    with torch.no_grad():
        sums(model, asked[0])  # all begin with what was there
        wanted = [sums(copy.deepcopy(model), given) for given in asked]
    kept = copy.deepcopy(model[1])
    offstage.disk_offload(model, tmp_path / "offload", execution_device="cpu")
    for _ in range(2):
        answers = offstage.lockstep(model, [partial(sums, model, given) for given in asked], size=3)
        assert all(map(torch.equal, answers, wanted))
        assert vars(model[1]).keys() == vars(kept).keys()
        assert torch.equal(model[1].seen, kept.seen), "later calls see nothing of them"
    assert nn.Module.__setattr__.__module__ == "torch.nn.modules.module"


def test_logits_under_a_rope_that_grows_are_those_alone_and_so_are_later_ones(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama, dynamic rope", torch.float32)
    torch.manual_seed(11)
    asked = [torch.randint(3, WORDS, (1, length)) for length in LENGTHS]

    def logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
        scores = model.generate(ids, max_new_tokens=3, output_logits=True, return_dict_in_generate=True).logits
        return torch.stack(scores)

    wanted = [logits(copy.deepcopy(plain), ids) for ids in asked]
    with opened(tmp_path) as loaded:
        answers = offstage.lockstep(loaded.model, [partial(logits, loaded.model, ids) for ids in asked], size=3)
        assert all(map(torch.equal, answers, wanted))
        assert torch.equal(logits(loaded.model, asked[2]), wanted[2])


def test_a_large_buffer_that_is_changed_in_place_is_refused_by_name_where_another_call_would_see_it(
    tmp_path: Path,
) -> None:
    model = offstage.disk_offload(totalling(add_in_place, 1 << 20), tmp_path / "offload", execution_device="cpu")
    tasks = [partial(sums, model, torch.ones(1, 4))] * 2
    with pytest.raises(ConfigError, match=r"lockstep: .* changes '1.seen' in place, 4194304 bytes .*lockstep=1"):
        offstage.lockstep(model, tasks)
    assert len(offstage.lockstep(model, tasks[:1])) == 1
    assert not model[1].seen.any(), "it is as it was, after an error too"


@pytest.mark.parametrize("inference", [False, True])
def test_a_large_buffer_that_is_changed_in_place_is_put_back_once_no_call_needs_it(
    inference: bool, tmp_path: Path
) -> None:
    with torch.inference_mode(inference):
        model = totalling(add_in_place, 1 << 20)
        plain = copy.deepcopy(model)
        offstage.disk_offload(model, tmp_path / "offload", execution_device="cpu")
    asked = [torch.randn(rows, 4) for rows in (2, 1, 3)]
    with torch.inference_mode():
        wanted = [sums(copy.deepcopy(plain), given) for given in asked]
    streamer = streamer_of(model)
    one_by_one = []
    for given in asked:
        with streamer.passes.alone(), torch.inference_mode():
            one_by_one.append(sums(model, given))
        assert not model[1].seen.any()
    assert all(map(torch.equal, one_by_one, wanted))

    def call(given: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            return sums(model, given)

    answers = offstage.lockstep(model, [partial(call, given) for given in asked], size=1)
    assert all(map(torch.equal, answers, wanted))
    assert not model[1].seen.any()


def streaming_total(folder: Path, keep: Any, size: int) -> nn.Module:
    """Return a dispatched model whose buffer waits on disk as its weights do."""
    model = totalling(keep, size)
    torch.nn.init.normal_(model[1].seen)
    save_file(model.state_dict(), folder / "model.safetensors")
    places = dict.fromkeys(("0", "1", "2"), "disk")
    offload: Any = {"offload_folder": folder / "offload", "offload_buffers": True}
    streamed: nn.Module = offstage.load_checkpoint_and_dispatch(model, folder, device_map=places, **offload)
    assert isinstance(streamed[1].seen, WaitingTensor)
    return streamed


@pytest.mark.parametrize("size", [4, 1 << 20])
@pytest.mark.parametrize("keep", [set_anew, register, set_attribute])
def test_a_buffer_that_streams_is_each_calls_own_once_it_is_set(keep: Any, size: int, tmp_path: Path) -> None:
    model = streaming_total(tmp_path, keep, size)
    plain = totalling(keep, size)
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"))
    asked = [torch.randn(rows, 4) for rows in (2, 1, 3, 5)]
    with torch.no_grad():
        wanted = [sums(copy.deepcopy(plain), given) for given in asked]
    for _ in range(2):
        for given, answer in zip(asked, wanted, strict=True):
            with streamer_of(model).passes.alone(), torch.no_grad():
                assert torch.equal(sums(model, given), answer)
            assert isinstance(model[1].seen, WaitingTensor)
        answers = offstage.lockstep(model, [partial(sums, model, given) for given in asked], size=3)
        assert all(map(torch.equal, answers, wanted))
        assert isinstance(model[1].seen, WaitingTensor)


class Twice(nn.Module):
    """Writes through one name of a buffer and reads through another."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(4))
        self.again = self.kept
        self.first = self.kept[:1]

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        self.kept.add_(given.sum(dim=0))
        return given + self.again + self.first


def test_a_buffer_of_several_names_stays_one(tmp_path: Path) -> None:
    torch.manual_seed(5)
    model = nn.Sequential(nn.Linear(4, 4), Twice(), nn.Linear(4, 4)).requires_grad_(False)
    asked = [torch.randn(rows, 4) for rows in (2, 1, 3)]
    wanted = [sums(copy.deepcopy(model), given) for given in asked]
    offstage.disk_offload(model, tmp_path / "offload", execution_device="cpu")
    answers = offstage.lockstep(model, [partial(sums, model, given) for given in asked], size=3)
    assert all(map(torch.equal, answers, wanted))
    assert not model[1].kept.any()


def test_hooks_that_outputs_are_recorded_by_come_once(tmp_path: Path) -> None:
    plain = saved(tmp_path / "checkpoint", "llama")
    ids = torch.tensor([[5, 6, 7]])

    def layers(model: Any) -> int:
        return len(model(ids, output_hidden_states=True).hidden_states)

    with opened(tmp_path) as loaded:
        for _ in range(2):
            assert offstage.lockstep(loaded.model, [partial(layers, loaded.model)] * 2) == [layers(plain)] * 2


def test_what_is_done_to_a_module_once_is_done_for_all_calls(tmp_path: Path) -> None:
    compiled = list[Callable[[], None]]()

    def compile_once(module: Any, more: torch.Tensor) -> None:
        if not hasattr(module, "compiled"):
            module.compiled = lambda: None
            compiled.append(module.compiled)

    model = offstage.disk_offload(totalling(compile_once), tmp_path / "offload", execution_device="cpu")
    for _ in range(2):
        offstage.lockstep(model, [partial(sums, model, torch.ones(1, 4))] * 3)
    assert compiled == [model[1].compiled]


def test_a_model_that_keeps_nothing_has_nothing_to_exchange(tmp_path: Path) -> None:
    model = saved(tmp_path / "checkpoint", "llama")
    state, written = ModuleState(model), dict[Any, Any]()
    state.begin()
    state.enter(written)
    model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=2, do_sample=False)
    state.leave(written)
    state.end()
    assert not written
