"""Who waits for what, on an accelerator on which everything happens late."""

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch

from offstage.stages.checkpoints.device_codec import device_bytes
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.packed import MemoryFile, PackedTensor, rest_bytes
from offstage.stages.checkpoints.shard_files import ShardFile
from offstage.stages.dispatch.streaming.caches import make_cache
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.device_unpacker import DeviceUnpacker, open_unpacker
from offstage.stages.dispatch.transfer.link import pin
from offstage.stages.dispatch.transfer.mover import Mover
from offstage.stages.dispatch.transfer.part_layout import Source, read_lengths
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers, buffers_for
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.machine.aligned_memory import HostBlock
from offstage.stages.machine.probes import CHUNK_BYTES
from tests.long_form import in_ci
from tests.stages.dispatch.late_link import LateLink
from tests.stages.packed_models import PackedFile, ScaledRows, TorchScaledRows, coded, read_into_memory

SIZES = [[70_000, 3], [40_000], [90_000, 17, 5000], [0], [300], [60_000], [80_000, 4097]]
"""Elements of each part's tensors, in float16."""

STAGING = 2 * 200_000
"""Room for about two of the larger parts."""


def tensors() -> list[list[torch.Tensor]]:
    torch.manual_seed(0)
    return [[torch.randn(size).half() for size in part] for part in SIZES]


def on_disk(parts: list[list[torch.Tensor]], path: Path) -> list[list[Extent]]:
    """Write all tensors into one file, at offsets that no alignment would choose."""
    data, begins = b"head:-", []
    for tensor in (tensor for part in parts for tensor in part):
        begins.append(len(data))
        data += tensor.numpy().tobytes() + b"xx"
    path.write_bytes(data)
    file = ShardFile(path.name, path, path.stat().st_size, path.stat().st_mtime_ns, "")
    places = iter(begins)
    return [[Extent(file, next(places), "float16", tuple(tensor.shape)) for tensor in part] for part in parts]


def cache_over(
    parts: Sequence[Sequence[Source]],
    link: LateLink,
    staging: int,
    traffic: Traffic,
    *,
    trace: Trace | None = None,
    unpacker: DeviceUnpacker | None = None,
) -> tuple[WeightCache, PinnedBuffers | None]:
    """Return the cache of ``parts`` over ``link``, in their order, and the buffers that it reads by way of."""
    sources = [source for part in parts for source in part]
    buffers = buffers_for(read_lengths(sources, as_at_rest=unpacker is not None), link, staging_bytes=staging)
    mover = Mover(link, sources, device=0, buffers=buffers, unpacker=unpacker, traffic=traffic, trace=trace)
    return make_cache(parts, mover, range(len(parts)), staging_bytes=staging), buffers


