"""The same scripts, with accelerate's functions and with ours: only what is imported differs."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

import offstage.stages.dispatch
import offstage.stages.empty_init
import offstage.stages.shard_load
from tests.stages.dispatch.models_to_offload import Borrower, Net, Tied, seeded, waiting

accelerate = pytest.importorskip("accelerate")

X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))
TOKENS = torch.tensor([[3, 1, 4, 1, 5]])
Script = Callable[[Any, Path], Any]


def imported(*modules: Any) -> SimpleNamespace:
    names = [
        *(name for name in offstage.stages.dispatch.__all__ if name != "load"),
        "offload_state_dict",
        "OffloadedWeightsLoader",
        "init_empty_weights",
    ]
    functions = {name: getattr(module, name) for module in modules for name in names if hasattr(module, name)}
    return SimpleNamespace(**functions)


def apis() -> tuple[SimpleNamespace, SimpleNamespace]:
    import accelerate.big_modeling
    import accelerate.hooks
    import accelerate.utils

    theirs = imported(accelerate.big_modeling, accelerate.hooks, accelerate.utils)
    return theirs, imported(offstage.stages.dispatch, offstage.stages.shard_load, offstage.stages.empty_init)


def cpu(api: Any, _: Path) -> Any:
    model = api.cpu_offload(seeded(Net))
    return model(X), sorted(waiting(model))


def cpu_with_buffers(api: Any, _: Path) -> Any:
    model = api.cpu_offload(seeded(Net), offload_buffers=True)
    return model(X), sorted(waiting(model))


def cpu_from_a_state_dict(api: Any, _: Path) -> Any:
    state = seeded(Net).state_dict()
    with api.init_empty_weights():
        model = Net().eval()
    api.cpu_offload(model, execution_device=torch.device("cpu"), state_dict=state)
    return model(X), sorted(waiting(model))


def disk(api: Any, folder: Path) -> Any:
    model = seeded(Net)
    api.disk_offload(model, folder)
    waiting_names = sorted(waiting(model))
    result = model(X)
    api.remove_hook_from_submodules(model)
    return result, waiting_names, sorted(waiting(model)), model(X), sorted(model.state_dict())


def disk_with_preloaded_classes(api: Any, folder: Path) -> Any:
    model = nn.Sequential(seeded(Borrower, 3, 4), seeded(Borrower, 4, 2))
    api.disk_offload(model, folder, preload_module_classes=["Borrower"])
    return model(X), sorted(waiting(model))


def a_map(api: Any, folder: Path) -> Any:
    device_map = {"linear1": "cpu", "batchnorm": "disk", "linear2": "disk"}
    model = api.dispatch_model(seeded(Net), device_map, offload_dir=folder)
    return model(X), sorted(waiting(model)), model.hf_device_map


def a_map_with_weights_offloaded_before(api: Any, folder: Path) -> Any:
    model = seeded(Net)
    api.offload_state_dict(folder, {k: v for k, v in model.state_dict().items() if "linear2" in k})
    model = api.dispatch_model(model, {"": "cpu", "linear2": "disk"}, offload_dir=folder)
    return model(X)


def a_forced_hook(api: Any, _: Path) -> Any:
    model = api.dispatch_model(seeded(Net), {"": "cpu"}, force_hooks=True)
    return model(X), isinstance(model._hf_hook, api.AlignDevicesHook), model._hf_hook.io_same_device


def tied(api: Any, folder: Path) -> Any:
    device_map = {"embed": "cpu", "middle": "disk", "head": "cpu"}
    model = api.dispatch_model(seeded(Tied), device_map, offload_dir=folder)
    return model(TOKENS), model.head.weight is model.embed.weight


def a_checkpoint(api: Any, folder: Path) -> Any:
    torch.save(seeded(Net).state_dict(), folder / "model.bin")
    with api.init_empty_weights():
        model = Net().eval()
    device_map = {"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"}
    model = api.load_checkpoint_and_dispatch(
        model, str(folder / "model.bin"), device_map=device_map, offload_folder=folder / "offload"
    )
    return model(X), sorted(waiting(model))


def a_refusal_to_move(api: Any, folder: Path) -> Any:
    model = api.dispatch_model(
        seeded(Net), {"linear1": "cpu", "batchnorm": "disk", "linear2": "cpu"}, offload_dir=folder
    )
    with pytest.raises(RuntimeError):
        model.to("meta")
    return model(X)


def hooks_of_ones_own(api: Any, _: Path) -> Any:
    class Shift(api.ModelHook):
        def pre_forward(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            return (args[0] + 1, *args[1:]), kwargs

        def post_forward(self, module: nn.Module, output: Any) -> Any:
            return output * 3

    model = seeded(Net)
    api.add_hook_to_module(model, Shift())
    once = model(X)
    api.add_hook_to_module(model, Shift(), append=True)
    api.add_hook_to_module(model, Shift(), append=True)
    thrice = model(X)
    kinds = [type(hook).__name__ for hook in model._hf_hook.hooks]
    api.remove_hook_from_module(model)
    return once, thrice, kinds, model(X)


def blocks(api: Any, _: Path) -> Any:
    model = seeded(Net)
    api.attach_align_device_hook_on_blocks(
        model,
        execution_device={"": "cpu", "linear1": "cpu", "linear2": "cpu"},
        offload={"linear1": True, "linear2": False},
        weights_map=model.state_dict(),
    )
    hooked = {name: type(getattr(module, "_hf_hook", None)).__name__ for name, module in model.named_modules()}
    return model(X), sorted(waiting(model)), hooked


def a_chain(api: Any, _: Path) -> Any:
    first, hook_1 = api.cpu_offload_with_hook(seeded(Net), "cpu")
    second, hook_2 = api.cpu_offload_with_hook(nn.Sequential(nn.ReLU(), seeded(nn.Linear, 5, 2)), "cpu", hook_1)
    hidden = first(X)
    results = [second(hidden) for _ in range(3)]
    hook_2.offload()
    hook_1.remove()
    return results, hasattr(first, "_hf_hook"), hasattr(second, "_hf_hook")


def no_gradients(api: Any, _: Path) -> Any:
    model, hook = seeded(Net), api.ModelHook()
    hook.no_grad = True
    api.add_hook_to_module(model.linear1, hook)
    return model(X), model.linear1(X).requires_grad


def language_model(kind: str) -> nn.Module:
    torch.manual_seed(0)
    small = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "num_key_value_heads": 1}
    small |= {"vocab_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64}
    if kind == "llama":
        return LlamaForCausalLM(LlamaConfig(**small)).eval()
    if kind == "mixtral":
        return MixtralForCausalLM(MixtralConfig(**small, num_local_experts=4)).eval()
    if kind == "gpt2":
        return GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=16, n_layer=2, n_head=2, n_positions=64)).eval()
    return T5ForConditionalGeneration(
        T5Config(vocab_size=32, d_model=16, d_kv=8, d_ff=24, num_layers=2, num_heads=2, decoder_start_token_id=0)
    ).eval()


def generating(kind: str, way: str) -> Script:
    def script(api: Any, folder: Path) -> Any:
        model = language_model(kind)
        if way == "cpu":
            api.cpu_offload(model)
        elif way == "disk":
            api.disk_offload(model, folder)
        else:
            top = [name for name, child in model.named_children() if any(True for _ in child.parameters())]
            device_map = {name: ("disk", "cpu")[index % 2] for index, name in enumerate(top)}
            api.dispatch_model(model, device_map, offload_dir=folder)
        torch.manual_seed(1)
        return model.generate(TOKENS, max_new_tokens=8, do_sample=True), model.device.type

    return script


SCRIPTS: list[Script] = [
    cpu,
    cpu_with_buffers,
    cpu_from_a_state_dict,
    disk,
    disk_with_preloaded_classes,
    a_map,
    a_map_with_weights_offloaded_before,
    a_forced_hook,
    tied,
    a_checkpoint,
    a_refusal_to_move,
    hooks_of_ones_own,
    blocks,
    a_chain,
    no_gradients,
]


def run(script: Script, api: Any, folder: Path) -> Any:
    folder.mkdir()
    return script(api, folder)


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.__name__)
def test_a_script_gives_the_same_with_only_its_import_changed(script: Script, tmp_path: Path) -> None:
    theirs, ours = apis()
    assert same(run(script, theirs, tmp_path / "theirs"), run(script, ours, tmp_path / "ours"))


@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "t5"])
def test_generation_gives_the_same_with_only_the_import_changed(kind: str, way: str, tmp_path: Path) -> None:
    theirs, ours = apis()
    script = generating(kind, way)
    expected, _ = run(script, theirs, tmp_path / "theirs")
    tokens, device = run(script, ours, tmp_path / "ours")
    assert torch.equal(tokens, expected)
    assert device == "cpu", "where it computes; accelerate's model may say meta"


def test_the_signatures_are_the_same() -> None:
    import inspect

    theirs, ours = apis()
    names = [name for name in vars(theirs) if hasattr(ours, name) and name in offstage.stages.dispatch.__all__]
    assert len(names) > 12

    def shape(function: Any) -> list[tuple[str, Any]]:
        parameters = inspect.signature(function.__init__ if inspect.isclass(function) else function).parameters.values()
        return [(parameter.name, parameter.default) for parameter in parameters]

    different = [name for name in names if shape(getattr(theirs, name)) != shape(getattr(ours, name))]
    assert different == []
