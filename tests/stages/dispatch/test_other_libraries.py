"""What other libraries do to a model that streams: it works, or is refused before anything is computed with noise."""

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import prune
from transformers import AutoConfig, LlamaForCausalLM

import offstage
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
from tests.clients.doors import losses_of, make_llama, plain
from tests.long_form import in_ci

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
ON_DISK = {"": "cpu", "model.layers": "disk", "lm_head": "disk"}
Way = Callable[[Path, Path], Any]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(tmp_path_factory.mktemp("llama"))


def loaded(checkpoint: Path, folder: Path) -> nn.Module:
    cache = checkpoint.with_name("cache")  # what one test finds out of the model the next one knows
    return offstage.load(checkpoint, device_map=ON_DISK, cache=cache, max_length=64).model


def loaded_and_dispatched(checkpoint: Path, folder: Path) -> nn.Module:
    with offstage.init_empty_weights():
        model = LlamaForCausalLM(AutoConfig.from_pretrained(checkpoint))
    return offstage.load_checkpoint_and_dispatch(model.eval(), checkpoint, device_map=ON_DISK)


def dispatched(checkpoint: Path, folder: Path) -> nn.Module:
    return offstage.dispatch_model(plain(checkpoint), ON_DISK, offload_dir=folder)


def on_host(checkpoint: Path, folder: Path) -> nn.Module:
    return offstage.cpu_offload(plain(checkpoint), "cpu")


WAYS: list[Way] = [loaded, loaded_and_dispatched, dispatched]
FIELDS: list[Way] = [loaded_and_dispatched, dispatched]


@pytest.mark.parametrize("way", WAYS)
def test_a_model_can_be_saved(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model = way(checkpoint, tmp_path / "cache")
    model.save_pretrained(tmp_path / "saved")
    assert torch.equal(plain(tmp_path / "saved")(TOKENS).logits, plain(checkpoint)(TOKENS).logits)
    assert torch.equal(model(TOKENS).logits, plain(checkpoint)(TOKENS).logits)


@pytest.mark.parametrize("tied", [False, True], ids=["two", "tied"])
@pytest.mark.parametrize("way", [*WAYS, on_host])
def test_streamed_embeddings_are_read_and_resized(
    way: Way, tied: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ON_DISK, "model.embed_tokens", "disk")
    checkpoint = make_llama(tmp_path / "checkpoint", tie_word_embeddings=tied)
    model, expected = way(checkpoint, tmp_path / "cache"), plain(checkpoint)
    torch.manual_seed(2)
    expected.resize_token_embeddings(80)
    for _ in range(2):
        torch.manual_seed(2)
        model.resize_token_embeddings(80)
        assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) == tied
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, WaitingTensor)


