"""The answer never changes: whatever lies where, logits are bitwise those of the plain model, and so are the tokens."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig

from tests.e2e.pipelines import dispatched, dispatched_model
from tests.e2e.test_architectures import CONFIGS, ENDS, SIZES, WORDS, save
from tests.long_form import in_ci

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

PLACEMENTS, ACCELERATED = 20, 4
ARCHITECTURES = [*CONFIGS, "mixtral"]
ROWS = [[5, 6, 7, 8, 9], [11, 12], [3, 4, 5], [40]]


@pytest.fixture(scope="module", params=in_ci("gpt2", of=ARCHITECTURES))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "mixtral":
        torch.manual_seed(7)
        config = MixtralConfig(**SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4)
        AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder, max_shard_size="40KB")
    else:
        save(folder, request.param, torch.bfloat16, safe=True, sharded=True)
    return folder


@pytest.fixture(scope="module")
def outputs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder of outputs for all placements of a checkpoint: the model is described once for all of them."""
    return tmp_path_factory.mktemp(f"outputs-of-{checkpoint.name}")


def padded() -> tuple[torch.Tensor, torch.Tensor]:
    longest = max(map(len, ROWS))
    tokens = torch.tensor([[0] * (longest - len(row)) + row for row in ROWS])
    mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in ROWS])
    return tokens, mask


def random_map(
    model: torch.nn.Module, chance: random.Random, others: Sequence[int | str] = ("cpu",)
) -> dict[str, int | str]:
    """Return a map that puts every tensor anywhere, with tied tensors together: no-split layers are split at will.

    What isn't on disk is on one of the ``others``.
    """
    share = chance.random()
    names: dict[int, list[str]] = {}
    tensors = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    for name, tensor in tensors:
        names.setdefault(id(tensor), []).append(name)
    homes = {key: "disk" if chance.random() < share else chance.choice(others) for key in names}
    return {name: homes[key] for key, group in names.items() for name in group}


def answers(model: Any) -> list[torch.Tensor]:
    """Return logits and tokens of one row and of a left-padded batch, greedy and sampled."""
    tokens, mask = padded()
    one = torch.tensor([ROWS[0]])
    with torch.no_grad():
        outputs = [model(input_ids=one).logits, model(input_ids=tokens, attention_mask=mask).logits]
    options = {"max_new_tokens": 5, "pad_token_id": 0}
    outputs.append(model.generate(one, attention_mask=torch.ones_like(one), do_sample=False, **options))
    outputs.append(model.generate(tokens, attention_mask=mask, do_sample=False, **options))
    torch.manual_seed(11)
    outputs.append(model.generate(tokens, attention_mask=mask, do_sample=True, temperature=0.9, top_p=0.9, **options))
    return outputs


def test_any_placement_gives_the_answer_of_the_plain_model(checkpoint: Path, outputs: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = answers(plain)
    chance = random.Random(checkpoint.name)
    for number in range(PLACEMENTS):
        placement = random_map(plain, chance) if number else "disk"
        model = dispatched_model(
            checkpoint, outputs, device_map=placement, max_memory={"cpu": "1GB"},
            storage={"io": chance.choice(["direct", "direct", "mmap"])},
        )  # fmt: skip
        for got, wanted in zip(answers(model), expected, strict=True):
            assert torch.equal(got, wanted), (number, placement)


def test_simulated_accelerators_give_the_answer_of_the_plain_model(checkpoint: Path, outputs: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(checkpoint)
    expected = answers(plain)
    chance = random.Random(checkpoint.name)
    for number in range(ACCELERATED):
        placement = random_map(plain, chance, others=(0, 1, "cpu", "cpu"))
        live = dispatched(
            checkpoint, outputs, device_map=placement,
            max_memory={0: "1GB", 1: "1GB", "cpu": "1GB"}, hardware={"devices": [{"memory": "2GB"}, {"memory": "2GB"}]},
        )  # fmt: skip
        peaks = live.devices.peaks
        for got, wanted in zip(answers(live.model), expected, strict=True):
            assert torch.equal(got, wanted), (number, placement)
        assert live.devices.peaks == peaks, "staging memory is allocated once, and none beside it"
