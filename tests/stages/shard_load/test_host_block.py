"""Weights that wait on the host for an accelerator: in one block, as large as they are, and read straight into it."""

from pathlib import Path

import pytest
import torch

from offstage.stages.machine.aligned_memory import HostBlock
from tests.stages.shard_load.checkpoints import (
    CONFIGS,
    assert_same,
    empty_model,
    load,
    make_context,
    make_model,
    save_bin,
    save_safetensors,
    state_of,
)

PAGE = 4096


def test_tensors_lie_side_by_side_in_memory_of_whole_pages() -> None:
    block = HostBlock([10, 64, 100])
    first, second, third = (block.empty((size,), torch.uint8) for size in (10, 64, 100))
    begin = block.memory.ctypes.data
    assert [tensor.data_ptr() - begin for tensor in (first, second, third)] == [0, 64, 128]
    assert (begin % PAGE, block.memory.nbytes) == (0, PAGE)


def test_a_tensor_is_held_as_it_is_or_as_a_copy_and_only_once() -> None:
    block, tensor = HostBlock([24]), torch.randn(2, 3)
    in_block = block.hold(tensor.t())
    assert torch.equal(in_block, tensor.t())
    assert in_block in block
    assert tensor not in block
    assert block.hold(in_block) is in_block
    assert block.hold(torch.tensor(3)).shape == ()


def test_what_does_not_fit_gets_memory_of_its_own() -> None:
    block = HostBlock([PAGE])
    assert block.empty((PAGE,), torch.uint8) in block
    assert block.empty((1,), torch.uint8) not in block


def test_a_tensor_outlives_the_block() -> None:
    tensor = HostBlock([24]).hold(torch.arange(6))
    assert tensor.tolist() == list(range(6))


@pytest.mark.parametrize("saved", ["as it is", "cast", "bin"])
@pytest.mark.parametrize("kind", ["llama", "mixtral", "bloom"])
def test_an_accelerators_weights_on_the_host_are_read_into_one_block(tmp_path: Path, kind: str, saved: str) -> None:
    model = make_model(kind, torch.float32 if saved == "cast" else torch.bfloat16)
    folder = (save_bin if saved == "bin" else save_safetensors)(model, tmp_path / "checkpoint")
    context = make_context(
        tmp_path, folder, lambda: empty_model(kind, torch.bfloat16), lambda name: 0 if "norm" in name else "cpu"
    )
    placed = load(context, tmp_path / "out")
    assert_same(state_of(placed), {name: t.to(torch.bfloat16) for name, t in model.state_dict().items()})
    assert placed.host is not None
    on_host = {t.data_ptr(): t for n, t in placed.model.named_parameters() if "norm" not in n}
    assert all(tensor in placed.host for tensor in on_host.values())
    assert all(buffer in placed.host for buffer in placed.model.buffers() if buffer.numel())
    weight_bytes = sum(tensor.nbytes for tensor in on_host.values())
    assert weight_bytes <= placed.host.memory.nbytes < weight_bytes + PAGE + 64 * (len(on_host) + 20) + 2048 * 2


def test_a_host_that_computes_itself_keeps_its_weights_where_they_are(tmp_path: Path) -> None:
    assert "llama" in CONFIGS
    folder = save_safetensors(make_model("llama"), tmp_path / "checkpoint")
    context = make_context(tmp_path, folder, lambda: empty_model("llama", torch.float32), lambda name: "cpu")
    assert load(context, tmp_path / "out").host is None
