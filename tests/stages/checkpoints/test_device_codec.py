"""What torch unpacks on a device is what the host unpacks, bit for bit, and takes no more than the plan counts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from offstage.stages.checkpoints import device_codec
from offstage.stages.checkpoints.codecs.planes import PlaneCodec
from offstage.stages.checkpoints.device_codec import DeviceCodec, block_scratch, device_bytes, moved_bytes
from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init.live_storages import CountingMode, LiveStorages
from tests.stages.checkpoints.device_unpacking import TENSORS, same_numbers, unpacked_on

HOST = torch.device("cpu")
at_once = pytest.mark.parametrize("most", [device_codec.TILE, 2**12, 2**40], ids=["tiles", "small", "whole blocks"])
every_tensor = pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS)


@at_once
@every_tensor
@pytest.mark.filterwarnings("ignore:invalid value")
def test_torch_unpacks_to_the_bits_that_the_host_unpacks_to(
    tensor: PackedTensor, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted_of = {dtype: read_extent(replace(tensor, dtype=dtype)) for dtype in ("bfloat16", "float16", "float32")}
    monkeypatch.setattr(device_codec, "TILE", most)
    for dtype in ("bfloat16", "float16", "float32") if tensor.bytes < 2**20 else ("bfloat16",):
        wanted = replace(tensor, dtype=dtype)
        assert same_numbers(unpacked_on(wanted, HOST), wanted_of[dtype])


@at_once
@every_tensor
def test_unpacking_takes_no_more_on_the_device_than_the_codec_says(
    tensor: PackedTensor, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_codec, "TILE", most)
    codec, storages = tensor.codec, LiveStorages()
    assert isinstance(codec, DeviceCodec)
    tables, target = codec.tables(tensor), torch.zeros(tensor.bytes, dtype=torch.uint8)
    for block in codec.blocks(tensor):
        data = [torch.zeros(span.bytes, dtype=torch.uint8) for span in block.spans]
        with CountingMode(storages):
            codec.unpack_on_device(tensor, block, data, tables, target)
        assert storages.take_peak() <= block_scratch(codec, tensor, block)
        assert storages.live == 0


def test_the_room_on_a_device_is_that_of_the_largest_block_and_of_each_table_once() -> None:
    tensor, other = TENSORS["fp8, blocks, scales in float32"], TENSORS["fp8, a stack, scales in float32"]
    both, alone = device_bytes([tensor, other]), device_bytes([tensor])
    assert both == alone == device_bytes([tensor, tensor])
    (block,) = tensor.codec.blocks(tensor)
    values = 256 * 384
    table = 8 * 2**16
    assert 2 * block.bytes + 6 * values < alone - table < 2 * block.bytes + 6 * values + 20_000
    assert moved_bytes(tensor) == pytest.approx(values * (1 + 2 * 6 + 2), rel=0.01)
    assert device_bytes([]) == 0


def test_what_is_looked_up_stays_the_same_objects_however_many_maps_a_checkpoint_has() -> None:
    tensor = TENSORS["nf4"]
    many = [replace(tensor, codec=replace(tensor.codec, values=(*range(15), float(100 + n)))) for n in range(200)]
    codecs = [each.codec for each in many if isinstance(each.codec, DeviceCodec)]
    first, again = ([id(table) for codec in codecs for table in codec.tables(tensor)] for _ in range(2))
    assert first == again
    assert len(set(first)) == len(many)


def test_what_only_the_host_can_unpack_is_no_codec_of_devices() -> None:
    assert not isinstance(PlaneCodec("bfloat16", 4, ()), DeviceCodec)
