import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints import bulk_reader as bulk, direct_file, packed_reads
from offstage.stages.checkpoints.bulk_reader import BulkReader, TensorRead, read_into_new_memory
from offstage.stages.checkpoints.codecs.scaled_codes import ScaledCodes
from offstage.stages.checkpoints.dtypes import torch_dtype
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.open_files import cached_pages
from offstage.stages.checkpoints.packed import PackedTensor, in_pieces, rest_bytes
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine import aligned_memory as memory
from offstage.stages.machine.devices import Devices
from tests.stages.packed_models import PackedFile, ScaledRows, coded


@pytest.fixture
def data(tmp_path: Path) -> torch.Tensor:
    """Random bytes, written to the file ``f``, in blocks so small that a test has many."""
    torch.manual_seed(0)
    data = torch.randint(0, 256, (300_000,), dtype=torch.uint8)
    (tmp_path / "f").write_bytes(data.numpy().tobytes())
    return data


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "BLOCK_BYTES", 8192)
    monkeypatch.setattr(bulk, "SMALL_SPAN_BYTES", 64)
    monkeypatch.setattr(memory, "_SMALL_BYTES", 1)


def shard(path: Path, size: int | None = None) -> ShardFile:
    status = path.stat()
    return ShardFile(path.name, path, status.st_size if size is None else size, status.st_mtime_ns, "")


