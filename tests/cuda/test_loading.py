"""Loading onto a real accelerator: the same values as on the host, by way of few buffers and no second copy there."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from offstage.stages.shard_load import load_checkpoint_in_model
from tests.stages.shard_load.checkpoints import assert_same, empty_model, make_model, save_bin, save_safetensors
from tests.stages.shard_load.one_load import Stack, make as empty_stack
from tests.stages.shard_load.test_limits import save
from tests.stages.shard_load.test_load_memory import anonymous_bytes

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an accelerator"),
]


@pytest.mark.parametrize("save_checkpoint", [save_safetensors, save_bin])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", ["llama", "mixtral"])
def test_weights_on_the_accelerator_are_those_of_the_host(
    tmp_path: Path, kind: str, dtype: torch.dtype, save_checkpoint: Callable[..., Path]
) -> None:
    source = make_model(kind, torch.bfloat16)
    folder = save_checkpoint(source, tmp_path / "checkpoint")
    model = empty_model(kind, dtype)
    load_checkpoint_in_model(model, folder, device_map={"": 0}, dtype=dtype)
    assert {parameter.device.type for parameter in model.parameters()} == {"cuda"}
    loaded = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    assert_same(loaded, source.to(dtype).state_dict())


def test_the_host_holds_a_few_buffers_and_the_accelerator_nothing_twice(tmp_path: Path) -> None:
    path = save(tmp_path, "safetensors", torch.bfloat16)
    load_checkpoint_in_model(nn.Linear(1, 1, device="cuda"), save_one(tmp_path), device_map={"": 0})  # the context
    model, before = empty_stack(), anonymous_bytes()
    torch.cuda.reset_peak_memory_stats()
    allocated = torch.cuda.memory_allocated()
    load_checkpoint_in_model(model, path, device_map={"": 0})
    weights = sum(tensor.nbytes for tensor in Stack.parameters(model))
    assert anonymous_bytes() - before < 64 * 2**20
    assert torch.cuda.max_memory_allocated() - allocated < weights + 2**20


def save_one(folder: Path) -> Path:
    """Return a checkpoint of one small layer."""
    save_file(nn.Linear(1, 1).state_dict(), folder / "one.safetensors")
    return folder / "one.safetensors"
