from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from transformers.modeling_outputs import CausalLMOutput

from offstage.stages.dispatch.transfer.values import first_device, send_to_device

META = torch.device("meta")
CPU = torch.device("cpu")
Pair = namedtuple("Pair", "left right")


@dataclass
class Box:
    tensor: torch.Tensor
    label: str


def a_tensor() -> torch.Tensor:
    return torch.zeros(2)


@pytest.mark.parametrize(
    ("value", "find"),
    [
        (a_tensor(), lambda v: v),
        ((a_tensor(), 1), lambda v: v[0]),
        ([1, [a_tensor()]], lambda v: v[1][0]),
        (Pair(1, a_tensor()), lambda v: v.right),
        ({"a": {"b": a_tensor()}}, lambda v: v["a"]["b"]),
        (OrderedDict(a=a_tensor()), lambda v: v["a"]),
        (Box(a_tensor(), "x"), lambda v: v.tensor),
        (CausalLMOutput(logits=a_tensor()), lambda v: v.logits),
    ],
)
def test_tensors_move_in_whatever_they_come_in(value, find) -> None:
    moved = send_to_device(value, META)
    assert type(moved) is type(value)
    assert find(moved).device == META
    assert find(value).device == CPU, "the original is left alone"


@pytest.mark.parametrize("value", [1, "text", None, (1, 2), [a_tensor()], {"a": a_tensor()}, Box(a_tensor(), "x")])
def test_what_needs_no_move_is_returned_as_it_is(value) -> None:
    assert send_to_device(value, CPU) is value


def test_skipped_keys_stay_where_they_are() -> None:
    moved = send_to_device({"cache": a_tensor(), "x": a_tensor()}, META, skip_keys=["cache"])
    assert (moved["cache"].device, moved["x"].device) == (CPU, META)


def test_the_first_device_is_found_in_nested_values() -> None:
    assert first_device(({"x": [1, a_tensor()]},)) == CPU
    assert first_device((1, {})) is None


@pytest.mark.parametrize("pinned", [True, False])
def test_a_copy_to_an_accelerator_is_not_waited_for_from_pinned_memory_alone(
    pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def to(tensor: torch.Tensor, device: torch.device, *, non_blocking: bool) -> torch.Tensor:
        asked.append(non_blocking)
        return tensor

    monkeypatch.setattr(torch.Tensor, "to", to)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda _tensor: pinned)
    send_to_device(torch.ones(2), torch.device("cuda", 0))
    send_to_device(torch.ones(2, device="meta"), torch.device("cpu"))
    assert asked == [pinned, False], "never to the host, where whoever reads it doesn't wait"
