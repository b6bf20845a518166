from __future__ import annotations

from tests.stages.plan.skeletons import outline


def names(*args: object, **kwargs: object) -> list[str]:
    return [layer.name for layer in outline(*args, **kwargs).layers]  # type: ignore[arg-type]


def test_layers_are_no_split_modules_leaf_modules_and_tensors_beside_children() -> None:
    tensors = {"scale": 1, "block.a.weight": 2, "block.a.bias": 3, "block.b.weight": 4, "head.weight": 5}
    assert names(tensors) == ["scale", "block.a", "block.b", "head"]
    assert names(tensors, classes={"block": "Block"}, no_split=["Block"]) == ["scale", "block", "head"]


def test_layers_stand_in_the_order_of_execution() -> None:
    tensors = {"head.weight": 1, "layers.0.weight": 2, "embed.weight": 3}
    assert names(tensors, order=["", "embed", "layers.0", "head"]) == ["embed", "layers.0", "head"]
    assert names(tensors) == ["head", "layers.0", "embed"], "without a rehearsal, that of registration"


def test_a_tied_tensor_belongs_to_the_layer_that_executes_first_and_counts_once() -> None:
    model = outline(
        {"head.weight": 8, "embed.weight": 8}, tied=[["head.weight", "embed.weight"]], order=["", "embed", "head"]
    )
    assert [(layer.name, layer.owned, layer.bytes) for layer in model.layers] == [
        ("embed", ("embed.weight",), 8),
        ("head", (), 0),
    ]


def test_a_leaf_that_shares_a_tensor_follows_it_with_its_others() -> None:
    model = outline({"embed.weight": 8, "middle.weight": 1, "head.weight": 8, "head.bias": 2},
                    tied=[["embed.weight", "head.weight"]])  # fmt: skip
    assert [(layer.name, layer.bytes) for layer in model.layers] == [("embed", 10), ("middle", 1), ("head", 0)]