def drop_from_cache(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    os.fdatasync(descriptor)  # what isn't on the disk yet stays in the cache
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def zeroed(extent: Extent, dtype: torch.dtype) -> TensorRead:
    """Return a piece whose memory is torch's, so that it is not laid out for direct reads."""
    return TensorRead(extent, torch.zeros(extent.shape, dtype=dtype))


def laid_out(extent: Extent, dtype: torch.dtype) -> TensorRead:
    """Return a piece whose memory is laid out as it lies in the file."""
    return read_into_new_memory(extent, dtype, devices=Devices(), device="cpu")


def simulated(extent: Extent, dtype: torch.dtype) -> TensorRead:
    """Return a piece whose memory is a simulated accelerator's."""
    return read_into_new_memory(extent, dtype, devices=Devices({0: 10**7}), device=0)


@pytest.mark.parametrize("make", [zeroed, laid_out, simulated])
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("dtypes", [("int16", "int16"), ("int16", "int32"), ("uint8", "uint8")])
@pytest.mark.parametrize(
    "spans", [[(0, 100)], [(8, 299_992)], [(2, 10), (10, 8192), (8192, 60_000), (90_000, 90_002)], [(16, 16)]]
)
def test_every_span_comes_out_as_it_lies_in_the_file(
    tmp_path: Path,
    data: torch.Tensor,
    spans: list[tuple[int, int]],
    dtypes: tuple[str, str],
    cold: bool,
    make: Callable[[Extent, torch.dtype], TensorRead],
) -> None:
    stored, wanted = (getattr(torch, name) for name in dtypes)
    if cold:
        drop_from_cache(tmp_path / "f")
    pieces = []
    for begin, end in spans:
        count = (end - begin) // stored.itemsize
        pieces.append(make(Extent(shard(tmp_path / "f"), begin, dtypes[0], (count,)), wanted))
    seen: list[int] = []
    with BulkReader() as reader:
        reader.read(pieces, seen.append)
    for (begin, end), piece in zip(spans, pieces, strict=True):
        assert torch.equal(piece.target, data[begin:end].view(stored).to(wanted))
    assert sum(seen) == sum(end - begin for begin, end in spans)


def test_a_new_piece_of_the_same_dtype_is_laid_out_as_it_lies_in_the_file(tmp_path: Path, data: torch.Tensor) -> None:
    extent = Extent(shard(tmp_path / "f"), 5002, "int16", (70_000,))
    piece = laid_out(extent, torch.int16)
    assert piece.target.data_ptr() % memory.ALIGNMENT == 5002 - memory.ALIGNMENT
    assert piece.memory is not None
    assert len(piece.memory) == memory.align_up(extent.end) - memory.ALIGNMENT
    assert laid_out(extent, torch.int32).memory is None, "one that is cast is filled from a buffer"


def test_a_small_tensor_waits_for_no_buffer(tmp_path: Path, data: torch.Tensor) -> None:
    drop_from_cache(tmp_path / "f")
    piece = zeroed(Extent(shard(tmp_path / "f"), 5001, "uint8", (63,)), torch.uint8)
    with BulkReader() as reader:
        reader._buffers.size = 0
        reader._buffers.renew()  # there is none
        reader.read([piece], lambda count: None)
    assert torch.equal(piece.target, data[5001:5064])


def test_a_file_system_without_direct_reads_works_too(
    tmp_path: Path, data: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct_file, "open_direct", lambda *_: None)
    drop_from_cache(tmp_path / "f")
    piece = TensorRead(Extent(shard(tmp_path / "f"), 3, "uint8", (200_000,)), torch.zeros(200_000, dtype=torch.uint8))
    with BulkReader() as reader:
        reader.read([piece], lambda count: None)
    assert torch.equal(piece.target, data[3:200_003])


def test_a_tensor_that_the_file_does_not_hold_whole_is_refused(tmp_path: Path, data: torch.Tensor) -> None:
    piece = TensorRead(Extent(shard(tmp_path / "f"), 299_000, "uint8", (2000,)), torch.zeros(2000, dtype=torch.uint8))
    with (
        BulkReader() as reader,
        pytest.raises(CheckpointError, match=r"f: the file changed while it was being served .*byte 300000"),
    ):
        reader.read([piece], lambda count: None)


def test_a_file_that_changed_is_refused(tmp_path: Path, data: torch.Tensor) -> None:
    file = shard(tmp_path / "f", size=5)
    piece = TensorRead(Extent(file, 0, "uint8", (5,)), torch.zeros(5, dtype=torch.uint8))
    with BulkReader() as reader, pytest.raises(CheckpointError, match="the file changed"):
        reader.read([piece], lambda count: None)


def test_an_interrupt_while_the_page_cache_is_asked_stays_one(
    tmp_path: Path, data: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(np.ndarray[Any, Any]):
        @property
        def ctypes(self) -> Any:
            raise KeyboardInterrupt

    view = np.frombuffer
    monkeypatch.setattr(np, "frombuffer", lambda *given, **named: view(*given, **named).view(Interrupted))
    with (tmp_path / "f").open("rb") as file, pytest.raises(KeyboardInterrupt):
        cached_pages(file.fileno(), data.numel())


def test_the_page_cache_is_asked_and_not_filled(tmp_path: Path, data: torch.Tensor) -> None:
    path = tmp_path / "f"
    drop_from_cache(path)
    descriptor = os.open(path, os.O_RDONLY)
    if cached_pages(descriptor, data.numel()).any():
        pytest.skip("this file system keeps the file in memory")
    piece = TensorRead(Extent(shard(path), 0, "uint8", (300_000,)), torch.zeros(300_000, dtype=torch.uint8))
    with BulkReader() as reader:
        reader.read([piece], lambda count: None)
    assert not cached_pages(descriptor, data.numel())[:70].any()  # the tail, not a whole page, may come through it
    assert path.read_bytes()
    assert cached_pages(descriptor, data.numel()).all()
    os.close(descriptor)


def test_more_files_than_are_opened_at_a_time_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bulk, "_OPEN_FILES", 2)
    pieces = []
    for number in range(5):
        (tmp_path / str(number)).write_bytes(bytes([number]) * 100)
        extent = Extent(shard(tmp_path / str(number)), 10, "uint8", (50,))
        pieces.append(TensorRead(extent, torch.zeros(50, dtype=torch.uint8)))
    with BulkReader() as reader:
        reader.read(pieces, lambda count: None)
    assert [piece.target.unique().tolist() for piece in pieces] == [[number] for number in range(5)]


@pytest.mark.parametrize("make", [zeroed, simulated])
@pytest.mark.parametrize("cold", [True, False])
@pytest.mark.parametrize("codec", [ScaledRows(), ScaledRows(turned=True), ScaledRows(block_rows=5000)])
def test_what_rests_packed_is_unpacked_to_where_it_stays(
    codec: ScaledRows, cold: bool, make: Callable[..., TensorRead], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    wanted = [coded(torch.randn(300, 70), codec)[2], coded(torch.randn(3, 40, 50), codec)[2]]
    file = PackedFile(tmp_path / "f", codec)
    for number, tensor in enumerate(wanted):
        file.add(str(number), tensor)
    places = file.write()
    if cold:
        drop_from_cache(tmp_path / "f")
    pieces = [make(replace(place, dtype=dtype), torch_dtype(dtype)) for place in places.values() for dtype in DTYPES]
    counted: list[int] = []
    with BulkReader() as bulk:
        bulk.read(pieces, counted.append)
    for number, piece in enumerate(pieces):
        assert torch.equal(piece.target, wanted[number // 2].to(piece.target.dtype))
    assert sum(counted) >= 2 * sum(map(rest_bytes, places.values()))


@pytest.mark.parametrize("cold", [True, False])
def test_where_loops_are_compiled_a_block_is_read_and_unpacked_in_one_call(
    cold: bool, tmp_path: Path, compiled_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))
    path, codes, scales = tmp_path / "f", torch.randint(0, 120, (300, 256), dtype=torch.uint8), torch.rand(3, 2)
    path.write_bytes(bytes(4099) + codes.numpy().tobytes() + scales.numpy().tobytes())
    parts = Extent(shard(path), 4099, "uint8", (300, 256)), Extent(shard(path), 4099 + 76_800, "float32", (3, 2))
    tensor = PackedTensor(ScaledCodes("fp8", 128, 128), parts, "bfloat16", (300, 256))
    wanted = read_extent(tensor)
    if cold:
        drop_from_cache(path)
    monkeypatch.setattr(packed_reads, "unpack_block", None)  # nothing is left to it
    piece = TensorRead(tensor, torch.zeros(300, 256, dtype=torch.bfloat16))
    with BulkReader() as reader:
        reader.read([piece], lambda count: None)
    assert torch.equal(piece.target, wanted)


DTYPES = ("float32", "bfloat16")


def test_rows_of_a_packed_tensor_are_it_together(tmp_path: Path) -> None:
    file = PackedFile(tmp_path / "f", ScaledRows())
    file.add("long", coded(torch.randn(3000, 1000), ScaledRows())[2])
    file.add("flat", torch.ones(5, 3))
    long, flat = file.write().values()
    pieces = in_pieces(long)
    assert [begin for begin, _ in pieces] == [0, 4096 * 1000, 2 * 4096 * 1000]
    assert torch.equal(torch.cat([read_extent(piece) for _, piece in pieces]), read_extent(long))
    assert in_pieces(flat) == [(0, flat)]
    whole = replace(long, codec=ScaledRows(alone=False))
    assert in_pieces(whole) == [(0, whole)]
