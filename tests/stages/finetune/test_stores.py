"""Who waits for what when saved bytes leave an accelerator on which everything happens late, and come back."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.stores import HostStore, open_host_store
from offstage.stages.machine.devices import Devices
from tests.stages.dispatch.late_link import POISON, LateLink, at

SIZE = 70_000


class LateDevice(LateLink):
    """Copies out of it and back to it; what it computes is one queue, seen from both links."""

    def __init__(self, other: LateLink | None = None) -> None:
        super().__init__()
        if other is not None:
            self.computing.end()
            self.computing, self.pinned, self.wrong = other.computing, other.pinned, other.wrong

    def write(self, target: torch.Tensor, value: int) -> None:
        """Have computing fill ``target``, when its turn comes."""
        address, count = target.data_ptr(), target.nbytes
        self.computing.add(lambda: at(address, count).fill(value))


@pytest.fixture
def device() -> Iterator[tuple[LateDevice, LateDevice, HostStore]]:
    out = LateDevice()
    back = LateDevice(out)
    yield out, back, HostStore(out, back, lambda size: torch.full((size,), POISON, dtype=torch.uint8))
    out.close()
    for stream in (out.computing, out.copies, back.copies):
        stream.end()


def wrong(out: LateDevice, back: LateDevice) -> list[str]:
    """Return what went wrong once all has happened. Memory of the device is no pinned memory, and none is needed."""
    for link in (out, back, out):
        link.close()
    return [told for told in out.wrong if "isn't pinned" not in told]


def test_the_source_may_be_written_to_once_it_is_settled_and_comes_back_as_it_was(
    device: tuple[LateDevice, LateDevice, HostStore],
) -> None:
    out, back, store = device
    sources = [torch.zeros(SIZE + number, dtype=torch.uint8) for number in range(6)]
    for repeat in range(3):  # the regions are used again
        away = []
        for number, source in enumerate(sources):
            out.write(source, 10 * repeat + number)
            away.append(store.put(source, None))
        assert all(one.leaving for one in away)
        for one, source in zip(away, sources, strict=True):
            one.settle()
            assert not one.leaving
            out.write(source, POISON)
        rooms = [store.room(source.nbytes) for source in sources]
        for one, room in zip(away[::-1], rooms[::-1], strict=True):
            one.fetch(room)
        for number, (one, room) in enumerate(zip(away, rooms, strict=True)):
            one.finish()
            out.launch(room, torch.full_like(room, 10 * repeat + number))
        assert wrong(out, back) == []
        del away, one
    assert store.size <= 2 * 8 * SIZE


def test_what_is_fetched_before_it_has_left_waits_for_that_by_itself(
    device: tuple[LateDevice, LateDevice, HostStore],
) -> None:
    out, back, store = device
    sources, room = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(8)], store.room(SIZE)
    for source in sources:
        out.write(source, 7)
    away = [store.put(source, None) for source in sources]  # the last leaves behind all others
    away[-1].fetch(room)
    away[-1].finish()
    out.launch(room, torch.full_like(room, 7))
    assert wrong(out, back) == []


def test_what_nobody_wants_after_all_is_waited_for_before_its_memory_goes_to_others(
    device: tuple[LateDevice, LateDevice, HostStore],
) -> None:
    _, back, store = device
    source, room = torch.full((SIZE,), 3, dtype=torch.uint8), store.room(SIZE)
    away = store.put(source, None)
    away.fetch(room)
    back._closing = True  # here the thread may wait
    del away
    assert np.all(room.numpy() == 3)


def test_on_a_simulated_accelerator_all_is_done_at_once_and_counted() -> None:
    devices, trace = Devices({0: 10**6}), Trace()
    store = open_host_store(devices, 0)
    ledger = devices.ledger(0)
    assert ledger is not None
    away = store.put(torch.arange(200, dtype=torch.uint8), trace)
    assert not away.leaving
    room = store.room(200)
    away.fetch(room)
    away.finish()
    assert torch.equal(room, torch.arange(200, dtype=torch.uint8))
    assert ledger.held == 200
    del room
    assert ledger.held == 0
    assert [event["name"] for event in trace._events] == ["activations out", "activations back"]
