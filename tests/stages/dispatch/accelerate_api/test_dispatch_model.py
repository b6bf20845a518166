import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offstage.stages.dispatch import (
    ModelHook,
    add_hook_to_module,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    remove_hook_from_submodules,
)
from offstage.stages.shard_load import offload_state_dict
from tests.stages.dispatch.models_to_offload import (
    Borrower,
    Net,
    Tied,
    Transformer,
    anatomy,
    same_anatomy,
    seeded,
    waiting,
)

X = torch.randn(2, 3)
TOKENS = torch.tensor([[1, 2, 3]])
PARAMETERS = {f"{name}.{kind}" for name in ("linear1", "batchnorm", "linear2") for kind in ("weight", "bias")}
ALL_ON_DISK = {"linear1": "disk", "batchnorm": "disk", "linear2": "disk"}
without_accelerator = pytest.mark.skipif(torch.accelerator.is_available(), reason="device 0 is simulated here")


class Placed(Net):
    """A model that tells its device, as those of transformers do."""

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device


def test_a_model_on_the_host_answers_the_same_and_comes_back_as_it_was() -> None:
    model = seeded(Placed)
    expected, before = model(X), anatomy(model)
    assert cpu_offload(model) is model
    assert waiting(model) == PARAMETERS
    assert model.device == torch.device("cpu"), "where it computes, not where its first parameter waits"
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert same_anatomy(before, anatomy(model))


def test_a_model_on_disk_answers_the_same_and_comes_back(tmp_path: Path) -> None:
    expected, model = seeded(Net)(X), seeded(Net)
    disk_offload(model, tmp_path)
    assert waiting(model) == PARAMETERS
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert not waiting(model)
    assert torch.equal(model(X), expected)


def test_weights_from_a_state_dict_fill_a_model_that_has_none() -> None:
    expected, state = seeded(Net)(X), seeded(Net).state_dict()
    model = seeded(Net)
    for name in ("linear1", "batchnorm", "linear2"):
        module = model.get_submodule(name)
        for key in list(module._parameters):
            module._parameters[key] = nn.Parameter(module._parameters[key].to("meta"))
    cpu_offload(model, execution_device="cpu", state_dict=state)
    assert torch.equal(model(X), expected)


def test_files_of_another_model_in_the_folder_are_not_taken_for_its_own(tmp_path: Path) -> None:
    torch.manual_seed(1)
    offload_state_dict(tmp_path, Net().state_dict())
    expected, model = seeded(Net)(X), seeded(Net)
    disk_offload(model, tmp_path)
    assert torch.equal(model(X), expected)


def test_files_that_are_there_are_not_written_again(tmp_path: Path) -> None:
    disk_offload(seeded(Net), tmp_path)
    written = {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")}
    model = seeded(Net)
    disk_offload(model, tmp_path)
    assert {file.name: file.stat().st_mtime_ns for file in tmp_path.glob("*.dat")} == written
    file = tmp_path / "linear1.weight.dat"
    file.write_bytes(b"short")
    disk_offload(seeded(Net), tmp_path)
    assert file.stat().st_size == 4 * 3 * 4, "a damaged one is"


def test_a_folder_that_lacks_what_the_model_lacks_is_refused(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"weight": torch.zeros(2, 2)})
    with pytest.raises(ValueError, match=r"has no tensor 'bias' of shape \[2\], and neither has the model"):
        disk_offload(nn.Linear(2, 2, device="meta"), tmp_path, execution_device="cpu")
    with pytest.raises(ValueError, match=r"has no tensor 'weight' of shape \[3, 2\]"):
        disk_offload(nn.Linear(2, 3, device="meta"), tmp_path, execution_device="cpu")


MAPS: list[dict[str, Any]] = [
    ALL_ON_DISK,
    {"": "disk"},
    {"linear1": "cpu", "batchnorm": "disk", "linear2": "cpu"},
    {"": "cpu", "linear2": "disk"},
    {"linear1.weight": "disk", "linear1.bias": "cpu", "batchnorm": "cpu", "linear2": "disk"},
    {"linear1": torch.device("cpu"), "batchnorm": "disk", "linear2": "cpu"},
]
SIMULATED: list[dict[str, Any]] = [
    {"linear1": 0, "batchnorm": "cpu", "linear2": "disk"},
    {"linear1": "cpu", "batchnorm": 1, "linear2": 0},
    {"linear1": "cuda:0", "batchnorm": "cuda:1", "linear2.weight": "cpu", "linear2.bias": 1},
    {"": "cpu", "linear2": 0},
]


