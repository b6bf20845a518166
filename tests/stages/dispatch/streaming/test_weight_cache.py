import gc
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from offstage.pipeline.errors import CheckpointError, StorageError
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.streaming.caches import make_cache
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.arena import Arena, HostMemory
from offstage.stages.dispatch.transfer.links import HostLink
from offstage.stages.dispatch.transfer.mover import Mover, Transfer
from offstage.stages.dispatch.transfer.part_layout import lay_out_reads
from offstage.stages.dispatch.transfer.traffic import Traffic

SIZES = [5000, 70_000, 3, 40_000, 0, 9000]
"""Elements of each part's tensor, in float16."""


@pytest.fixture
def tensors() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(size).half() for size in SIZES]


@pytest.fixture
def extents(tmp_path: Path, tensors: list[torch.Tensor]) -> list[list[Extent]]:
    """Write the tensors into two files, at offsets that no alignment would choose."""
    parts = []
    for half, name in ((tensors[:3], "a"), (tensors[3:], "b")):
        data, places = b"head:-", []
        for tensor in half:
            places.append((len(data), tensor))
            data += tensor.numpy().tobytes() + b"xx"
        path = tmp_path / name
        path.write_bytes(data)
        status = path.stat()
        file = ShardFile(name, path, status.st_size, status.st_mtime_ns, "")
        parts += [[Extent(file, begin, "float16", tuple(tensor.shape))] for begin, tensor in places]
    return parts


def looking_ahead(
    extents: list[list[Extent]],
    *,
    staging_bytes: int,
    traffic: Traffic | None = None,
    experts: Sequence[Sequence[int]] = (),
) -> WeightCache:
    traffic = traffic or Traffic()
    mover = Mover(HostLink(), [extent for part in extents for extent in part], traffic=traffic)
    lists = {"experts": experts} if experts else {}
    return make_cache(extents, mover, list(range(6)), staging_bytes=staging_bytes, lists=lists)


def brought(ahead: WeightCache) -> set[int]:
    """Return the parts that are there, or on their way."""
    slots = ahead.experts
    parts = slots.parts if slots is not None else {}
    return {*ahead._entries, *(part for part, (expert, _) in parts.items() if expert in slots._entries)}


@pytest.fixture
def ahead(extents: list[list[Extent]]) -> Iterator[WeightCache]:
    cache = looking_ahead(extents, staging_bytes=150_000)
    yield cache
    cache.close()


def played(ahead: WeightCache, order: list[int], tensors: list[torch.Tensor]) -> None:
    """Take and let go each part of one pass, and check what came."""
    ahead.begin_pass()
    for part in order:
        (got,) = ahead.acquire(part)
        assert torch.equal(got, tensors[part]), part
        del got
        ahead.release(part)
    ahead.end_pass()


def test_every_pass_brings_the_right_bytes(ahead: WeightCache, tensors: list[torch.Tensor]) -> None:
    for _ in range(5):
        played(ahead, [0, 1, 2, 3, 4, 5], tensors)
    assert ahead._mover.traffic.overflow_bytes == 0
    assert ahead._mover.traffic.streamed_bytes == 5 * 2 * sum(SIZES)


def play_twice(ahead: WeightCache, tensors: list[torch.Tensor]) -> None:
    for _ in range(2):
        played(ahead, [0, 1, 2, 3, 4, 5], tensors)


def test_an_encoder_that_is_called_before_the_passes_is_read_ahead_and_so_is_the_decoder_after_it(
    extents: list[list[Extent]], tensors: list[torch.Tensor]
) -> None:
    traffic = Traffic()
    ahead = looking_ahead(extents, staging_bytes=170_000, traffic=traffic)
    for _ in range(3):
        for part in (0, 1, 2):
            (got,) = ahead.acquire(part)
            assert torch.equal(got, tensors[part])
            del got
            assert part == 2 or part + 1 in ahead._entries
            ahead.release(part)
        played(ahead, [3, 4, 5], tensors)
        played(ahead, [3, 4, 5], tensors)
    assert traffic.storage_bytes <= traffic.streamed_bytes + 3 * 2 * sum(SIZES[3:]), "a decoder in vain for a prompt"
    ahead.close()


@pytest.mark.parametrize("order", [[5, 4, 3, 2, 1, 0], [0, 2, 4], [1, 1, 3, 1], [3, 0, 0, 5, 1]])
def test_an_order_that_nobody_expected_is_right_too(
    order: list[int], ahead: WeightCache, tensors: list[torch.Tensor]
) -> None:
    played(ahead, [0, 1, 2, 3, 4, 5], tensors)
    for _ in range(3):
        played(ahead, order, tensors)
    played(ahead, [0, 1, 2, 3, 4, 5], tensors)


def test_parts_held_at_once_beyond_the_staging_memory_get_memory_of_their_own(
    extents: list[list[Extent]], tensors: list[torch.Tensor]
) -> None:
    traffic = Traffic()
    ahead = looking_ahead(extents, staging_bytes=10_000, traffic=traffic)
    acquired = [ahead.acquire(part)[0] for part in range(6)]
    assert all(torch.equal(got, expected) for got, expected in zip(acquired, tensors, strict=True))
    assert traffic.overflow_bytes >= 2 * (70_000 + 40_000)
    for part in range(6):
        ahead.release(part)
    ahead.close()


def test_what_is_still_seen_is_never_written_over(ahead: WeightCache, tensors: list[torch.Tensor]) -> None:
    ahead.begin_pass()
    (kept,) = ahead.acquire(1)
    kept = kept[10:20]
    ahead.release(1)
    for part in (2, 3, 4, 5, 0, 1, 2, 3):
        ahead.acquire(part)
        ahead.release(part)
    assert torch.equal(kept, tensors[1][10:20])


