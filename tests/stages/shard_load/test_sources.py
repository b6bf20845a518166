"""What each tensor is loaded from, over random layouts: every tensor has one source, and is the checkpoint's."""

from __future__ import annotations

import os
import random
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st

from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.empty_init.describe import describe
from offstage.stages.plan.plan import LoadPlan
from offstage.stages.shard_load.checkpoint_match import Load, prepare
from offstage.stages.shard_load.offload_store import open_store
from offstage.stages.shard_load.place import place
from offstage.stages.shard_load.sources import Sources, find_sources
from offstage.stages.shard_load.stored_weights import fill_store
from offstage.stages.units import DeviceId
from tests.long_form import LONG_FORM
from tests.stages.shard_load.checkpoints import assert_same, save_bin, state_of
from tests.stages.shard_load.test_packed_copies import LLAMA, MIXTRAL, empty_model, make_model

SAVED = {
    "as it is": torch.bfloat16,
    "cast": torch.float32,
    "bin": torch.bfloat16,
}
CONFIGS = {"llama": LLAMA, "mixtral": MIXTRAL}
some = settings(
    max_examples=40 if os.environ.get(LONG_FORM) else 4,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)


@pytest.fixture(scope="module", params=[(kind, saved) for kind in CONFIGS for saved in SAVED])
def saved(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any, dict[str, torch.Tensor]]:
    """A checkpoint of which every third weight is noise, and what a model of it is in bfloat16."""
    kind, saved = request.param
    model, folder = make_model(CONFIGS[kind], SAVED[saved]), tmp_path_factory.mktemp(kind)
    with torch.no_grad():
        for parameter in list(model.parameters())[::3]:
            noise = torch.randint(-(2**15), 2**15, parameter.shape, dtype=torch.int16).view(torch.bfloat16)
            parameter.copy_(noise.nan_to_num(1.0))
    (save_bin if saved == "bin" else type(model).save_pretrained)(model, folder)
    return folder, CONFIGS[kind], model.to(torch.bfloat16).state_dict()


def load_of(folder: Path, config: Any) -> Load:
    model = empty_model(config)
    return prepare(model, describe(model, rehearsed=False), checkpoint=open_checkpoint(folder))


def layout(load: Load, seed: int) -> LoadPlan:
    """Return a plan that has each tensor lie anywhere, and rest any way that a plan may ask for."""
    chance = random.Random(seed)
    names = [spec.name for spec in load.skeleton.tensors]
    homes: dict[str, DeviceId] = {name: chance.choice(["disk", "disk", "cpu"]) for name in names}
    routed = {name for spec in load.skeleton.experts if chance.random() < 0.5 for name in spec.tensors}
    waits = frozenset(name for name in names if homes[name] == "cpu" and chance.random() < 0.5)
    packs = frozenset(name for name in names if chance.random() < chance.choice([0, 0.7]))
    return LoadPlan(homes, by_expert=frozenset(routed), packed_on_host=waits, packs=packs)


def check_table(sources: Sources, plan: LoadPlan) -> None:
    """Each tensor is in memory or rests somewhere, on the side where the plan has it, and packed only if it may."""
    for name, source in sources.items():
        assert not source.wants_store
        assert source.waits == bool(source.at), name
        assert source.waits or source.home != "disk"
        assert (source.home == "disk") == (source.way in ("in_place", "by_expert", "made", "packed_copy")), name
        packed = [isinstance(at, PackedTensor) for at in source.at]
        assert any(packed) == all(packed) == (source.way in ("packed_copy", "packed_on_host")) or not packed
        assert name in plan.packs or not any(packed)


@given(seeds=st.lists(st.integers(0, 2**32), min_size=2, max_size=2))
@some
def test_whatever_plans_say_one_after_another_every_weight_is_the_checkpoint_s(
    saved: tuple[Path, Any, dict[str, torch.Tensor]], seeds: list[int]
) -> None:
    """They share the store of a checkpoint: what one found out of a tensor mustn't lose it to the next."""
    folder, config, wanted = saved
    with tempfile.TemporaryDirectory() as store:
        for seed in seeds:
            load = load_of(folder, config)
            plan = layout(load, seed)
            sources = find_sources(load, plan)
            filled = fill_store(load, sources, open_store(Path(store), load.store_key))
            assert list(filled) == list(sources)
            assert {source.spec.name for source in filled.values()} == {spec.name for spec in load.skeleton.unique}
            check_table(filled, plan)
            again = fill_store(load, sources, open_store(Path(store), load.store_key), full=True)
            assert {name: source.way for name, source in again.items()} == {
                name: source.way for name, source in filled.items()
            }
            placed = place(load, filled)
            assert_same(state_of(placed), wanted)
            for source in filled.values():
                assert (source.outer in placed.offloaded) == source.waits


def test_a_copy_that_does_not_shrink_leaves_its_tensor_where_it_would_be_without(
    saved: tuple[Path, Any, dict[str, torch.Tensor]],
) -> None:
    load = load_of(*saved[:2])
    names = frozenset(spec.name for spec in load.skeleton.tensors)
    homes: dict[str, DeviceId] = dict.fromkeys(names, "disk")
    plain = find_sources(load, LoadPlan(homes, by_expert=load.expert_names))
    copied = find_sources(load, LoadPlan(homes, by_expert=load.expert_names, packs=names))
    assert any(source.otherwise for source in copied.values())
    for name, source in copied.items():
        assert (source.turned_back if source.otherwise else source) == plain[name]
