from __future__ import annotations

import pytest

from offstage.pipeline.errors import ConfigError
from offstage.stages.plan.placement import all_homes, fold
from offstage.stages.plan.policies.explicit import explicit, override
from offstage.stages.plan.policies.whole_layers import sequential
from tests.stages.plan.skeletons import outline, stack

FC = {"fc.weight": 4, "fc.bias": 1, "head.weight": 4}


def test_the_longest_name_counts() -> None:
    model = outline(FC)
    placement = explicit(model, {"": "cpu", "fc": 1, "fc.bias": "disk"})
    assert placement.homes == {"fc.weight": 1, "fc.bias": "disk", "head.weight": "cpu"}
    assert placement.main == 1


@pytest.mark.parametrize(
    ("device_map", "words"),
    [
        ({"": 0, "hed": 1}, r"'hed' names nothing in the model \(did you mean 'head'\?\)"),
        (
            {"fc": 0},
            "no entry covers 'head.weight'; add 'head', or '' in a config file for all that the map doesn't name",
        ),
        ({"fc.weight": 0}, "no entry covers 'fc.bias' and 1 more; add 'fc.bias', 'head', or ''"),
        ({"head": 0, "fc": 0, "fc.weight": 0, "fc.bias": "cpu"}, "'fc' is on 0, but 'fc.bias' in it is on 'cpu'"),
        ({"": 0, "fc": "cpu", "head": "cpu"}, "'' is on 0, but"),
    ],
)
def test_a_map_that_does_not_fit_the_model_is_refused(device_map: dict[str, int | str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"device_map: {words}"):
        explicit(outline(FC), device_map)


def test_entries_that_repeat_what_their_module_says_are_fine() -> None:
    explicit(outline(FC), {"": 0, "fc": 0, "fc.weight": 0, "fc.bias": 0, "head": 0})


def test_a_tied_tensor_on_two_devices_is_refused() -> None:
    model = outline(FC, tied=[["fc.weight", "head.weight"]])
    with pytest.raises(ConfigError, match=r"'fc\.weight' \(on 0\) and 'head\.weight' \(on 'cpu'\) are one tied tensor"):
        explicit(model, {"fc": 0, "head": "cpu"})


def test_a_name_that_the_map_leaves_out_follows_its_twin() -> None:
    model = outline(FC, tied=[["fc.weight", "head.weight"]])
    assert explicit(model, {"fc": 1}).homes == {"fc.weight": 1, "fc.bias": 1}
    assert explicit(model, {"head": "disk", "fc.bias": 0}).homes == {"fc.weight": "disk", "fc.bias": 0}
    with pytest.raises(ConfigError, match=r"no entry covers 'fc\.bias'; add 'fc\.bias'"):
        explicit(model, {"head": "disk"})


def test_overrides_change_single_entries_and_the_map_is_folded_again() -> None:
    model = stack(3)
    placement = sequential(model, {0: 30, "cpu": 10, "disk": None})
    moved = override(model, placement, {"layers.1": "cpu"})
    assert fold(all_homes(model, moved.homes)) == {"layers.0": 0, "layers.1": "cpu", "layers.2": 0}
    assert fold(all_homes(model, override(model, moved, {"layers.1.weight": 0}).homes)) == {"": 0}


def test_an_override_moves_a_tied_tensor_under_all_its_names() -> None:
    model = outline(FC, tied=[["fc.weight", "head.weight"]])
    moved = override(model, explicit(model, {"": 0}), {"head": "cpu"})
    assert fold(all_homes(model, moved.homes)) == {"fc.weight": "cpu", "fc.bias": 0, "head": "cpu"}


def test_an_override_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"device_map_overrides: 'layer\.1' names nothing"):
        override(stack(3), explicit(stack(3), {"": 0}), {"layer.1": 0})
