"""Where the tensors of a part go in their region: each where kernels read it at full width, whatever room there is."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from offstage.stages.dispatch.transfer.part_layout import PartLayout, lay_out
from offstage.stages.units import DEVICE_ALIGNMENT

FULL_WIDTH = 16
"""The bytes that kernels read at once of a tensor that begins at a multiple of them."""

SIZES: dict[str, list[tuple[int, torch.dtype]]] = {
    "a small one before large ones": [(3, torch.bfloat16), (64, torch.bfloat16), (32, torch.float32)],
    "a wide one of an odd size before narrow ones": [(3, torch.float32), (16, torch.int8), (24, torch.bfloat16)],
    "one of half the width before whole ones": [(6, torch.float32), (8, torch.float32)],
    "several of odd sizes between": [(5, torch.int8), (8, torch.float32), (7, torch.bfloat16), (48, torch.int8)],
}


def tensors(name: str) -> list[torch.Tensor]:
    return [torch.zeros(count, dtype=dtype) for count, dtype in SIZES[name]]


def spans(layout: PartLayout) -> list[tuple[int, int]]:
    return sorted((piece.begin, piece.begin + piece.bytes) for piece in layout.pieces)


@pytest.mark.parametrize("name", SIZES)
def test_where_a_part_lies_closely_all_of_whole_width_begin_at_it_and_no_byte_is_lost(name: str) -> None:
    given = tensors(name)
    room = sum(tensor.nbytes for tensor in given)
    layout = lay_out(given, link_room=room)
    assert layout.size == room, "a part fits wherever its bytes do"
    assert all(end == begin for (_, end), (begin, _) in pairwise(spans(layout)))
    for piece in layout.pieces:
        assert piece.begin % piece.dtype.itemsize == 0, "or it couldn't be viewed as its dtype"
        if piece.bytes % FULL_WIDTH == 0:
            assert piece.begin % FULL_WIDTH == 0, "other kernels would have other last bits"


@pytest.mark.parametrize("name", SIZES)
def test_where_there_is_room_each_begins_as_the_accelerators_allocator_would_have_it(name: str) -> None:
    layout = lay_out(tensors(name), link_room=2**20)
    assert all(piece.begin % DEVICE_ALIGNMENT == 0 for piece in layout.pieces)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans(layout)))


def test_tensors_have_their_own_bytes_in_the_order_in_which_they_were_given() -> None:
    given = [torch.arange(count, dtype=dtype) for count, dtype in SIZES["several of odd sizes between"]]
    layout = lay_out(given, link_room=sum(tensor.nbytes for tensor in given))
    region = torch.zeros(layout.size, dtype=torch.uint8)
    for piece, view in zip(layout.pieces, layout.views(region), strict=True):
        assert piece.data is not None
        region[piece.begin : piece.begin + piece.bytes].copy_(piece.data)
        assert view.dtype == piece.dtype
    assert all(torch.equal(view, tensor) for view, tensor in zip(layout.views(region), given, strict=True))