@pytest.mark.parametrize("way", [loaded, loaded_and_dispatched])
def test_what_was_never_in_memory_is_not_offloaded_once_more(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model = way(checkpoint, tmp_path)
    with pytest.raises(ValueError, match=r"is offloaded already, and was never in memory: load the model again"):
        offstage.cpu_offload(model)
    assert torch.equal(model(TOKENS).logits, plain(checkpoint)(TOKENS).logits)


@pytest.mark.parametrize("way", [*WAYS, on_host])
def test_a_change_in_place_names_the_way_that_lasts(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model, expected = way(checkpoint, tmp_path / "cache"), plain(checkpoint)
    module = model.model.layers[0].mlp.up_proj
    refusal = r"give its module a parameter in memory first: module\.weight = "
    with torch.no_grad(), pytest.raises(RuntimeError, match=refusal):
        module.weight.mul_(2)
    module.weight = torch.nn.Parameter(module.weight.detach().clone())
    with torch.no_grad():
        for changed in (module, expected.model.layers[0].mlp.up_proj):
            changed.weight.mul_(2)
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("way", FIELDS)
def test_parameters_without_data_that_are_added_later_are_refused_at_the_first_call(way, checkpoint, tmp_path) -> None:
    model = way(checkpoint, tmp_path)
    model.model.layers[0].mlp.extra = nn.Linear(4, 4, device="meta")
    with pytest.raises(RuntimeError, match=r"'model.layers.0.mlp.extra.weight' is on the meta device and has no data"):
        model(TOKENS)
    del model.model.layers[0].mlp.extra
    assert torch.equal(model(TOKENS).logits, plain(checkpoint)(TOKENS).logits)


@pytest.mark.long_form
@pytest.mark.parametrize("way", in_ci(loaded, of=WAYS))
def test_a_compiled_model_is_cut_at_its_hooks_and_answers(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model = way(checkpoint, tmp_path)
    compiled = torch.compile(model, backend="aot_eager")
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(compiled(TOKENS).logits, plain(checkpoint)(TOKENS).logits)
    assert isinstance(model.lm_head.weight, WaitingTensor)


def test_a_whole_graph_is_refused_with_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    model = torch.compile(WAYS[0](checkpoint, tmp_path), backend="aot_eager", fullgraph=True)
    with torch.no_grad(), pytest.raises(RuntimeError, match="no graph holds them: compile it without fullgraph=True"):
        model(TOKENS)


def adapted(checkpoint: Path, folder: Path) -> torch.Tensor:
    """Save an adapter for the plain model to ``folder``, and return what the model answers with it."""
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(plain(checkpoint), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(folder)
    answer: torch.Tensor = model.eval()(TOKENS).logits
    return answer


@pytest.mark.parametrize("way", WAYS)
def test_an_adapter_is_loaded_onto_a_model_that_streams(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    expected = adapted(checkpoint, tmp_path / "adapter")
    from peft import PeftModel

    model = PeftModel.from_pretrained(way(checkpoint, tmp_path / "cache"), tmp_path / "adapter")
    assert all(torch.equal(model(TOKENS).logits, expected) for _ in range(3))


@pytest.mark.parametrize("way", [*WAYS, on_host])
def test_adapters_made_on_a_model_are_trained_while_its_weights_stream(way: Way, checkpoint, tmp_path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(1)
    model = peft.get_peft_model(way(checkpoint, tmp_path), peft.LoraConfig(r=2, target_modules=["q_proj"]))
    optimiser = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1.0)
    losses = losses_of(model, optimiser, TOKENS)
    assert losses[2] < losses[1] < losses[0]


class Logits(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.model(tokens, use_cache=False).logits
        return logits


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_not_exported(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model = way(checkpoint, tmp_path)
    with pytest.raises(RuntimeError, match="this model can't be exported: its weights are brought in as it runs"):
        torch.export.export(Logits(model), (TOKENS,), strict=False)
    with pytest.raises(RuntimeError, match="hooks bring in the weights of a dispatched model, and no graph holds them"):
        torch.export.export(Logits(model), (TOKENS,), strict=True)
    assert torch.equal(model(TOKENS).logits, plain(checkpoint)(TOKENS).logits)


@pytest.mark.parametrize("way", WAYS)
def test_parts_with_weights_that_wait_are_neither_moved_nor_cast(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model, expected = way(checkpoint, tmp_path), plain(checkpoint)
    layer = model.model.layers[0]
    for part, first in ((model.model, r"layers.0.\S+"), (layer, r"layers.0.\S+"), (model.lm_head, "lm_head.weight")):
        for move in (nn.Module.half, lambda module: module.to(torch.float64), lambda module: module.to("meta")):
            with pytest.raises(RuntimeError, match=rf"can't be moved or cast: some of its .*{first}' first"):
                move(part)
    assert copy.deepcopy(layer.mlp).double().up_proj.weight.dtype == torch.float64
    model.model.norm.float()
    assert type(layer.mlp.up_proj) is nn.Linear
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    assert isinstance(layer.mlp.up_proj.weight, WaitingTensor)


@pytest.mark.parametrize("way", [*WAYS, on_host])
def test_a_model_goes_to_where_it_is_and_adapters_beside_its_weights_are_cast(way: Way, checkpoint, tmp_path) -> None:
    model, expected = way(checkpoint, tmp_path), plain(checkpoint)(TOKENS).logits
    model.model.layers[0].extra = nn.Linear(2, 2, dtype=torch.float64)
    for part in (model, model.model, model.lm_head):
        assert part.to("cpu").float().to("cpu", torch.float32) is part
        for move in (nn.Module.share_memory, lambda module: module.to_empty(device="cpu")):
            with pytest.raises(RuntimeError, match=r"this model can't be moved or cast: some of its weights wait"):
                move(part)
    assert model.model.layers[0].extra.weight.dtype == torch.float32
    assert isinstance(model.lm_head.weight, WaitingTensor)
    assert torch.equal(model(TOKENS).logits, expected)


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_takes_the_values_that_it_has_and_no_others(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model, state = way(checkpoint, tmp_path), plain(checkpoint).state_dict()
    model.load_state_dict(state)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(RuntimeError, match=r"'lm_head.weight' is offloaded, and a change by aten.copy_.default would"):
        model.load_state_dict(state)
    assert torch.ones(2, dtype=torch.float64).to(model.lm_head.weight).dtype == torch.float32
    assert not torch.ones(2).type_as(model.lm_head.weight).is_meta


@pytest.mark.parametrize("way", FIELDS)
def test_parts_of_a_model_without_its_hooks_are_cast(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model = way(checkpoint, tmp_path)
    cut = model.model.layers.pop(1)
    offstage.remove_hook_from_submodules(model)
    assert "_apply" not in vars(model.model.layers[0])
    for part in (model.model.layers[0], cut):
        assert part.half().mlp.up_proj.weight.dtype == torch.float16


@pytest.mark.parametrize("way", WAYS)
def test_a_model_is_copied_and_not_pickled(way: Way, checkpoint: Path, tmp_path: Path) -> None:
    model, expected = way(checkpoint, tmp_path), plain(checkpoint)(TOKENS).logits
    for save in (pickle.dumps, lambda what: torch.save(what, io.BytesIO())):
        with pytest.raises(TypeError, match=r"this model can't be pickled while it is dispatched: save it with its"):
            save(model)
    for twin in (copy.deepcopy(model), copy.copy(model), model):
        assert torch.equal(twin(TOKENS).logits, expected)


def save_zip(state: dict[str, Any], file: Path) -> dict[str, Any]:
    torch.save(state, file)
    saved: dict[str, Any] = torch.load(file, weights_only=True)
    return saved


def save_safely(state: dict[str, Any], file: Path) -> dict[str, Any]:
    save_file(state, file)
    return load_file(file)


@pytest.mark.parametrize("save", [save_zip, save_safely])
@pytest.mark.parametrize("way", [*WAYS, on_host])
def test_a_state_dict_is_saved_with_the_weights_that_wait(way: Way, save: Any, checkpoint, tmp_path) -> None:
    saved = save(way(checkpoint, tmp_path / "cache").state_dict(), tmp_path / "saved")
    assert saved.keys() == plain(checkpoint).state_dict().keys()
    assert {type(value) for value in saved.values()} == {torch.Tensor}
    assert all(torch.equal(value, saved[name]) for name, value in plain(checkpoint).state_dict().items())


@pytest.mark.parametrize("way", WAYS)
def test_a_weight_that_waits_takes_no_data_and_its_module_another_weight(way: Way, checkpoint, tmp_path) -> None:
    model, expected = way(checkpoint, tmp_path), plain(checkpoint)
    values = torch.ones(64, 32)
    refusal = r"'lm_head.weight' is offloaded, and data set .*: module.weight = torch.nn.Parameter\(values\)"
    with pytest.raises(RuntimeError, match=refusal):
        model.lm_head.weight.data = values
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
    model.lm_head.weight = nn.Parameter(values)
    expected.lm_head.weight.data = values
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)


@pytest.mark.parametrize("way", WAYS)
def test_a_streamed_weight_that_was_pruned_is_refused_at_each_call(way: Way, checkpoint, tmp_path) -> None:
    model = way(checkpoint, tmp_path)
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"'lm_head.weight' is streamed, and was taken out of its module"):
            model(TOKENS)


@pytest.mark.parametrize("way", FIELDS)
def test_hooks_go_off_a_model_of_which_a_streamed_weight_was_pruned(way: Way, checkpoint, tmp_path) -> None:
    model = way(checkpoint, tmp_path)
    prune.l1_unstructured(model.lm_head, "weight", 0.5)
    offstage.remove_hook_from_submodules(model)
    expected = plain(checkpoint)
    prune.l1_unstructured(expected.lm_head, "weight", 0.5)
    assert torch.equal(model(TOKENS).logits, expected(TOKENS).logits)