class Stage:
    """Parts, where they wait, the link, and a cache over it."""

    def __init__(self, folder: Path, where: str, *, staging: int = STAGING, trace: Trace | None = None) -> None:
        self.parts = tensors()
        self.link = LateLink()
        flat = [tensor for part in self.parts for tensor in part]
        self.block = HostBlock([tensor.nbytes for tensor in flat])
        host = [[self.block.hold(tensor) for tensor in part] for part in self.parts]
        disk = on_disk(self.parts, folder / "weights")
        mixed = [
            [disk[p][t] if (p + t) % 2 else host[p][t] for t in range(len(part))] for p, part in enumerate(self.parts)
        ]
        self.unpin = pin(self.link, self.block.memory)
        self.traffic = Traffic()
        sources = {"disk": disk, "host": host, "mixed": mixed}[where]
        self.ahead, self.buffers = cache_over(sources, self.link, staging, self.traffic, trace=trace)

    def play(self, order: list[int]) -> None:
        """Compute with each part, one pass; nothing is waited for but reads."""
        self.ahead.begin_pass()
        for part in order:
            for got, expected in zip(self.ahead.acquire(part), self.parts[part], strict=True):
                assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
                self.link.launch(got, expected)
                del got
            self.ahead.release(part)
        self.ahead.end_pass()

    def close(self) -> None:
        self.ahead.close()
        if self.buffers is not None:
            self.buffers.close()

    def check(self) -> None:
        self.link.close()
        assert self.link.wrong == []


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(where: str, **options: object) -> Stage:
        made.append(Stage(tmp_path, where, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()
        one.link.end()


IN_ORDER = list(range(len(SIZES)))
everywhere = pytest.mark.parametrize("where", ["disk", "host", "mixed"])


@everywhere
def test_computing_waits_for_copies_and_copies_for_computing(where: str, stage: Callable[..., Stage]) -> None:
    late = stage(where)
    for _ in range(6):
        late.play(IN_ORDER)
    late.check()
    assert late.traffic.overflow_bytes == 0
    assert late.traffic.link_bytes >= 6 * sum(2 * size for part in SIZES for size in part)


@everywhere
@pytest.mark.parametrize("order", [[6, 5, 4, 3, 2, 1, 0], [0, 2, 4], [1, 1, 3, 1], [2, 0, 0, 5, 6]])
def test_an_order_that_nobody_expected_waits_for_the_same(
    where: str, order: list[int], stage: Callable[..., Stage]
) -> None:
    late = stage(where)
    for one in (IN_ORDER, order, order, IN_ORDER):
        late.play(one)
    late.check()


def test_the_model_runs_on_while_the_accelerator_has_not_even_begun(stage: Callable[..., Stage]) -> None:
    late, begin = stage("host"), threading.Event()
    late.link.computing.add(begin.wait)
    model = threading.Thread(target=lambda: [late.play(IN_ORDER) for _ in range(3)])
    model.start()
    model.join(timeout=120)
    waits = model.is_alive()
    begin.set()
    model.join()
    assert not waits
    late.check()


@everywhere
def test_the_first_parts_of_the_next_pass_are_on_their_way_when_one_ends(
    where: str, stage: Callable[..., Stage]
) -> None:
    late = stage(where)
    late.play(IN_ORDER)
    assert {0, 1} <= late.ahead._entries.keys()
    late.play(IN_ORDER)
    late.check()


def test_reads_go_on_only_as_far_as_pinned_memory_reaches(stage: Callable[..., Stage]) -> None:
    late = stage("disk")
    size = 2 * max(size for part in SIZES for size in part)
    assert late.buffers is not None
    pinned = late.buffers._memory.nbytes
    assert size < pinned <= STAGING, "no more than the staging that the plan knows of"
    assert [memory.nbytes for memory in late.link.pinned if memory is not late.block.memory] == [pinned], (
        "and exactly that is pinned"
    )
    for _ in range(3):
        late.play(IN_ORDER)
    late.check()


def test_a_part_as_large_as_the_staging_memory_fits_it_to_the_byte(tmp_path: Path) -> None:
    link, traffic = LateLink(), Traffic()
    parts = [[torch.ones(5), torch.ones(3, dtype=torch.uint8), torch.ones(7).half()], [torch.ones(9)]]
    block = HostBlock([tensor.nbytes for part in parts for tensor in part])
    parts = [[block.hold(tensor) for tensor in part] for part in parts]
    unpin = pin(link, block.memory)
    exact = 4 * 5 + 3 + 2 * 7
    ahead, _ = cache_over(parts, link, exact, traffic)
    for part in (0, 1, 0, 1):
        for got, expected in zip(ahead.acquire(part), parts[part], strict=True):
            link.launch(got, expected)
            del got
        ahead.release(part)
    ahead.close()
    link.end()
    unpin()
    assert (link.wrong, link.taken, traffic.overflow_bytes) == ([], [exact], 0)


def test_tensors_begin_where_an_accelerator_likes_them(stage: Callable[..., Stage]) -> None:
    late = stage("mixed")
    base = late.link.device.address
    for part in IN_ORDER:
        assert all((tensor.data_ptr() - base) % 512 == 0 for tensor in late.ahead.acquire(part) if tensor.numel())
        late.ahead.release(part)
    late.check()


def test_a_tensor_of_many_reads_arrives_whole(tmp_path: Path) -> None:
    link, traffic = LateLink(copy_pause=0), Traffic()
    parts = [[torch.arange(2 * CHUNK_BYTES + 12_345, dtype=torch.int32).view(torch.float16)] for _ in range(2)]
    extents = on_disk(parts, tmp_path / "weights")
    ahead, _ = cache_over(extents, link, parts[0][0].nbytes, traffic)
    for part in (0, 1, 0):
        (got,) = ahead.acquire(part)
        link.launch(got, parts[part][0])
        del got
        ahead.release(part)
    ahead.close()
    link.end()
    assert link.wrong == []


def compute_passes(ahead: WeightCache, link: LateLink, parts: Sequence[torch.Tensor], *, count: int) -> None:
    """Compute with ``parts`` of a tensor each, in order, in so many passes."""
    for _ in range(count):
        ahead.begin_pass()
        for part, wanted in enumerate(parts):
            (got,) = ahead.acquire(part)
            link.launch(got, wanted)
            del got
            ahead.release(part)
        ahead.end_pass()


@pytest.mark.parametrize("codec", [ScaledRows(), ScaledRows(turned=True), ScaledRows(alone=False, block_rows=1)])
def test_what_several_threads_unpack_together_is_copied_once_it_is_whole(codec: ScaledRows, tmp_path: Path) -> None:
    torch.manual_seed(0)
    link, traffic, file = LateLink(), Traffic(), PackedFile(tmp_path / "weights", codec)
    parts = [coded(torch.randn(rows, 90), codec)[2] for rows in (40, 100, 3, 77, 60)]
    for number, tensor in enumerate(parts):
        file.add(str(number), tensor)
    sources = [[place] for place in file.write().values()]
    ahead, buffers = cache_over(sources, link, 60_000, traffic)
    assert buffers is not None
    assert buffers._memory.nbytes == 36_864, "one buffer, as large as the largest"
    compute_passes(ahead, link, parts, count=4)
    ahead.close()
    link.end()
    assert link.wrong == []
    assert traffic.streamed_bytes == 4 * sum(rest_bytes(place) for (place,) in sources)
    assert traffic.link_bytes >= 4 * sum(tensor.nbytes for tensor in parts)


@pytest.mark.parametrize("waits", ["disk", "memory"])
@pytest.mark.parametrize("codec", [TorchScaledRows(), TorchScaledRows(turned=True), TorchScaledRows(block_rows=30)])
def test_what_the_accelerator_unpacks_is_whole_before_it_is_used_and_crosses_the_link_packed(
    codec: TorchScaledRows, waits: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    link, traffic, file = LateLink(), Traffic(), PackedFile(tmp_path / "weights", codec)
    parts = [coded(torch.randn(rows, 90), codec)[2] for rows in (40, 100, 3, 77, 60)]
    for number, tensor in enumerate(parts):
        file.add(str(number), tensor)
    places = [place for place in file.write().values() if isinstance(place, PackedTensor)]
    if waits == "memory":
        places = [read_into_memory(place) for place in places]
        (tmp_path / "weights").unlink()
    unpins = [
        pin(link, part.file.memory) for place in places for part in place.parts if isinstance(part.file, MemoryFile)
    ]
    unpacker = open_unpacker(link, places, room=device_bytes(places))
    assert unpacker is not None
    ahead, buffers = cache_over([[place] for place in places], link, 60_000, traffic, unpacker=unpacker)
    assert (buffers is None) == (waits == "memory")
    compute_passes(ahead, link, parts, count=4)
    ahead.close()
    link.end()
    unpacker.close()
    assert link.wrong == []
    at_rest = sum(map(rest_bytes, places))
    assert traffic.streamed_bytes == 4 * at_rest
    assert 4 * at_rest <= traffic.link_bytes <= 5 * at_rest, "one pass is brought ahead at the most"
    assert (traffic.storage_bytes == 0) == (waits == "memory")
    for unpin in unpins:
        unpin()


ORDERS = [[0, 1, 2, 3, 4, 5], [5, 4, 3, 2, 1, 0], [1, 3, 5, 1, 3, 5], [4, 0, 2], [2, 5, 0, 3, 1, 4]]


@pytest.mark.parametrize("unpack_pause", in_ci(0.0, of=[0.0, 0.01]))
def test_what_is_unpacked_late_and_was_given_up_is_written_over_nothing_that_came_since(
    unpack_pause: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    link, traffic = LateLink(compute_pause=0.005, unpack_pause=unpack_pause), Traffic()
    codec, file = TorchScaledRows(), PackedFile(tmp_path / "weights", TorchScaledRows())
    parts = [coded(torch.randn(100, 90), codec)[2] if part % 2 else torch.randn(80, 90) for part in range(6)]
    for number, tensor in enumerate(parts[1::2]):
        file.add(str(number), tensor)
    places = [place for place in file.write().values() if isinstance(place, PackedTensor)]
    block = HostBlock([tensor.nbytes for tensor in parts[::2]])
    unpin = pin(link, block.memory)
    sources: list[list[Source]] = [[places[part // 2]] if part % 2 else [block.hold(parts[part])] for part in range(6)]
    unpacker = open_unpacker(link, places, room=device_bytes(places))
    ahead, _ = cache_over(sources, link, 80_000, traffic, unpacker=unpacker)
    for order in ORDERS * 2:
        ahead.begin_pass()
        for part in order:
            wait([work for entry in ahead._entries.values() for work in entry.transfer.work])
            (got,) = ahead.acquire(part)
            link.launch(got, parts[part])
            del got
            ahead.release(part)
        ahead.end_pass()
    ahead.close()
    link.end()
    unpacker.close()
    unpin()
    assert link.wrong == []


def test_an_accelerator_without_room_for_it_unpacks_nothing(tmp_path: Path) -> None:
    file = PackedFile(tmp_path / "weights", TorchScaledRows())
    file.add("0", torch.randn(40, 90))
    places = [place for place in file.write().values() if isinstance(place, PackedTensor)]
    link = LateLink()
    assert open_unpacker(link, places, room=device_bytes(places) - 1) is None
    assert open_unpacker(link, [], room=10**9) is None
    assert link.taken == []
    link.end()


def test_what_is_still_seen_is_never_copied_over(stage: Callable[..., Stage]) -> None:
    late = stage("host")
    late.ahead.begin_pass()
    kept = late.ahead.acquire(0)[0][10:20]
    late.ahead.release(0)
    for part in (1, 2, 3, 4, 5, 6, 0, 1, 2):
        late.ahead.acquire(part)
        late.ahead.release(part)
    late.link.launch(kept, late.parts[0][0][10:20])
    late.check()


def test_parts_held_at_once_beyond_the_staging_memory_get_memory_of_their_own(stage: Callable[..., Stage]) -> None:
    late = stage("mixed", staging=100)
    acquired = [late.ahead.acquire(part) for part in IN_ORDER]
    for part, tensors in zip(late.parts, acquired, strict=True):
        for got, expected in zip(tensors, part, strict=True):
            late.link.launch(got, expected)
    late.check()
    assert late.traffic.overflow_bytes > 0


def test_closing_waits_and_leaves_nothing_pinned(stage: Callable[..., Stage]) -> None:
    late = stage("mixed")
    late.play(IN_ORDER)
    late.close()
    late.unpin()
    assert late.link.pinned == []
    late.close()


def test_memory_that_cannot_be_pinned_is_said_to_be_slow_and_serves_all_the_same(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    block, link = HostBlock([100]), LateLink()
    link.registers = False
    pin(link, block.memory)()
    assert "can't be registered with the accelerator; copies from there will be slower" in caplog.text
    link.end()


def test_copies_stand_on_the_time_line(stage: Callable[..., Stage]) -> None:
    trace = Trace()
    late = stage("mixed", trace=trace)
    late.play(IN_ORDER)
    late.ahead.close()
    spans = [event for event in trace._events if event["cat"] == "copy"]
    assert sum(event["args"]["bytes"] for event in spans) >= sum(2 * size for part in SIZES for size in part)
    assert all(event["dur"] >= 1000 for event in spans), "until the accelerator has done it: a millisecond at least"
    assert {event["cat"] for event in trace._events} >= {"read", "copy"}
