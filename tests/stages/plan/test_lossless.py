"""Whether streamed weights are packed, and what a plan expects of it before there is a copy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offstage.stages.checkpoints.extents import Extent
from offstage.stages.empty_init.skeleton import ModuleSpec, Skeleton, TensorSpec
from offstage.stages.machine.rates import Rates
from offstage.stages.plan import lossless, options
from offstage.stages.plan.lossless import NOMINAL, possible_packing, with_copies
from offstage.stages.plan.options import PlanConfig, StorageConfig
from offstage.stages.plan.outline import Outline
from tests.stages.plan.plans import make_plan


@pytest.mark.parametrize("unpacking", [10**9, 4 * 10**9, 10**10])
def test_packing_pays_below_the_rate_at_which_unpacking_and_using_take_as_long_as_reading_plain(unpacking: int) -> None:
    host = 10**10
    even = (1 - NOMINAL["bfloat16"] / 4) / (1 / unpacking + 1 / host)  # a quarter of what is beside the longer is added
    asked = config("auto", "direct", storage="1GB")
    for share, packs in ((0.98, "zstd"), (1.02, None)):
        rates = Rates(storage=round(even * share), host=host, dequantising=unpacking, calls=10**9, loops=10**9)
        assert make_plan(weights(), asked, rates=rates).codec == packs


def test_beside_an_accelerator_auto_weighs_what_unpacking_takes_while_it_computes() -> None:
    """A host that also computes would be busy with that: its rate says nothing of what unpacks for an accelerator."""
    asked = config("auto", "direct", storage="1GB") | {"device_map": "optimal", "max_memory": {"0": "150kB", "cpu": 0}}
    asked["hardware"] = {**asked["hardware"], "devices": [{"memory": "1GB"}]}
    rates = Rates(storage=2 * 10**9, host=10**9, dequantising=4 * 10**9, calls=10**9, loops=10**9)
    assert make_plan(weights(), asked, rates=rates).codec == "zstd"
    assert make_plan(weights(), config("auto", "direct", storage="1GB"), rates=rates).codec is None


def test_what_is_resident_as_it_is_used_is_not_packed() -> None:
    asked = config("auto", "direct", storage="1MB") | {"device_map": "optimal", "max_memory": {"cpu": "1MB"}}
    assert make_plan(weights(), asked).codec is None


@pytest.mark.parametrize(
    ("codec", "io", "storage", "packs"),
    [
        ("none", "direct", "1MB", None),
        ("zstd", "direct", "100GB", "zstd"),
        ("zstd", "auto", "100GB", "zstd"),
        ("auto", "direct", "500MB", "zstd"),
        ("auto", "direct", "100GB", None),
        ("auto", "mmap", "1MB", None),
    ],
)
def test_the_key_decides_and_auto_goes_by_the_rates(codec: str, io: str, storage: str, packs: str | None) -> None:
    plan = make_plan(weights(), config(codec, io, storage=storage))
    assert plan.codec == packs
    assert bool(plan.loading.packs) == bool(packs)
    expected = 2**18 * (NOMINAL["bfloat16"] if packs else 1) + 512
    if io == "direct":
        assert plan.forecast["streamed_bytes_per_token"] == pytest.approx(expected, rel=1e-3)


def test_a_map_has_no_use_for_what_is_packed() -> None:
    given = PlanConfig(storage=StorageConfig(io="mmap", codec="zstd"))
    assert [fault.key for fault in options.faults(given)] == ["storage.codec"]


def test_a_few_stretches_of_the_checkpoint_say_how_far_it_shrinks(tmp_path: Path) -> None:
    torch.manual_seed(0)
    tensors = {
        "noise": torch.randint(-(2**15), 2**15, (2**17,), dtype=torch.int16).view(torch.bfloat16),
        "weights": torch.randn(2**17).bfloat16(),
        "zeros": torch.zeros(2**17).bfloat16(),
        "small": torch.randn(8).bfloat16(),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    packing = possible_packing(StorageConfig(codec="zstd"), weights(), {"model": {"path": str(tmp_path)}})
    assert packing is not None
    assert packing["bfloat16"] == pytest.approx((1 + 0.67 + 0) / 3, abs=0.07)
    assert packing == possible_packing(StorageConfig(codec="auto"), weights(), {"model": {"path": str(tmp_path)}})
    damaged = tmp_path / "model.safetensors"
    damaged.write_bytes(b"nothing")
    packing = possible_packing(StorageConfig(codec="zstd"), weights(), {"model": {"path": str(tmp_path)}})
    assert packing is not None
    assert packing == {"bfloat16": NOMINAL["bfloat16"]}, "whoever loads it says what is wrong"


def test_a_checkpoint_is_packed_for_its_share_once_and_again_where_its_content_is_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    weighed: list[Extent] = []

    def watched(extent: Extent) -> float:
        weighed.append(extent)
        return packed_share(extent)

    packed_share = lossless._packed_share
    monkeypatch.setattr(lossless, "_packed_share", watched)
    asked: Any = (StorageConfig(codec="zstd"), weights(), {"model": {"path": str(tmp_path)}}, tmp_path / "cache")
    save_file({"weights": torch.randn(2**17).bfloat16()}, tmp_path / "model.safetensors")
    first = possible_packing(*asked)
    once = len(weighed)
    assert once
    assert possible_packing(*asked) == first == possible_packing(*asked[:3])
    assert len(weighed) == 2 * once, "without a cache it is packed each time"
    save_file({"weights": torch.zeros(2**17).bfloat16()}, tmp_path / "model.safetensors")
    other = possible_packing(*asked)
    assert first is not None
    assert other is not None
    assert other["bfloat16"] < 0.1 < first["bfloat16"]


def test_weights_that_all_learn_and_those_looked_up_stay_as_they_are() -> None:
    outline = weights(looks_up=True)
    trains = {"stages": ["finetune"], "model": {}, "finetune": {}}
    assert possible_packing(StorageConfig(codec="zstd"), outline, trains) is None
    packing = possible_packing(StorageConfig(codec="zstd"), outline, {})
    assert with_copies(outline, packing).packed.keys() == {"b.weight"}
    assert with_copies(outline, None) is outline


def config(codec: str, io: str, *, storage: str) -> dict[str, Any]:
    hardware = {"rates": {"storage": storage, "calls": "1GB", "loops": "1GB"}, "devices": [], "host": {"memory": "2GB"}}
    shared = {"max_memory": {"cpu": "300kB"}, "device_map_overrides": {}, "generate": {}, "model": {}}
    return {**shared, "device_map": "disk", "hardware": hardware, "storage": {"io": io, "codec": codec}}


def weights(*, looks_up: bool = False) -> Outline:
    """Two layers of 128 KiB, and a norm that is too small to be packed."""
    modules = (
        ModuleSpec("", "Model"),
        ModuleSpec("a", "Layer", looks_up=looks_up),
        ModuleSpec("b", "Layer"),
        ModuleSpec("norm", "Layer"),
    )
    tensors = (
        TensorSpec("a.weight", (256, 256), "bfloat16"),
        TensorSpec("b.weight", (256, 256), "bfloat16"),
        TensorSpec("norm.weight", (256,), "bfloat16"),
    )
    return Outline(Skeleton(tensors, modules, order=("a", "b", "norm")))
