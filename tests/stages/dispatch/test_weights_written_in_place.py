"""Models whose own code changes their weights: right where these are resident, refused by name where they wait."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, RwkvConfig

from offstage.pipeline.errors import ConfigError
from offstage.stages.dispatch.loaded_model import load
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.init import init_empty_weights
from tests.e2e.pipelines import dispatched_model
from tests.long_form import in_ci

TOKENS = torch.tensor([[5, 6, 7, 8]])


def rwkv(folder: Path, *, rescale_every: int, layers: int) -> Any:
    """Write a small RWKV and return what transformers makes of it. Each layer rehearses token by token, for seconds."""
    config = RwkvConfig(
        vocab_size=96, hidden_size=32, num_hidden_layers=layers, rescale_every=rescale_every, context_length=64
    )
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def rescaled(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Return the folder of an RWKV that divides the weights of its last layer, and the model."""
    folder = tmp_path_factory.mktemp("rescaled")
    return folder, rwkv(folder / "rwkv", rescale_every=1, layers=2)


@pytest.mark.long_form
def test_a_rescaled_rwkv_is_right_where_it_is_resident(rescaled: tuple[Path, Any]) -> None:
    folder, wanted = rescaled
    with load(folder / "rwkv", cache=folder / "outputs/cache", device_map="cpu") as first, torch.no_grad():
        assert torch.equal(first.model(TOKENS).logits, wanted(TOKENS).logits)
    with load(folder / "rwkv", cache=folder / "outputs/cache", device_map="cpu") as again, torch.no_grad():
        assert torch.equal(again.model(TOKENS).logits, wanted(TOKENS).logits)
        assert torch.equal(again.model(TOKENS).logits, wanted(TOKENS).logits)


@pytest.mark.long_form
def test_a_rescaled_rwkv_on_disk_is_refused_before_anything_runs(rescaled: tuple[Path, Any]) -> None:
    folder, _ = rescaled
    words = r"rwkv\.blocks\.1\.attention\.output\.weight.*1 more.*disk.*'rwkv' changes it in place"
    for io in ("direct", "mmap"):
        with pytest.raises(ConfigError, match=words):
            load(folder / "rwkv", cache=folder / "outputs/cache", device_map="disk", storage={"io": io})
        with pytest.raises(ConfigError, match=words):
            dispatched_model(folder / "rwkv", folder / "outputs", device_map="disk", storage={"io": io})


@pytest.mark.long_form
@pytest.mark.parametrize("rescale_every", in_ci(100, of=[0, 100]))
def test_an_rwkv_whose_weights_it_leaves_as_they_are_streams(rescale_every: int, tmp_path: Path) -> None:
    """It leaves them where it divides none of them, and where it divides each by one, as it has few layers."""
    wanted = rwkv(tmp_path / "rwkv", rescale_every=rescale_every, layers=2)
    with load(tmp_path / "rwkv", cache=tmp_path / "cache", device_map="disk") as loaded, torch.no_grad():
        assert torch.equal(loaded.model(TOKENS).logits, wanted(TOKENS).logits)


class Writer(nn.Module):
    """Changes its weight in place, in the ways that code does."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(8, 8), how
        self.register_buffer("steps", torch.zeros(1))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        with torch.no_grad():
            if self.how == "in place":
                weight.mul_(2)
            elif self.how == "a view":
                weight[0].add_(1)
            elif self.how == "its data":
                weight.data.mul_(0.5)
            elif self.how == "an item":
                weight[1, 1] = 3
            elif self.how == "a result":
                torch.add(weight, 1, out=weight)
            elif self.how == "a list":
                torch._foreach_mul_([weight], 2.0)
            elif self.how == "a view of a buffer":
                self.steps[:1].view(1).add_(weight[0, 0])
        return self.layer(torch.nn.functional.one_hot(tokens % 8, 8).float())


WAYS = ["in place", "a view", "its data", "an item", "a result", "a list"]


@pytest.mark.parametrize("how", WAYS)
def test_a_rehearsal_sees_every_way_to_change_a_weight(how: str) -> None:
    with init_empty_weights():
        model = Writer(how)
    assert describe(model.eval()).written == {"layer.weight": ""}


def test_a_rehearsal_sees_that_a_view_of_a_buffer_is_changed() -> None:
    with init_empty_weights():
        model = Writer("a view of a buffer")
    assert describe(model.eval()).written == {"steps": ""}


def test_a_rehearsal_sees_no_change_where_there_is_none() -> None:
    with init_empty_weights():
        model = Writer("not at all")
    skeleton = describe(model.eval())
    assert skeleton.written == {}
    assert skeleton.unrehearsed is None


class Counter(Writer):
    """Notes on itself that it was called."""

    called = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.called = True
        self.register_buffer("extra", self.layer.weight.sum())
        return super().forward(tokens)


def test_a_rehearsal_leaves_the_model_as_it_was() -> None:
    with init_empty_weights():
        model = Counter("not at all").eval()
    before = [(dict(vars(module)), dict(module._buffers)) for module in model.modules()]
    describe(model)
    assert [(dict(vars(module)), dict(module._buffers)) for module in model.modules()] == before


class Unrehearsed(nn.Module):
    """Refuses fake tensors, so that nothing is known of it before its first pass; changes a weight inside a call."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.layer, self.factor = Layer(factor), factor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        float(self.layer.weight.sum())
        return self.layer(torch.nn.functional.one_hot(tokens % 8, 8).float())


class Layer(nn.Linear):
    def __init__(self, factor: float) -> None:
        super().__init__(8, 8)
        self.factor = factor

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.mul_(self.factor)
        return super().forward(values)


def module_config(folder: Path, factor: float) -> dict[str, Any]:
    torch.manual_seed(0)
    save_file(Unrehearsed().state_dict(), folder / "model.safetensors")
    target = f"{__name__}.Unrehearsed"
    return {"kind": "module", "path": str(folder), "no_split": None, "_target_": target, "factor": factor}


def test_the_first_pass_refuses_a_change_that_would_be_lost(tmp_path: Path) -> None:
    node = module_config(tmp_path, 2.0)
    model = dispatched_model(tmp_path, tmp_path / "out", model=node, device_map="disk", storage={"io": "direct"})
    for _call in range(2):
        with pytest.raises(ConfigError, match=r"'layer\.weight' is streamed, and the model's own code changes it"):
            model(TOKENS)


def test_a_write_that_changes_nothing_is_none(tmp_path: Path) -> None:
    node = module_config(tmp_path, 1.0)
    model = dispatched_model(tmp_path, tmp_path / "out", model=node, device_map="disk", storage={"io": "direct"})
    reference = Unrehearsed(1.0).requires_grad_(False)
    reference.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(model(TOKENS), reference(TOKENS))
