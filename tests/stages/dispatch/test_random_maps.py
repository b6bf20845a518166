"""The same bits from every door: models of several kinds under random maps, by each call of the Python API."""

import random
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import (
    AutoConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
)

import offstage
from tests.long_form import in_ci

TOKENS = torch.tensor([[3, 1, 4, 1, 5], [9, 2, 6, 5, 3]])
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"vocab_size": 64, "num_hidden_layers": 3, "max_position_embeddings": 64}
KINDS: dict[str, Any] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SIZES)),
    "tied llama": (LlamaForCausalLM, LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**SIZES, num_local_experts=4)),
    "gpt2": (GPT2LMHeadModel, GPT2Config(vocab_size=64, n_embd=32, n_layer=3, n_head=4, n_positions=64)),
}


def random_map(model: nn.Module, chance: random.Random) -> dict[str, str]:
    """Return a map that puts modules and single tensors anywhere, tied tensors together."""
    chosen = {"": chance.choice(["cpu", "disk"])}
    for name, module in model.named_modules():
        whole = chance.random() < 0.6
        for tensor, _ in module.named_parameters(recurse=False):
            if chance.random() < 0.5:
                chosen[name if whole else f"{name}.{tensor}"] = chance.choice(["cpu", "disk"])
    for group in offstage.find_tied_parameters(model):
        chosen |= dict.fromkeys([name.rpartition(".")[0] for name in group], chance.choice(["cpu", "disk"]))
        chosen = {name: device for name, device in chosen.items() if name not in group}
    return chosen


Door = Callable[[Any, Path, dict[str, str], Path], nn.Module]


def by_load_checkpoint_and_dispatch(kind: Any, checkpoint: Path, device_map: dict[str, str], folder: Path) -> nn.Module:
    with offstage.init_empty_weights():
        model = kind._from_config(AutoConfig.from_pretrained(checkpoint), dtype=torch.bfloat16).eval()
    model.tie_weights()
    options = {"device_map": device_map, "offload_folder": folder / "offload", "dtype": torch.bfloat16}
    return offstage.load_checkpoint_and_dispatch(model, checkpoint, **options)


def by_dispatch_model(kind: Any, checkpoint: Path, device_map: dict[str, str], folder: Path) -> nn.Module:
    model = kind.from_pretrained(checkpoint, dtype=torch.bfloat16).eval()
    return offstage.dispatch_model(model, device_map, offload_dir=folder / "dispatched")


def by_disk_offload(kind: Any, checkpoint: Path, device_map: dict[str, str], folder: Path) -> nn.Module:
    return offstage.disk_offload(kind.from_pretrained(checkpoint, dtype=torch.bfloat16).eval(), folder / "disk")


def by_load(kind: Any, checkpoint: Path, device_map: dict[str, str], folder: Path) -> nn.Module:
    options = {"dtype": torch.bfloat16, "cache": folder.parent / "cache", "max_length": 64}
    return offstage.load(checkpoint, device_map=device_map, **options).model


DOORS: list[Door] = [by_load_checkpoint_and_dispatch, by_dispatch_model, by_disk_offload, by_load]


STORED = (torch.float32, torch.bfloat16)
CASES = list(product(DOORS, STORED, KINDS))


@pytest.mark.parametrize(
    ("door", "stored", "kind"),
    in_ci(*product(DOORS, STORED[:1], ("mixtral",)), *product(DOORS, STORED[1:], ("gpt2",)), of=CASES),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
@torch.no_grad()
def test_every_door_gives_the_bits_of_the_plain_model(
    door: Door, stored: torch.dtype, kind: str, tmp_path: Path
) -> None:
    model_class, config = KINDS[kind]
    torch.manual_seed(0)
    model_class(config).to(stored).save_pretrained(tmp_path / "checkpoint", max_shard_size="40KB")
    plain = model_class.from_pretrained(tmp_path / "checkpoint", dtype=torch.bfloat16).eval()
    expected, chance = plain(TOKENS).logits, random.Random(f"{kind} {stored}")
    for turn in range(4):
        device_map = random_map(plain, chance)
        model = door(model_class, tmp_path / "checkpoint", device_map, tmp_path / str(turn))
        for _ in range(2):
            assert torch.equal(model(TOKENS).logits, expected), device_map
