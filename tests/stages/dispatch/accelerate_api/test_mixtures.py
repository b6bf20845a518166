"""The field's functions with mixtures of experts: the answers of the model in memory, and no copy of the experts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from offstage.stages.dispatch import cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from offstage.stages.dispatch.streaming.waiting_tensor import state_on_host
from tests.stages.shard_load.checkpoints import assert_same
from tests.stages.shard_load.test_rows import empty_mixture, kept_wider, make_mixture

TOKENS = torch.arange(2, 20).reshape(2, 9)
ON_DISK = {"": "disk"}


@pytest.fixture(scope="module", params=["Mixtral", "gpt-oss", "DeepSeek-V3"])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A mixture's name and the folder of its checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    make_mixture(request.param).save_pretrained(folder, max_shard_size="20KB")
    return request.param, folder


def in_memory(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()


def experts_in(state: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in state.items() if ".experts." in name}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(TOKENS).logits


@pytest.mark.parametrize("has_folder", [False, True])
def test_a_checkpoint_in_the_dtype_that_is_wanted_is_not_copied(
    has_folder: bool, saved: tuple[str, Path], tmp_path: Path
) -> None:
    (name, checkpoint), folder = saved, tmp_path / "offload" if has_folder else None
    model = load_checkpoint_and_dispatch(
        empty_mixture(name), checkpoint, device_map=ON_DISK, offload_folder=folder, dtype=torch.bfloat16
    )
    assert torch.equal(logits(model), logits(in_memory(checkpoint)))
    assert_same(experts_in(state_on_host(model)), experts_in(in_memory(checkpoint).state_dict()))
    assert not list(tmp_path.rglob("*.dat"))


def test_the_folder_of_one_model_serves_another(saved: tuple[str, Path], tmp_path: Path) -> None:
    name, checkpoint = saved
    load_checkpoint_and_dispatch(
        empty_mixture(name), checkpoint, device_map=ON_DISK, offload_folder=tmp_path, dtype=torch.bfloat16
    )
    model = dispatch_model(empty_mixture(name), ON_DISK, offload_dir=tmp_path, force_hooks=True)
    assert torch.equal(logits(model), logits(in_memory(checkpoint)))
    assert {path.stem for path in tmp_path.rglob("*.dat")} <= set(kept_wider(name))
    assert not experts_in(kept_wider(name))


def to_folder(model: nn.Module, folder: Path) -> nn.Module:
    return disk_offload(model, folder)


def to_host(model: nn.Module, _folder: Path) -> nn.Module:
    return cpu_offload(model, execution_device=0)


@pytest.mark.parametrize("offload", [to_folder, to_host])
def test_a_model_in_memory_is_offloaded_and_answers_as_before(
    offload: Any, saved: tuple[str, Path], tmp_path: Path
) -> None:
    _, checkpoint = saved
    model = offload(in_memory(checkpoint), tmp_path)
    assert torch.equal(logits(model), logits(in_memory(checkpoint)))
    assert_same(experts_in(state_on_host(model)), experts_in(in_memory(checkpoint).state_dict()))


def test_a_checkpoint_of_another_dtype_is_cast_into_the_folder(saved: tuple[str, Path], tmp_path: Path) -> None:
    name, checkpoint = saved
    model = load_checkpoint_and_dispatch(
        empty_mixture(name).float(), checkpoint, device_map=ON_DISK, offload_folder=tmp_path, dtype=torch.float32
    )
    assert torch.equal(logits(model), logits(in_memory(checkpoint).float()))
    stored = {path.stem for path in tmp_path.glob("*.dat")}
    assert experts_in(model.state_dict()).keys() <= stored


def test_one_whose_experts_are_shared_between_devices_answers_as_before(
    saved: tuple[str, Path], tmp_path: Path
) -> None:
    name, checkpoint = saved
    experts = [f"model.layers.{layer}" for layer in range(3)]
    places = {"": 0, experts[0]: 0, experts[1]: "cpu", experts[2]: "disk", f"{experts[2]}.mlp.experts.down_proj": 0}
    model = load_checkpoint_and_dispatch(
        empty_mixture(name), checkpoint, device_map=places, offload_folder=tmp_path, dtype=torch.bfloat16
    )
    assert torch.equal(logits(model), logits(in_memory(checkpoint)))
