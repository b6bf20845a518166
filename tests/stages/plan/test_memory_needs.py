"""What a plan says of caches is what a generation really keeps."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from functools import cache

import pytest
import torch

from offstage.pipeline.decoding import decode
from offstage.pipeline.kept_memory import MAPPED_BYTES
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.empty_init.rehearsed_call import weigh_media
from offstage.stages.empty_init.skeleton import CacheSpec, Skeleton
from offstage.stages.plan.memory_needs import (
    UNUSED_SHARE,
    BlockCache,
    MemoryNeeds,
    block_caches,
    cache_bytes,
    heap_bytes,
)
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.geometry import Geometry, Request
from tests.long_form import in_ci
from tests.stages.plan.cache_models import CONFIGS, WINDOW, build, inputs_of, kept_bytes
from tests.stages.plan.skeletons import outline

SHAPES = ((1, 1, 3 * WINDOW + 8, 20), (3, 2, 40, 10))
"""Prompts, beams, the length of each prompt and of its answer: beyond the window, and within it."""


@cache
def described(name: str) -> Skeleton:
    with init_empty_weights():
        model = build(name)
    skeleton = describe(model)
    if name != "whisper":
        return decode(Skeleton, json.loads(json.dumps(asdict(skeleton))))
    weighed, _ = weigh_media(model, inputs_of(name, sequences=1, length=0))
    return replace(skeleton, caches=weighed.caches)


def foretold(name: str, *, sequences: int, prompt: int, new: int) -> tuple[BlockCache, ...]:
    """Return what is foretold once all but the last token went through the model."""
    apart = {"whisper": 150, "t5": prompt, "bart": prompt}
    length = new if name in apart else prompt + new - 1
    request = Request(sequences, apart.get(name, prompt), length)
    return block_caches(Outline(described(name)), Geometry(), request, width=4)


@pytest.mark.parametrize(
    "name",
    in_ci("qwen3_next", "bart", of=CONFIGS),
)
def test_a_generation_keeps_what_was_foretold_by_kind_of_block(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    for prompts, beams, prompt, new in SHAPES:
        beams = 1 if name == "rwkv" else beams  # which beams don't go with
        given = inputs_of(name, sequences=prompts, length=prompt)
        kept = kept_bytes(model, given, new=new, beams=beams)
        predicted = foretold(name, sequences=prompts * beams, prompt=prompt, new=new)
        assert sum(one.finished for one in predicted) == pytest.approx(kept.tensors, rel=0.02)
        if name != "recurrent_gemma":  # of which a state is a view of what is one number longer
            assert sum(one.finished for one in predicted) == kept.finished
        if name not in ("t5", "bart", "whisper"):  # whose decoders begin with one position
            assert sum(one.prompted for one in predicted) == kept.prompted


def test_layers_of_a_window_and_of_all_positions_count_where_they_compute() -> None:
    """Gemma 3 has one layer of six that keeps all: on a device of its own it takes more than all others."""
    predicted = foretold("gemma3_text", sequences=1, prompt=32, new=16 * WINDOW)
    per_position = 2 * 2 * 16 * 4
    on = cache_bytes(predicted, lambda block: 1 if block == "model.layers.5" else 0)
    assert on == {0: 8 * WINDOW * per_position, 1: (32 + 16 * WINDOW - 1) * per_position}


def test_a_window_keeps_a_view_of_the_whole_prompt_until_the_next_token() -> None:
    spec = CacheSpec(("a", "b"), state_bytes=3, position_bytes=2, window=10)
    model = Outline(replace(outline({"w": 10}).skeleton, caches=(spec,)))
    caches = block_caches(model, Geometry(), Request(4, 100, 120), width=4)
    assert caches == tuple(BlockCache(name, 4 * (3 + 2 * 100), 4 * (3 + 2 * 10)) for name in "ab")
    assert cache_bytes(caches, lambda _: "cpu") == {"cpu": 2 * 4 * 203}
    lockstep = block_caches(model, Geometry(), Request(4, 100, 120, members=3), width=4)
    assert cache_bytes(lockstep, lambda _: "cpu") == {"cpu": 3 * 2 * 4 * 203}
    assert block_caches(model, Geometry(), Request(4, 100, 0), width=4) == ()


def test_what_no_rehearsal_showed_is_as_its_config_makes_likely_as_much_in_each_block() -> None:
    names = [f"l.{index}" for index in range(4)]
    model = outline({f"{name}.w": 10 for name in names}, classes=dict.fromkeys(names, "Block"), no_split=["Block"])
    geometry = Geometry(layers=4, cached=8)
    caches = block_caches(model, geometry, Request(2, 64, 100), width=2)
    assert [(one.block, one.finished) for one in caches] == [(name, 2 * 8 * 100 * 2) for name in names]
    halves = block_caches(model, replace(geometry, has_encoder=True), Request(2, 64, 100), width=2)
    assert {one.finished for one in halves} == {2 * 8 * (64 + 100) * 2}


def test_small_caches_that_grow_leave_as_much_unused_of_the_heap_and_mapped_ones_nothing() -> None:
    small = BlockCache("a", prompted=MAPPED_BYTES, finished=MAPPED_BYTES + 8, grows=True)
    mapped = BlockCache("b", prompted=2 * MAPPED_BYTES, finished=2 * MAPPED_BYTES, grows=True)
    state, waits = replace(small, grows=False), replace(small, waits=True)
    assert heap_bytes([mapped, state, waits]) == 0
    needs = MemoryNeeds(10, caches=(small, mapped, state))
    assert needs.heap_bytes == round(UNUSED_SHARE * (MAPPED_BYTES + 8))
    assert needs.bytes == 10 + needs.cache_bytes + needs.heap_bytes
