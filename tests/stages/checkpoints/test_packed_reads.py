"""Blocks that are read and unpacked in one call of compiled code: the same bits, the same refusals, any memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints import packed_reads
from offstage.stages.checkpoints.codecs.gguf import Arrangement, GgufCodec
from offstage.stages.checkpoints.codecs.scaled_codes import MXFP4, ScaledCodes, table_codes
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import PackedTensor, in_memory
from offstage.stages.checkpoints.packed_reads import FileReader, ThreadBuffers, largest_at_rest
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.machine.aligned_memory import align_up, byte_view, private_bytes
from offstage.stages.machine.probes import READING_THREADS

RANDOM = np.random.default_rng(0)
VALUES = tuple(map(float, np.linspace(-1, 1, 16, dtype=np.float32)))


def codes(*shape: int) -> Any:
    return RANDOM.integers(120, size=shape, dtype=np.uint8)


def scales(*shape: int) -> Any:
    return np.exp2(RANDOM.uniform(-9, 3, shape)).astype(np.float32)


def halves(*shape: int) -> Any:
    return (scales(*shape).view(np.uint32) >> 16).astype(np.uint16)


KINDS: dict[str, tuple[Any, tuple[int, ...], list[tuple[Any, str]]]] = {
    "fp8": (ScaledCodes("fp8", 128, 128), (3000, 2048), [(codes(3000, 2048), "uint8"), (scales(24, 16), "float32")]),
    "fp8, many scales": (
        ScaledCodes("fp8", 1, 32),
        (3000, 2048),
        [(codes(3000, 2048), "uint8"), (halves(3000, 64), "bfloat16")],
    ),
    "int4": (ScaledCodes("int4", 1, 64), (3000, 2048), [(codes(3000, 1024), "uint8"), (scales(3000, 32), "float32")]),
    "nf4": (
        table_codes(VALUES, 64, None, ("bfloat16",)),
        (3000, 2048),
        [(codes(3000 * 1024), "uint8"), (scales(3000 * 32), "float32")],
    ),
    "mxfp4": (
        MXFP4,
        (1, 1024, 5000),
        [(codes(1, 5000, 32, 16), "uint8"), (codes(1, 5000, 32), "uint8")],
    ),
    "q4_k": (GgufCodec(("q4_k",)), (3000, 2048), [(codes(3000, 8 * 144), "uint8")]),
    "q8_0, rows swapped": (
        GgufCodec(("q8_0",), Arrangement((10, 20, 2, 5))),
        (2000, 512),
        [(codes(2000, 544), "uint8")],
    ),
}


@pytest.fixture
def compiled(compiled_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(compiled_cache))


def packed_at(path: Path, kind: str, *, before: int = 4099) -> PackedTensor:
    """Return the tensor of ``kind`` whose parts lie in the file ``path``, behind so many bytes."""
    codec, shape, parts = KINDS[kind]
    path.write_bytes(bytes(before) + b"".join(part.tobytes() for part, _ in parts))
    status = path.stat()
    file, begin, extents = ShardFile(path.name, path, status.st_size, status.st_mtime_ns, ""), before, []
    for part, dtype in parts:
        extents.append(Extent(file, begin, dtype, part.shape))
        begin += part.nbytes
    return PackedTensor(codec, tuple(extents), "bfloat16", shape)


@contextmanager
def reading(*tensors: PackedTensor) -> Iterator[FileReader]:
    buffers = ThreadBuffers(largest_at_rest(tensors))
    files = FileReader({part.file for tensor in tensors for part in tensor.parts}, buffers)
    try:
        yield files
    finally:
        files.close()


def brought(reader: FileReader, tensor: PackedTensor) -> tuple[bytes, int]:
    """Return the bytes of ``tensor`` in use, in new memory, and how many were read for them."""
    target = private_bytes(tensor.bytes)
    count = sum(reader.unpack(tensor, block, target) for block in tensor.codec.blocks(tensor))
    return target.tobytes(), count


@pytest.mark.parametrize("size", [5000, 1_114_112, 5 * 2**20])
def test_buffers_of_threads_lie_side_by_side_in_whole_huge_pages(size: int) -> None:
    with ExitStack() as lent:
        buffers = ThreadBuffers(size)
        every = [lent.enter_context(buffers.lend()) for _ in range(READING_THREADS)]
    places = sorted(buffer.ctypes.data for buffer in every)
    assert {buffer.nbytes for buffer in every} == {size}
    assert places[0] % 2**21 == 0
    assert {after - before for before, after in pairwise(places)} == {align_up(size)}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("compiled")
def test_in_one_call_come_the_bits_that_come_in_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    one, other = packed_at(tmp_path / "one", kind), packed_at(tmp_path / "other", kind, before=8 * 4096)
    wanted = bytes(byte_view(read_extent(one)))
    monkeypatch.setattr(packed_reads, "unpack_block", None)  # nothing is left to it
    with reading(one, other) as reader:
        for tensor in (one, other, one, other):
            assert brought(reader, tensor)[0] == wanted


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.usefixtures("compiled")
def test_a_file_that_is_cut_meanwhile_is_told_and_nothing_passes_for_read(tmp_path: Path, kind: str) -> None:
    tensor = packed_at(tmp_path / "file", kind)
    target = private_bytes(tensor.bytes)
    with reading(tensor) as reader:
        blocks = tensor.codec.blocks(tensor)
        reader.unpack(tensor, blocks[-1], target)
        os.truncate(tensor.file.path, tensor.parts[0].begin + 1000)
        with pytest.raises(CheckpointError, match="changed while it was being served"):
            reader.unpack(tensor, blocks[-1], target)


@pytest.mark.usefixtures("compiled")
def test_a_failed_read_leaves_the_error_to_the_usual_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = packed_at(tmp_path / "file", "fp8")
    tensor = replace(
        tensor, parts=tuple(replace(part, file=replace(part.file, mtime_ns=None)) for part in tensor.parts)
    )
    wanted = bytes(byte_view(read_extent(tensor)))
    with reading(tensor) as reader:
        assert brought(reader, tensor)[0] == wanted
        ways: list[str] = []
        read = packed_reads.read_block
        monkeypatch.setattr(packed_reads, "read_block", lambda *args: (ways.append("usual"), read(*args))[1])
        monkeypatch.setattr("offstage.stages.checkpoints.codecs.loops.LoopAfterReads.run", lambda *_: False)
        assert brought(reader, tensor)[0] == wanted
        assert len(ways) == len(tensor.codec.blocks(tensor))


@pytest.mark.usefixtures("compiled")
def test_what_is_in_memory_or_for_other_operators_goes_the_usual_way(tmp_path: Path) -> None:
    tensor = packed_at(tmp_path / "file", "fp8")
    copy = in_memory(tensor, [np.fromfile(part.file.path, np.uint8)[part.begin : part.end] for part in tensor.parts])
    doubles = replace(tensor, dtype="float64")
    with reading(tensor, doubles) as reader:
        unpacked, count = brought(reader, copy)
        assert (unpacked, count) == (bytes(byte_view(read_extent(tensor))), 0)
        assert brought(reader, doubles)[0] == bytes(byte_view(read_extent(doubles)))


@pytest.mark.usefixtures("compiled")
def test_a_loop_waits_for_nobody_whose_operators_unpack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_reads, "_UNPACKING", None)  # nobody can enter it
    read_extent(packed_at(tmp_path / "file", "fp8"))


@pytest.mark.usefixtures("compiled")
def test_no_more_is_kept_than_a_little_however_many_blocks_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_reads, "_MOST_KNOWN", 2)
    tensor = packed_at(tmp_path / "file", "fp8")
    wanted = bytes(byte_view(read_extent(tensor)))
    monkeypatch.setattr(packed_reads, "unpack_block", None)  # nothing is left to it
    with reading(tensor) as reader:
        assert brought(reader, tensor)[0] == brought(reader, tensor)[0] == wanted
        assert len(tensor.codec.blocks(tensor)) > len(reader._known) == 2


@pytest.mark.usefixtures("compiled")
def test_tensors_that_follow_each_other_at_one_address_are_told_apart(tmp_path: Path) -> None:
    tensor = packed_at(tmp_path / "file", "fp8")
    wanted, unpacked = b"", b""
    with reading(tensor) as reader:
        for begin in range(0, 2944, 128):
            rows = tensor.codec.rows(tensor, begin, begin + 128)
            assert rows is not None
            wanted += bytes(byte_view(read_extent(rows)))
            unpacked += brought(reader, rows)[0]
            del rows
    assert unpacked == wanted


@pytest.mark.usefixtures("compiled")
def test_how_a_block_is_brought_is_worked_out_once_however_often_its_rows_are_made_a_tensor(tmp_path: Path) -> None:
    tensor = packed_at(tmp_path / "file", "fp8")
    with reading(tensor) as reader:
        for begin in (0, 128, 0, 128, 0):
            rows = tensor.codec.rows(tensor, begin, begin + 128)
            assert rows is not None
            assert brought(reader, rows)[0] == bytes(byte_view(read_extent(rows)))
        assert len(reader._known) == 2
