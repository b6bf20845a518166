"""Random plans and orders over an accelerator on which everything happens late: no computing sees other bytes.

A case has parts that wait on the host or on disk, plain or packed, unpacked by the host or by the accelerator; a ring
that has room for a few of them; and passes in orders that nobody expected: parts are called twice, left out, held
beside others, seen after they were let go, and passes end before their time, or are taken back.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import wait
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import torch

from offstage.stages.checkpoints.device_codec import device_bytes
from offstage.stages.checkpoints.packed import MemoryFile, PackedTensor
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.device_unpacker import open_unpacker
from offstage.stages.dispatch.transfer.link import pin
from offstage.stages.dispatch.transfer.mover import Mover, Transfer
from offstage.stages.dispatch.transfer.part_layout import Source, lay_out
from offstage.stages.dispatch.transfer.pinned_buffers import PinnedBuffers
from offstage.stages.dispatch.transfer.traffic import Traffic
from offstage.stages.machine.aligned_memory import HostBlock
from tests.long_form import in_ci
from tests.stages.dispatch.late_link import LateLink, faults_of_each
from tests.stages.dispatch.transfer.test_mover import cache_over, on_disk
from tests.stages.packed_models import PackedFile, ScaledRows, TorchScaledRows, coded, read_into_memory

SHORT, LONG = range(16), range(16, 2000)
PAUSES = (0.0, 0.0005, 0.003)
CODECS = (TorchScaledRows(), TorchScaledRows(turned=True), TorchScaledRows(block_rows=30), ScaledRows())
WIDTH = 64


class Scene:
    """The parts of one case, what they come to, and the cache that brings them over a late link."""

    def __init__(self, chance: random.Random, folder: Path, stack: ExitStack) -> None:
        pauses = {name: chance.choice(PAUSES) for name in ("copy_pause", "compute_pause")}
        pauses |= {"unpack_pause": chance.choice([*PAUSES, 0.02]), "urgent_pause": chance.choice([*PAUSES, 0.02])}
        self.link, self.wanted = LateLink(**pauses), list[list[torch.Tensor]]()
        stack.callback(self.link.end)
        codec = chance.choice(CODECS)
        file = PackedFile(folder / "weights", codec)
        generator = torch.Generator().manual_seed(chance.randrange(2**31))
        homes: list[list[str]] = []
        for part in range(chance.randint(3, 9)):
            homes.append([])
            self.wanted.append([])
            for piece in range(chance.randint(1, 3)):
                rows, home = chance.randint(1, 120), chance.choice(["host", "disk", "packed", "packed in memory"])
                shape = (rows, WIDTH) if "packed" in home else (rows * chance.choice([1, WIDTH]),)
                tensor = torch.randn(*shape, generator=generator)
                tensor = coded(tensor, codec)[2] if "packed" in home else tensor
                file.add(f"{part}.{piece}", tensor)
                homes[part].append(home)
                self.wanted[part].append(tensor)
        self.cache = self._open(homes, file.write(), chance, stack)

    def _open(
        self, homes: list[list[str]], places: dict[str, Source], chance: random.Random, stack: ExitStack
    ) -> WeightCache:
        block = HostBlock([tensor.nbytes for part in self.wanted for tensor in part])
        stack.callback(pin(self.link, block.memory))
        sources = [
            [
                self._source(places[f"{part}.{piece}"], home, self.wanted[part][piece], block)
                for piece, home in enumerate(of)
            ]
            for part, of in enumerate(homes)
        ]
        packed = [source for part in sources for source in part if isinstance(source, PackedTensor)]
        for span in (span for source in packed for span in source.parts):
            if isinstance(span.file, MemoryFile):
                stack.callback(pin(self.link, span.file.memory))
        unpacker = open_unpacker(self.link, packed, room=chance.choice([0, device_bytes(packed)])) if packed else None
        sizes = [sum(tensor.nbytes + 512 for tensor in part) for part in self.wanted]
        staging = max(sizes) + chance.choice([0, sum(sizes) // 3, sum(sizes)])
        cache, buffers = cache_over(sources, self.link, staging, Traffic(), unpacker=unpacker)
        for closing in (unpacker, buffers, cache):
            if closing is not None:
                stack.callback(closing.close)
        return cache

    @staticmethod
    def _source(place: Source, home: str, tensor: torch.Tensor, block: HostBlock) -> Source:
        if home == "host":
            return block.hold(tensor)
        return read_into_memory(place) if home == "packed in memory" and isinstance(place, PackedTensor) else place

    def play(self, chance: random.Random) -> None:
        """Run a pass in a random order, which may end before its time."""
        order = list(range(len(self.wanted)))
        if chance.random() < 0.5:
            order = [chance.randrange(len(order)) for _ in range(chance.randint(1, 2 * len(order)))]
        is_read = chance.random() < 0.5  # what was asked for by now, which the accelerator has yet to take
        self.cache.begin_pass()
        kept: list[tuple[Sequence[torch.Tensor], int]] = []
        for part in order:
            if is_read:
                wait([work for entry in self.cache._entries.values() for work in entry.transfer.work])
            self._use(part, chance, kept)
            if chance.random() < 0.03:  # an interrupt: no hook is called
                self.cache.recover()
                return
        if chance.random() < 0.9:
            self.cache.end_pass()

    def _use(self, part: int, chance: random.Random, kept: list[tuple[Sequence[torch.Tensor], int]]) -> None:
        beside = chance.randrange(len(self.wanted)) if chance.random() < 0.1 else None
        for each in filter(lambda one: one is not None, (part, beside)):
            tensors = self.cache.acquire(each)
            self._compute(tensors, each)
            if chance.random() < 0.1:  # a view that outlives the call, and computes later
                kept.append(([tensor.view_as(tensor) for tensor in tensors], each))
            del tensors
        if kept and chance.random() < 0.3:
            self._compute(*kept.pop(0))
        for each in filter(lambda one: one is not None, (beside, part)):
            self.cache.release(each)

    def _compute(self, tensors: Sequence[torch.Tensor], part: int) -> None:
        for tensor, wanted in zip(tensors, self.wanted[part], strict=True):
            self.link.launch(tensor, wanted)


@contextmanager
def scene(chance: random.Random, folder: Path) -> Iterator[Scene]:
    """Return a case by ``chance``, closed behind it."""
    with ExitStack() as stack:
        yield Scene(chance, folder, stack)


def faults(seed: int, folder: Path) -> list[str]:
    """Return what is wrong in the passes of the case ``seed``, once its accelerator is done."""
    chance = random.Random(seed)
    with scene(chance, folder) as one:
        for _ in range(chance.randint(2, 6)):
            one.play(chance)
        link = one.link
    return link.wrong


class Regions:
    """Tensors that wait on the host or on disk, each with a region; the last is awaited, and the link's copies stand
    still until ``go_on``.
    """

    def __init__(self, where: str, folder: Path, stack: ExitStack) -> None:
        self.tensors = [torch.randn(30_000).half() for _ in range(4)]
        self.link, gate = LateLink(), threading.Event()
        block, self.go_on = HostBlock([tensor.nbytes for tensor in self.tensors]), gate.set
        stack.callback(self.link.end)
        stack.callback(pin(self.link, block.memory))
        places: list[Source] = [block.hold(tensor) for tensor in self.tensors]
        if where == "disk":
            places = [part[0] for part in on_disk([[tensor] for tensor in self.tensors], folder / "weights")]
        buffers = PinnedBuffers(self.link, count=6, size=2**18)
        self.mover = Mover(self.link, places, device=0, buffers=buffers, traffic=Traffic())
        for closing in (buffers.close, self.mover.close, self.go_on):
            stack.callback(closing)
        self.link.copies.add(gate.wait)
        memory, self.layouts = self.link.memory(4 * 2**17), [lay_out([place], link_room=2**20) for place in places]
        regions = [memory.lend(place * 2**17, layout.size)[0] for place, layout in enumerate(self.layouts)]
        self.transfers = [Transfer(region, is_awaited=region is regions[-1]) for region in regions]
        for layout, transfer in zip(self.layouts, self.transfers, strict=True):
            self.mover.fetch(layout, transfer)

    def compute(self, places: range) -> None:
        """Wait for those together, and compute with them."""
        self.mover.wait([self.transfers[place] for place in places], "those")
        for place in places:
            region = self.transfers[place].region
            assert region is not None
            self.link.launch(self.layouts[place].views(region)[0], self.tensors[place])


everywhere = pytest.mark.parametrize("where", ["host", "disk"])


@everywhere
def test_what_is_awaited_is_not_behind_what_is_only_on_its_way(where: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        regions = Regions(where, tmp_path, stack)
        regions.compute(range(3, 4))
        assert regions.link.computed().wait(10), "the others haven't begun"
        regions.go_on()
        regions.compute(range(3))
    assert regions.link.wrong == []


@everywhere
def test_computing_follows_both_what_is_awaited_and_what_was_asked_for_ahead(where: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        regions = Regions(where, tmp_path, stack)
        wait(regions.transfers[-1].work)
        regions.compute(range(4))
        assert not regions.link.computed().wait(0.1), "it waits for what was asked for ahead, too"
        regions.go_on()
    assert regions.link.wrong == []


@pytest.mark.parametrize("cases", in_ci(SHORT, of=[SHORT, LONG]))
def test_no_order_of_any_plan_computes_with_other_bytes(cases: range, tmp_path: Path) -> None:
    assert [*faults_of_each(faults, cases, tmp_path)] == [[]] * len(cases), "by their places: the cases that fail"
