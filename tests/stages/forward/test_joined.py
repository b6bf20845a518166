"""Outputs of several calls as one."""

from __future__ import annotations

import pytest
import torch

from offstage.pipeline.errors import ConfigError
from offstage.stages.calls.arguments import ForwardCall
from offstage.stages.forward.joined import Joined
from offstage.stages.forward.labels import say

MASKS = torch.ones(2, 3, dtype=torch.long), torch.ones(1, 2, dtype=torch.long)


def call(rows: tuple[int, ...], mask: torch.Tensor) -> ForwardCall:
    return ForwardCall("forward.texts", rows, {"attention_mask": mask}, frozenset({"attention_mask"}))


def test_rows_stand_where_they_were_given_and_short_ones_end_with_zeros() -> None:
    joined = Joined()
    joined.add(call((0, 2), MASKS[0]), {"hidden": torch.ones(2, 3, 4), "vector": torch.tensor([[1.0], [2.0]])})
    joined.add(call((1,), MASKS[1]), {"hidden": torch.ones(1, 2, 4), "vector": torch.tensor([[3.0]])})
    tensors = joined.tensors()
    assert tensors["vector"].flatten().tolist() == [1.0, 3.0, 2.0]
    assert tensors["hidden"].sum((1, 2)).tolist() == [12.0, 8.0, 12.0]
    assert tensors["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0], [1, 1, 1]]


def test_what_is_no_row_of_a_call_can_not_be_put_together() -> None:
    joined = Joined()
    for rows, mask in (((0, 2), MASKS[0]), ((1,), MASKS[1])):
        joined.add(call(rows, mask), {"loss": torch.tensor(1.0)})
    with pytest.raises(ConfigError, match=r"forward.batch_size: the output 'loss' of shape \(\) isn't one of 2 rows"):
        joined.tensors()


def test_outputs_that_share_memory_are_saved_apart() -> None:
    joined, whole = Joined(), torch.arange(6.0).reshape(2, 3)
    joined.add(call((0, 1), MASKS[0]), {"whole": whole, "again": whole, "first": whole[:1]})
    tensors = joined.tensors()
    assert len({tensor.data_ptr() for tensor in tensors.values()}) == len(tensors)
    assert torch.equal(tensors["first"], whole[:1])


def test_labels_are_those_of_the_config_and_only_where_their_number_fits() -> None:
    config = {"id2label": {"0": "no", "1": "yes"}}
    logits = torch.tensor([[0.0, 2.0], [3.0, 0.0]])
    assert [row[0]["label"] for row in say({"logits": logits}, config, [])["logits"]] == ["yes", "no"]
    many = say({"logits": logits}, {**config, "problem_type": "multi_label_classification"}, [])["logits"]
    assert many[0][0]["probability"] == pytest.approx(torch.tensor(2.0).sigmoid().item(), abs=1e-6)
    assert say({"logits": torch.zeros(1, 5, 100)}, config, []) == {}
    assert say({"logits": torch.tensor([[[0.0, 1.0], [1.0, 0.0]]])}, config, []) == {"logits": [["yes", "no"]]}
    against = say({"logits_per_image": torch.tensor([[0.0, 1.0]])}, {}, ["a cat", "a dog"])
    assert against["logits_per_image"][0][0]["label"] == "a dog"
