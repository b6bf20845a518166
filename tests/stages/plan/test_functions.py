from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offstage.pipeline.errors import BudgetError
from offstage.stages.plan import (
    check_device_map,
    clean_device_map,
    get_balanced_memory,
    get_max_memory,
    infer_auto_device_map,
)
from tests.stages.empty_init.test_experts import CONFIGS, on_meta


class Three(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.empty(1000, 1000, device="meta"))
        self.b = nn.Parameter(torch.empty(1000, 1000, device="meta"))
        self.layer = nn.Linear(1000, 1000, device="meta")


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 10, bias=False)
        self.head.weight = self.embed.weight


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (6_000_000, {"": "disk"}),
        (8_003_999, {"": "disk"}),
        (8_004_000, {"a": "cpu", "b": "disk", "layer": "disk"}),
        (10_000_000, {"a": "cpu", "b": "disk", "layer": "disk"}),
        ("12.004MB", {"": "cpu"}),
    ],
)
def test_the_map_keeps_the_reserve_free(budget: int | str, expected: dict[str, Any]) -> None:
    assert infer_auto_device_map(Three(), max_memory={"cpu": budget}) == expected


@pytest.mark.parametrize("budget", ["10gb", -1, "-1GB", "1.5", float("nan"), "inf"])
def test_a_size_that_is_none_is_refused(budget: Any) -> None:
    with pytest.raises(ValueError, match="is not a size; accepted"):
        infer_auto_device_map(Three(), max_memory={"cpu": budget})


@pytest.mark.parametrize("sizes", ["1GB", 10**9, ["1GB"]])
def test_a_size_without_a_device_is_refused(sizes: Any) -> None:
    with pytest.raises(ValueError, match=r"^max_memory: .* names no device; give each its own size"):
        get_max_memory(sizes)


def test_a_budget_below_its_reserve_is_refused() -> None:
    with pytest.raises(ValueError, match=r"max_memory\.cpu: .* the least that works is 4004000 bytes"):
        infer_auto_device_map(Three(), max_memory={"cpu": 4_003_999})


def test_max_memory_is_read_in_order_and_left_alone() -> None:
    given = {"cpu": "1KiB", "1": 5, 0: "7"}
    assert list(get_max_memory(given).items()) == [(0, 7), (1, 5), ("cpu", 1024)]
    assert given == {"cpu": "1KiB", "1": 5, 0: "7"}


def test_the_machine_gives_a_budget_for_the_host() -> None:
    assert get_max_memory()["cpu"] > 0


def test_balanced_memory_leads_to_the_balanced_map() -> None:
    model = nn.Sequential(*(nn.Linear(10, 10, bias=False) for _ in range(6)))
    shares = get_balanced_memory(model, max_memory={0: 2400, 1: 2400, 2: 2400, "cpu": 100})
    assert shares == {0: 800, 1: 800, 2: 2400, "cpu": 100}
    assert infer_auto_device_map(model, max_memory=shares) == {"0": 0, "1": 0, "2": 1, "3": 1, "4": 2, "5": 2}
    assert get_balanced_memory(model, max_memory={0: 2400, 1: 1200, 2: 1200}, low_zero=True)[0] == 0


def test_a_no_split_class_stays_together() -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2))
    whole = infer_auto_device_map(model, max_memory={0: 47, 1: 1000}, no_split_module_classes="Sequential")
    assert whole == {"": 1}
    with_linear = infer_auto_device_map(model, max_memory={0: 47, 1: 1000}, clean_result=False)
    assert with_linear == {"0.0": 0, "0.1": 1, "1": 1}


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"embed": 0, "head": 0}, "no entry covers 'norm.weight' and 1 more; add 'norm', or ''"),
        ({"": 0, "norm": 0, "norm.weight": 0, "norm.bias": "cpu"}, "'norm' is on 0, but 'norm.bias'"),
        ({"": 0, "head": "cpu"}, "one tied tensor"),
        ({"": "gpu"}, "not a device"),
    ],
)
def test_a_bad_map_is_refused(device_map: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        check_device_map(Tied(), device_map)


def test_a_good_map_passes() -> None:
    check_device_map(Tied(), {"embed": torch.device("cpu"), "norm": "disk", "head": "cpu"})
    check_device_map(Tied(), {"head": 0, "norm": "disk"})  # the embedding is the head's twin


def test_names_of_nothing_in_the_model_are_a_warning() -> None:
    with pytest.warns(UserWarning, match=r"'emb' \(did you mean 'embed'\?\), 'other'"):
        check_device_map(Tied(), {"": 0, "emb": 1, "other": 1})


@pytest.mark.parametrize(
    ("device_map", "expected"),
    [
        ({"a": 0, "b": 0, "c": 0}, {"": 0}),
        ({"a.x": 0, "a.y": 0, "b.x": 1, "b.y": 1, "c": 1}, {"c": 1, "a": 0, "b": 1}),
        ({"a.x.p": 0, "a.x.q": 0, "a.y": 1}, {"a.y": 1, "a.x": 0}),
        ({"a": 0, "a.b": 1, "a.c": 1}, {"a": 0, "a.b": 1, "a.c": 1}),
        ({"": 0}, {"": 0}),
        ({}, {}),
    ],
)
def test_a_map_is_folded(device_map: dict[str, Any], expected: dict[str, Any]) -> None:
    before = dict(device_map)
    assert clean_device_map(device_map) == expected
    assert device_map == before


def test_a_mixtures_layers_are_whole_as_the_field_has_them() -> None:
    model = on_meta(CONFIGS["Mixtral"])
    layer = sum(tensor.nbytes for tensor in model.model.layers[0].parameters())
    rest = sum(tensor.nbytes for name, tensor in model.named_parameters() if not name.startswith("model.layers."))
    with pytest.raises(
        BudgetError, match=f"32 B of weights and .*in use at once .*the least that works is {layer + 32} bytes"
    ):
        infer_auto_device_map(model, {"cpu": layer - 1}, ["MixtralDecoderLayer"])
    device_map = infer_auto_device_map(model, {"cpu": rest + 2 * layer}, ["MixtralDecoderLayer"])
    assert [device_map[f"model.layers.{index}"] for index in range(3)] == ["cpu", "disk", "disk"]
