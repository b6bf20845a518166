"""What a plan has an accelerator take is never less than torch's allocator needs there, in the pools of all streams."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GPT2Config, LlamaConfig, MixtralConfig

import offstage
from offstage.pipeline.environment import ALLOCATOR_SETTINGS
from offstage.pipeline.errors import BudgetError
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.machine.caching_allocator import (
    BLOCK_BYTES,
    LARGE_SEGMENT,
    SMALL_BYTES,
    SMALL_SEGMENT,
    Block,
    CachingAllocator,
)
from offstage.stages.machine.expandable_segments import SETTING
from offstage.stages.plan import allocator
from offstage.stages.plan.allocator import piece_for
from offstage.stages.plan.plan import DevicePlan
from tests.e2e.fp8_checkpoints import save_fp8
from tests.long_form import in_ci, in_turn
from tests.stages.simulated_memory import SimulatedMemory

CONFIG: dict[str, Any] = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 2000, "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
HARDWARE = {
    "devices": [{"name": "one", "memory": "2GB"}],
    "rates": {"storage": "1GB", "host": "10GB", "host_to_device": "100MB", "device": "100GB", "dequantising": "1MB"},
}
WHERE: dict[str, dict[str, Any]] = {
    "resident": {"device_map": {"": 0}, "max_memory": {0: "200MB"}},
    "streamed": {"device_map": {"": 0, "model.layers": "cpu"}, "max_memory": {0: "26MB", "cpu": "200MB"}},
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide")
    AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fp8(tmp_path_factory.mktemp("packed"), LlamaConfig(**{**CONFIG, "num_hidden_layers": 2}))


def generate(folder: Path, *, left: int = 0, rows: int, prompt: int, new: int, **options: Any) -> int:
    """Answer prompts where there is what the plan says, less ``left`` bytes; return what is the allocator's of it."""
    return compared(folder, left=left, rows=rows, prompt=prompt, new=new, **options)[0].ledger["allocator"]


def compared(folder: Path, *, left: int, rows: int, prompt: int, new: int, **options: Any) -> tuple[DevicePlan, int]:
    """Return what the plan says of the accelerator of ``generate``, and what was reserved there at most."""
    tokens = torch.randint(2, 2000, (rows, prompt), generator=torch.Generator().manual_seed(1))
    given = {"batch_size": rows, "max_length": prompt + new, "hardware": HARDWARE, "cache": folder / "cache", **options}
    with offstage.load(folder, **given) as loaded:
        planned, ledger = loaded.plan.devices[0], streamer_of(loaded.model)._devices.ledger(0)
        assert ledger is not None
        ledger.allocator.capacity = planned.own_bytes - left
        with torch.inference_mode(), SimulatedMemory(ledger.allocator):
            loaded.model.generate(tokens, min_new_tokens=new, max_new_tokens=new, do_sample=False)
        return planned, streamer_of(loaded.model)._devices.reserved[0]


SETTINGS = ("", SETTING)
REQUESTS = ((1, 60, 3), (6, 130, 6), (2, 500, 3))
"""Of each its rows, the prompt's tokens, and the new ones."""