@pytest.mark.parametrize("device_map", MAPS)
def test_a_mapped_model_answers_the_same_and_comes_back(device_map: dict[str, Any], tmp_path: Path) -> None:
    expected, model = seeded(Net)(X), seeded(Net)
    assert dispatch_model(model, device_map, offload_dir=tmp_path) is model
    assert model.hf_device_map == device_map
    assert torch.equal(model(X), expected)
    assert torch.equal(model(X), expected)
    remove_hook_from_submodules(model)
    assert not waiting(model)
    assert not hasattr(model, "hf_device_map")
    assert type(model) is Net
    assert torch.equal(model(X), expected)


@without_accelerator
@pytest.mark.parametrize("device_map", SIMULATED)
def test_accelerators_that_are_not_here_are_simulated(device_map, tmp_path, caplog) -> None:
    expected, model = seeded(Net)(X), seeded(Net)
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert "isn't here; it is simulated on the cpu" in caplog.text
    assert waiting(model) == _away(device_map)
    assert torch.equal(model(X), expected)


def _away(device_map: dict[str, Any]) -> set[str]:
    """Return the parameters that wait: those that the map has on the host or on disk."""

    def device(name: str) -> Any:
        return device_map.get(name, device_map.get(name.partition(".")[0], device_map.get("")))

    return {name for name in PARAMETERS if device(name) in ("cpu", "disk")}


@pytest.mark.parametrize(
    ("kind", "x", "device_map"),
    [
        (Tied, TOKENS, {"embed": "disk", "middle": "cpu", "head": "disk"}),
        (Tied, TOKENS, {"embed": "cpu", "middle": "disk", "head": "disk"}),
        (lambda: Borrower(3, 2), X, {"linear": "disk"}),
        (Transformer, torch.randn(1, 4, 8), {"encoder": "disk", "head": "cpu"}),
        (Transformer, torch.randn(1, 4, 8), {"": "disk", "encoder.layers.1.self_attn.out_proj.weight": "cpu"}),
        (Transformer, torch.randn(1, 4, 8), {"encoder.layers.0": "cpu", "encoder.layers.1": "disk", "head": "disk"}),
    ],
)
def test_tied_and_borrowed_weights_are_right(kind: Any, x: torch.Tensor, device_map: Any, tmp_path: Path) -> None:
    model = seeded(kind)
    for module in model.modules():
        module.register_forward_pre_hook(lambda _m, _a: None)  # hooks turn torch's fused path off
    expected = model(x)
    dispatch_model(model, device_map, offload_dir=tmp_path)
    assert torch.equal(model(x), expected)
    if kind is Tied:
        assert model.head.weight is model.embed.weight
    remove_hook_from_submodules(model)
    assert torch.equal(model(x), expected)
    if kind is Tied:
        assert model.head.weight is model.embed.weight


def test_a_map_of_one_device_moves_the_model_and_adds_no_hooks() -> None:
    model = dispatch_model(seeded(Net), {"": "cpu"})
    assert not hasattr(model, "_hf_hook")
    assert model.hf_device_map == {"": "cpu"}
    model.to(torch.float64)
    model = dispatch_model(seeded(Net), {"": "cpu"}, force_hooks=True)
    assert hasattr(model, "_hf_hook")
    assert torch.equal(model(X), seeded(Net)(X))


@pytest.mark.parametrize(
    ("device_map", "folder", "words"),
    [
        (ALL_ON_DISK, None, "offload_dir: tensors are mapped to disk, and no folder is given"),
        ({"linear1": "disk", "linear2": "cpu"}, "here", "leaves out 'batchnorm.weight'"),
        ({"": "nowhere", "linear1": "disk"}, "here", "'nowhere' is not a device"),
    ],
)
def test_a_map_that_cannot_be_followed_is_refused(device_map, folder, words, tmp_path) -> None:
    before, model = anatomy(seeded(Net)).keys(), seeded(Net)
    with pytest.raises(ValueError, match=words):
        dispatch_model(model, device_map, offload_dir=tmp_path / folder if folder else None)
    assert anatomy(model).keys() == before, "and the model is as it was"


def test_names_that_are_not_in_the_model_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dispatch_model(seeded(Net), {"": "cpu", "linear1": "disk", "linear3": "cpu"}, offload_dir=tmp_path)
    assert "device_map names nothing in the model: linear3" in caplog.text


@pytest.mark.parametrize("move", [lambda m: m.to("meta"), lambda m: m.half(), lambda m: m.double()])
def test_a_model_with_offloaded_weights_says_why_it_cannot_be_moved(move: Any, tmp_path: Path) -> None:
    model = dispatch_model(seeded(Net), ALL_ON_DISK, offload_dir=tmp_path)
    assert type(model).__name__ == "Net"
    assert isinstance(model, Net)
    with pytest.raises(RuntimeError, match=r"can't be moved or cast: .* 'linear1.weight' first.*remove_hook"):
        move(model)
    remove_hook_from_submodules(model)
    move(model)


