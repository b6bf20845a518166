"""The field's functions on an FP8 checkpoint: what it holds packed is streamed so, and no index of theirs names it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from offstage.stages.dispatch import load_checkpoint_and_dispatch
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.shard_load import OffloadedWeightsLoader, load_checkpoint_in_model
from tests.stages.shard_load.test_packed import SIZES, write

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, num_hidden_layers=2, **SIZES)
    return write(AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), tmp_path_factory.mktemp("llama"))


@pytest.fixture
def plain(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder / "plain", dtype=torch.bfloat16).eval()


def empty(folder: Path) -> Any:
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "plain"), dtype=torch.bfloat16)


@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_that_is_dispatched_is_streamed_in_its_bytes_at_rest(
    offload: bool, folder: Path, plain: Any, tmp_path: Path
) -> None:
    given = {"offload_folder": tmp_path / "offload"} if offload else {}
    model: Any = load_checkpoint_and_dispatch(empty(folder).eval(), folder, device_map={"": "disk"}, **given)
    with torch.inference_mode():
        assert torch.equal(model(TOKENS).logits, plain(TOKENS).logits)
    assert streamer_of(model).traffic.streamed_bytes < 0.6 * sum(p.nbytes for p in plain.parameters())
    assert not list(tmp_path.rglob("*.dat"))
    if offload:
        index = json.loads((tmp_path / "offload" / "index.json").read_text())
        assert index.keys() == {name for name in plain.state_dict() if "_proj" not in name}


def test_a_folder_that_others_read_has_it_unpacked(folder: Path, plain: Any, tmp_path: Path) -> None:
    load_checkpoint_in_model(empty(folder), folder, device_map={"": "disk"}, offload_folder=tmp_path)
    weights = OffloadedWeightsLoader(save_folder=tmp_path)
    assert set(weights) == set(plain.state_dict())
    for name, tensor in plain.state_dict().items():
        assert torch.equal(weights[name], tensor), name