@pytest.mark.parametrize(("where", "settings", "request_of"), in_turn(WHERE, SETTINGS, REQUESTS))
def test_a_generation_fits_where_the_plan_says_so_by_the_allocators_rules(
    where: str, settings: str, request_of: tuple[int, int, int], checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, prompt, new = request_of
    monkeypatch.setenv(ALLOCATOR_SETTINGS[0], settings)
    beside = generate(checkpoint, rows=rows, prompt=prompt, new=new, **WHERE[where])
    with pytest.raises(BudgetError, match="out of memory"):
        generate(checkpoint, left=beside, rows=rows, prompt=prompt, new=new, **WHERE[where])


@pytest.mark.parametrize(("where", "settings"), in_turn(WHERE, SETTINGS))
def test_few_activations_are_not_said_to_take_more_than_the_segments_that_they_share(
    where: str, settings: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(ALLOCATOR_SETTINGS[0], settings)
    planned, reserved = compared(checkpoint, left=0, rows=1, prompt=60, new=3, **WHERE[where])
    assert reserved <= planned.own_bytes <= reserved + LARGE_SEGMENT + 2 * SMALL_SEGMENT


def churn(chance: random.Random, most: int, room: int) -> int:
    """Take and give back large blocks of at most so many bytes at once, where ``room`` bytes of a segment are left;
    return how much is reserved in the end.
    """
    allocator, blocks = CachingAllocator(), list[Block]()
    allocator.allocate(LARGE_SEGMENT // 2 - BLOCK_BYTES)
    if (left := LARGE_SEGMENT // 2 + BLOCK_BYTES - room) > SMALL_BYTES:
        allocator.allocate(left)
    asked = dict[int, int]()
    for _ in range(80):
        size = chance.choice([SMALL_BYTES + BLOCK_BYTES, chance.randint(SMALL_BYTES + 1, most)])
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        while sum(asked.values()) + size > most:
            block = blocks.pop(chance.randrange(len(blocks)))
            del asked[id(block)]
            allocator.free(block)
        blocks.append(allocator.allocate(size))
        asked[id(blocks[-1])] = size
    return allocator.reserved


@pytest.mark.parametrize("mib", [2, 2.5, 3, 3.5, 4])
def test_few_large_blocks_always_find_a_place_in_a_piece_that_is_large_enough_and_not_in_less(mib: float) -> None:
    most = int(mib * 2**20)
    assert piece_for(most) < LARGE_SEGMENT // 2
    cases = [random.Random(seed) for seed in range(400)]
    assert {churn(chance, most, piece_for(most)) for chance in cases} == {LARGE_SEGMENT}
    if mib > 2.5:
        assert any(churn(chance, most, most) > LARGE_SEGMENT for chance in cases)


def test_what_an_accelerator_lacks_for_a_request_alone_is_enough_beside_the_weights_that_come(checkpoint: Path) -> None:
    def accelerator(memory: int, budget: int) -> None:
        hardware = {**HARDWARE, "devices": [{"memory": str(memory)}]}
        given = {"batch_size": 4, "max_length": 900, "hardware": hardware, "cache": checkpoint / "cache"}
        where = {"device_map": {"": 0, "model.layers": "cpu"}, "max_memory": {0: str(budget), "cpu": "200MB"}}
        offstage.load(checkpoint, **given, **where).close()

    needed, budget = 30 * 2**20, 26 * 10**6
    with pytest.raises(BudgetError, match=r"it needs \d+ bytes .* more beside any weights") as refused:
        accelerator(needed, budget)
    lacking = re.search(r"it needs (\d+) bytes", str(refused.value))
    assert lacking is not None
    with pytest.raises(BudgetError):
        accelerator(needed + int(lacking[1]) - LARGE_SEGMENT, budget)
    accelerator(needed + int(lacking[1]) + budget, budget)


def test_the_pool_of_the_stream_that_unpacks_is_counted(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {"device_map": {"": 0, "model.layers": "disk"}, "max_memory": {0: "42MB", "cpu": "1MB"}}
    generate(packed, rows=1, prompt=6, new=2, **given)
    monkeypatch.setattr(allocator, "_in_pool_apart", lambda _: [])
    with pytest.raises(BudgetError, match="out of memory"):
        generate(packed, rows=1, prompt=6, new=2, **{**given, "cache": packed / "other"})


WIDE: dict[str, Any] = {
    "hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32_000,
    "max_position_embeddings": 1024, "pad_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
GIGABYTES: dict[str, Any] = {
    "llama": LlamaConfig(**WIDE, intermediate_size=2816, num_hidden_layers=34),
    "gpt2": GPT2Config(vocab_size=32_000, n_embd=1024, n_layer=36, n_head=16, pad_token_id=0, eos_token_id=1),
    "mixtral": MixtralConfig(**WIDE, intermediate_size=1408, num_hidden_layers=11, num_local_experts=8),
}


@pytest.mark.parametrize("kind", in_ci("gpt2", of=GIGABYTES))
def test_what_is_reserved_of_a_model_of_a_gigabyte_is_within_a_twentieth_of_what_its_plan_says(
    kind: str, tmp_path: Path
) -> None:
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(GIGABYTES[kind], dtype=torch.bfloat16)
    model.to_empty(device="cpu").tie_weights()
    model.save_pretrained(tmp_path)
    del model
    request = {"left": 0, "rows": 1, "prompt": 24, "new": 2}
    planned, reserved = compared(tmp_path, **request, device_map={"": 0}, max_memory={0: "1.2GB"})
    assert reserved <= planned.own_bytes <= 1.05 * reserved