@pytest.mark.parametrize(
    "move", [lambda m: m.to("cpu"), lambda m: m.cpu(), lambda m: m.float(), lambda m: m.to(torch.float32)]
)
def test_a_model_with_offloaded_weights_is_moved_to_where_it_is(move: Any, tmp_path: Path) -> None:
    model = dispatch_model(seeded(Net), ALL_ON_DISK, offload_dir=tmp_path)
    assert move(model) is model
    assert torch.equal(model(X), seeded(Net)(X))
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_model_with_all_weights_resident_is_moved_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    model = dispatch_model(seeded(Net), {"": "cpu"}, force_hooks=True)
    with caplog.at_level(logging.WARNING):
        model.to(torch.float64)
    assert "a dispatched model is being moved" in caplog.text
    assert model.linear1.weight.dtype == torch.float64


def test_a_model_can_be_dispatched_again(tmp_path: Path) -> None:
    expected, model = seeded(Net)(X), seeded(Net)
    for device_map in (ALL_ON_DISK, {"": "cpu", "linear1": "disk"}):
        dispatch_model(model, device_map, offload_dir=tmp_path)
        assert torch.equal(model(X), expected)
    assert waiting(model) == {"linear1.weight", "linear1.bias"}
    remove_hook_from_submodules(model)
    assert type(model) is Net


def test_hooks_of_the_user_stay_in_front() -> None:
    model = seeded(Net)
    mine = add_hook_to_module(model, ModelHook())._hf_hook
    cpu_offload(model)
    assert model._hf_hook.hooks[0] is mine


@pytest.mark.parametrize("format", ["bin", "safetensors"])
@pytest.mark.parametrize(
    "device_map", [None, {"": "cpu"}, ALL_ON_DISK, {"linear1": "cpu", "batchnorm": "cpu", "linear2": "disk"}]
)
def test_a_checkpoint_is_loaded_and_dispatched(format: str, device_map: Any, tmp_path: Path) -> None:
    expected, source = seeded(Net)(X), seeded(Net)
    checkpoint = _save(source, tmp_path / "checkpoint", format)
    model = Net().eval()
    loaded = load_checkpoint_and_dispatch(model, checkpoint, device_map=device_map, offload_folder=tmp_path / "off")
    assert loaded is model
    assert torch.equal(model(X), expected)
    away = {name for name in PARAMETERS if (device_map or {}).get(name.partition(".")[0]) == "disk"}
    assert waiting(model) == away


def test_what_the_checkpoint_holds_as_it_is_needs_no_folder(tmp_path: Path) -> None:
    checkpoint = _save(seeded(Net), tmp_path / "checkpoint", "safetensors")
    model = load_checkpoint_and_dispatch(Net().eval(), checkpoint, device_map=ALL_ON_DISK)
    assert torch.equal(model(X), seeded(Net)(X))
    assert waiting(model) == PARAMETERS


@pytest.mark.parametrize("policy", ["optimal", "auto", "balanced", "balanced_low_0", "sequential"])
def test_a_policy_places_the_weights_within_the_memory_given(policy: str, tmp_path: Path) -> None:
    expected = seeded(Net)(X)
    checkpoint = _save(seeded(Net), tmp_path / "checkpoint", "safetensors")
    model = load_checkpoint_and_dispatch(
        Net().eval(), checkpoint, device_map=policy, max_memory={"cpu": 200}, offload_folder=tmp_path / "off"
    )
    assert set(model.hf_device_map.values()) == {"cpu", "disk"}
    assert torch.equal(model(X), expected)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_map": "fastest"}, "'fastest' is no policy; give one of "),
        ({"device_map": "optimum"}, r"'optimum' is no policy \(did you mean 'optimal'\?\)"),
        (
            {"device_map": ALL_ON_DISK, "dtype": "float16"},
            "offload_folder: 6 tensors on disk are not in the checkpoint",
        ),
        ({"broadcast_from_rank0": True}, "broadcast_from_rank0: True is not supported"),
    ],
)
def test_what_cannot_be_loaded_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    checkpoint = _save(seeded(Net), tmp_path / "checkpoint", "safetensors")
    with pytest.raises(ValueError, match=words):
        load_checkpoint_and_dispatch(Net(), checkpoint, **options)


def _save(model: nn.Module, folder: Path, format: str) -> Path:
    from safetensors.torch import save_file

    folder.mkdir()
    file = folder / {"bin": "pytorch_model.bin", "safetensors": "model.safetensors"}[format]
    if format == "bin":
        torch.save(model.state_dict(), file)
    else:
        save_file(model.state_dict(), file)
    return file
