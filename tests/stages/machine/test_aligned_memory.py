"""Host memory for weights: a tensor where its bytes are, in a storage of its own."""

import gc
import weakref

import numpy as np
import pytest
import torch

from offstage.stages.machine.aligned_memory import buffer_bytes, byte_view, private_bytes, room_for, tensor_in
from tests.huge_pages import is_huge

DATA = np.arange(64, dtype=np.uint8)


@pytest.mark.parametrize(("begin", "is_view"), [(0, True), (8, True), (4, True), (6, False), (1, False)])
def test_a_tensor_is_a_view_of_its_bytes_unless_its_address_is_not_aligned(begin: int, is_view: bool) -> None:
    memory = DATA.copy()
    tensor = tensor_in(memory, begin, torch.float32, (2, 3))
    assert tensor.flatten().view(torch.uint8).tolist() == DATA[begin : begin + 24].tolist()
    memory[begin] += 1
    assert (tensor.flatten().view(torch.uint8)[0].item() == int(memory[begin])) is is_view


def test_a_tensor_of_nothing_needs_no_bytes_and_one_number_has_no_shape() -> None:
    assert tensor_in(DATA, 64, torch.float32, (0, 5)).shape == (0, 5)
    assert tensor_in(DATA.copy(), 8, torch.int16, ()).item() == 8 + 256 * 9


@pytest.mark.parametrize("tensor", [torch.arange(6, dtype=torch.int16)[1::5][:1], torch.tensor(1, dtype=torch.int16)])
def test_the_bytes_of_one_number_are_seen_whatever_the_stride(tensor: torch.Tensor) -> None:
    assert bytes(byte_view(tensor)) == b"\x01\x00"
    byte_view(tensor)[0] = 7
    assert tensor.item() == 7


def test_neighbours_share_no_storage_and_keep_the_memory_alive() -> None:
    memory = private_bytes(4096)
    gone = weakref.ref(memory)
    first, second = (tensor_in(memory, begin, torch.float32, (16,)) for begin in (0, 64))
    assert first.untyped_storage().nbytes() == second.untyped_storage().nbytes() == 64
    del memory, first
    assert gone() is not None
    del second
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("offset", [0, 8, 4096, 5000])
def test_room_for_a_tensor_lies_as_it_lies_in_its_file(offset: int) -> None:
    room = room_for((2**17,), torch.float32, offset=offset)
    assert room.memory is not None
    assert room.tensor.data_ptr() % 4096 == offset % 4096


@pytest.mark.parametrize("size", [1, 4096, 2**21 - 1, 2**21, 3 * 2**20, 5 * 2**21 + 4096])
def test_a_buffer_is_as_large_as_asked_and_begins_where_a_huge_page_does(size: int) -> None:
    buffer = buffer_bytes(size)
    buffer[:] = 7
    assert buffer.nbytes == size
    assert buffer.ctypes.data % 2**21 == 0


def test_whole_huge_pages_of_a_buffer_are_asked_for_and_what_is_beside_them_takes_no_memory() -> None:
    buffer = buffer_bytes(5 * 2**20)
    begin = buffer.ctypes.data
    assert [is_huge(begin + at) for at in (0, 2**21, 2**22 - 1, 2**22)] == [True, True, True, False]
