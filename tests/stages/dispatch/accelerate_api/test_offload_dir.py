"""The folder that a mixture is offloaded to: where its experts lie, each by itself."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.dispatch.accelerate_api.offload_dir import locate_weights
from offstage.stages.dispatch.accelerate_api.streamed_model import Wanted, plan_for
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Skeleton
from offstage.stages.plan.plan import LoadPlan, Plan
from offstage.stages.plan.serving import Serving
from offstage.stages.shard_load.checkpoint_match import prepare
from offstage.stages.shard_load.expert_rows import read_rows
from offstage.stages.shard_load.functions import fill_model
from offstage.stages.shard_load.offload_store import read_index
from offstage.stages.shard_load.sources import DiskWeights, find_sources
from tests.stages.plan.plans import with_lines
from tests.stages.shard_load.checkpoints import assert_same
from tests.stages.shard_load.test_rows import empty_mixture, make_mixture


def plan_on_disk(skeleton: Skeleton, *, routes: bool) -> Plan:
    """Return a plan that has all on disk, experts served one by one where it ``routes``."""
    plan = plan_for(skeleton, Wanted({spec.name: "disk" for spec in skeleton.tensors}, "cpu"))
    experts = {name for spec in skeleton.experts for name in spec.tensors}
    way: Serving = "experts" if routes else "direct"
    return with_lines(plan, lambda line: line._replace(serving=way) if line.name in experts else line)


def values_of(weights: DiskWeights) -> Mapping[str, torch.Tensor]:
    return {name: read_rows(rows) for name, rows in weights.rows.items()}


def experts_in(model: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in model.state_dict().items() if ".experts." in name}


def test_experts_that_were_written_to_the_folder_are_slices_of_their_files(tmp_path: Path) -> None:
    model = make_mixture("Mixtral")
    skeleton = describe(model, rehearsed=False)
    located = locate_weights(model, skeleton, plan_on_disk(skeleton, routes=True), folder=tmp_path)
    assert_same(values_of(located), experts_in(model))
    assert_same(located, model.state_dict())


@pytest.fixture
def indexed(tmp_path: Path) -> Path:
    """A folder whose index says that the experts lie in a checkpoint, one by one."""
    make_mixture("Mixtral").save_pretrained(tmp_path / "checkpoint")
    empty = empty_mixture("Mixtral")
    skeleton, checkpoint = describe(empty, rehearsed=False), open_checkpoint(tmp_path / "checkpoint")
    plan = plan_on_disk(skeleton, routes=True)
    load = prepare(empty, skeleton, checkpoint=checkpoint)
    sources = find_sources(load, LoadPlan(plan.homes, by_expert=frozenset(plan.serving)))
    fill_model(load, sources, tmp_path / "folder", spills=False)
    return tmp_path / "folder"


def test_experts_that_the_index_has_one_by_one_are_read_where_they_lie(indexed: Path) -> None:
    model, skeleton = empty_mixture("Mixtral"), describe(empty_mixture("Mixtral"), rehearsed=False)
    located = locate_weights(model, skeleton, plan_on_disk(skeleton, routes=True), folder=indexed)
    assert_same(values_of(located), experts_in(make_mixture("Mixtral")))
    assert not located.rows.keys() & located.extents.keys()
    assert not list(indexed.glob("*.dat"))


def test_a_plan_that_streams_them_whole_has_them_written_to_the_folder(indexed: Path) -> None:
    model, skeleton = empty_mixture("Mixtral"), describe(empty_mixture("Mixtral"), rehearsed=False)
    located = locate_weights(model, skeleton, plan_on_disk(skeleton, routes=False), folder=indexed)
    assert located.rows.keys() <= located.extents.keys()
    assert_same(located, make_mixture("Mixtral").state_dict())
    assert len(list(indexed.glob("*.dat"))) == len(located.rows)


def test_without_a_folder_for_them_that_is_refused(indexed: Path) -> None:
    model, skeleton = empty_mixture("Mixtral"), describe(empty_mixture("Mixtral"), rehearsed=False)
    with pytest.raises(CheckpointError, match=r"in 12 pieces.*give offload_dir, a folder"):
        locate_weights(model, skeleton, plan_on_disk(skeleton, routes=False), folder=None, index=read_index(indexed))