def test_what_fits_whole_is_read_once(extents: list[list[Extent]], tensors: list[torch.Tensor]) -> None:
    traffic = Traffic()
    ahead = looking_ahead(extents, staging_bytes=10**6, traffic=traffic)
    for _ in range(4):
        played(ahead, list(range(6)), tensors)
    assert traffic.storage_bytes < 2 * 2 * sum(SIZES)
    ahead.close()


def test_a_file_that_changes_is_noticed_in_the_forward_that_needs_it(
    ahead: WeightCache, extents: list[list[Extent]], tensors: list[torch.Tensor]
) -> None:
    played(ahead, [0, 1, 2, 3, 4, 5], tensors)
    path = extents[3][0].file.path
    os.truncate(path, 100)
    ahead.acquire(0)
    ahead.release(0)
    with pytest.raises(CheckpointError, match=r"b: the file changed while it was being served"):
        play_twice(ahead, tensors)
    (again,) = ahead.acquire(0)
    assert torch.equal(again, tensors[0]), "the other file still serves"


def test_a_deleted_file_still_serves(
    ahead: WeightCache, extents: list[list[Extent]], tensors: list[torch.Tensor]
) -> None:
    for extent in extents:
        extent[0].file.path.unlink(missing_ok=True)
    played(ahead, [0, 1, 2, 3, 4, 5], tensors)


def test_a_read_that_fails_names_file_and_offset_and_can_be_tried_again(
    ahead: WeightCache, tensors: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], offset: int, *flags: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    with pytest.raises(StorageError, match=r"reading at byte \d+ failed: Input/output error"):
        ahead.acquire(0)
    monkeypatch.setattr(os, "preadv", real)
    for part in list(ahead._entries):
        ahead._drop(part)
    played(ahead, [0, 1, 2, 3, 4, 5], tensors)


def test_closing_leaves_no_file_open(extents: list[list[Extent]], tensors: list[torch.Tensor]) -> None:
    gc.collect()
    before = len(list(Path("/proc/self/fd").iterdir()))
    ahead = looking_ahead(extents, staging_bytes=150_000)
    played(ahead, list(range(6)), tensors)
    assert len(list(Path("/proc/self/fd").iterdir())) > before
    ahead.close()
    ahead.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_a_part_needs_a_little_more_than_its_bytes(extents: list[list[Extent]]) -> None:
    layout = lay_out_reads([extents[0][0], extents[1][0]])
    assert [(piece.begin - piece.source.begin) % 4096 for piece in layout.pieces] == [0, 0]
    assert 2 * 75_000 < layout.size <= 2 * 75_000 + 4 * 4096


def test_what_is_certain_is_brought_past_experts_and_an_expert_whole_when_it_begins(
    extents: list[list[Extent]], tensors: list[torch.Tensor]
) -> None:
    ahead = looking_ahead(extents, staging_bytes=10**6, experts=[[1, 3], [2, 5]])
    ahead.begin_pass()
    ahead.acquire(0)
    assert brought(ahead) == {0, 4}, "the others may not be called"
    (got,) = ahead.acquire(3)
    assert torch.equal(got, tensors[3])
    assert brought(ahead) == {0, 4, 3, 1}
    ahead.close()


def test_after_several_neighbours_in_turn_the_next_expert_is_brought_too(extents: list[list[Extent]]) -> None:
    ahead = looking_ahead(extents, staging_bytes=10**6, experts=[[0], [1], [2], [3], [4], [5]])
    ahead.begin_pass()
    for part in (0, 1, 3, 4):
        ahead.acquire(part)
        ahead.release(part)
    assert brought(ahead) == {0, 1, 3, 4}
    ahead.begin_pass()
    for part in (1, 2, 3, 4):
        ahead.acquire(part)
        ahead.release(part)
    assert brought(ahead) == {0, 1, 2, 3, 4, 5}
    ahead.close()


@pytest.mark.parametrize("staging_bytes", [0, 150_000, 300_000, 10**6])
def test_experts_are_right_in_any_order_and_whatever_the_room(
    staging_bytes: int, extents: list[list[Extent]], tensors: list[torch.Tensor]
) -> None:
    ahead = looking_ahead(extents, staging_bytes=staging_bytes, experts=[[1, 3], [2, 5]])
    for order in ([0, 1, 3, 4], [0, 2, 5, 1, 3, 4], [0, 4], [3, 1, 0, 5, 2, 4], [0, 5, 3, 5, 4]):
        played(ahead, order, tensors)
    ahead.close()


def test_a_read_that_is_done_or_was_cancelled_holds_no_memory(extents: list[list[Extent]]) -> None:
    mover, arena = (
        Mover(HostLink(), [place for part in extents for place in part], traffic=Traffic()),
        Arena(HostMemory(10**6)),
    )
    for _ in range(50):
        for part in (1, 3):
            layout = lay_out_reads(extents[part])
            transfer = Transfer(arena.take(layout.size))
            mover.fetch(layout, transfer)
            mover.abandon(transfer)
            assert arena.used == 0, "whatever the threads are about"
    mover.close()


def test_what_was_read_and_not_used_is_counted(extents: list[list[Extent]]) -> None:
    traffic = Traffic()
    ahead = looking_ahead(extents, staging_bytes=10**6, traffic=traffic)
    ahead.acquire(0)
    wait([work for entry in ahead._entries.values() for work in entry.transfer.work])
    ahead.close()
    assert traffic.streamed_bytes == 2 * SIZES[0]
    assert traffic.storage_bytes >= 2 * sum(SIZES)
