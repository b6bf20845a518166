"""Who waits for what when saved bytes leave an accelerator on which everything happens late, and come back."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.disk_store import BLOCK_BYTES, IN_FLIGHT, DiskStore
from offstage.stages.finetune.stores import ActivationStore, HostStore, Parcel, open_host_store
from offstage.stages.machine.aligned_memory import TensorRoom
from offstage.stages.machine.devices import Devices
from tests.stages.dispatch.late_link import POISON, LateLink

SIZE = 70_000


class Poisoned:
    """A store whose rooms are of the accelerator's memory, with poison in them until something was copied there."""

    def room(self: Any, size: int) -> TensorRoom:
        room = TensorRoom(torch.frombuffer(self._out.device.take(size), dtype=torch.uint8))
        room.tensor.fill_(POISON)
        return room


class PoisonedHost(Poisoned, HostStore):
    """One on the host."""


class PoisonedDisk(Poisoned, DiskStore):
    """One on disk."""


Device = tuple[LateLink, LateLink, ActivationStore[Any]]


@pytest.fixture(params=["host", "disk"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Device]:
    out = LateLink()
    back = LateLink(beside=out)
    links: dict[str, LateLink] = {"out": out, "back": back}
    yield (
        out,
        back,
        PoisonedHost(Devices(), "cpu", **links)
        if request.param == "host"
        else PoisonedDisk(Devices(), "cpu", tmp_path, **links),
    )
    for link in (back, out):
        link.end()


def wrong(out: LateLink, back: LateLink) -> list[str]:
    """Return what went wrong once all has happened."""
    for link in (out, back, out):
        link.close()
    return out.wrong


def fetched(parcel: Parcel[Any]) -> torch.Tensor:
    """Return what has come back, or will have before what is computed from now on."""
    parcel.ready()
    assert parcel.room is not None
    return parcel.room


def test_the_source_may_be_written_to_once_its_parcel_is_ready_and_comes_back_as_it_was(device: Device) -> None:
    out, back, store = device
    sources = [torch.zeros(SIZE + number, dtype=torch.uint8) for number in range(6)]
    for repeat in range(3):  # the regions are used again
        parcels = []
        for number, source in enumerate(sources):
            out.write(source, 10 * repeat + number)
            parcels.append(store.put(source, source.nbytes, None))
        assert all(parcel.is_leaving for parcel in parcels)
        for parcel, source in zip(parcels, sources, strict=True):
            parcel.ready()
            assert not parcel.is_leaving
            out.write(source, POISON)
        for parcel in parcels[::-1]:
            parcel.fetch()
        rooms = [fetched(parcel) for parcel in parcels]
        for number, room in enumerate(rooms):
            out.launch(room, torch.full_like(room, 10 * repeat + number))
        assert wrong(out, back) == []
        del parcels, parcel
    assert store.size <= 2 * 8 * SIZE


def test_what_is_fetched_before_it_has_left_waits_for_that_by_itself(device: Device) -> None:
    out, back, store = device
    sources = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(8)]
    for source in sources:
        out.write(source, 7)
    parcels = [store.put(source, SIZE, None) for source in sources]  # the last leaves behind all others
    parcels[-1].fetch()
    room = fetched(parcels[-1])
    out.launch(room, torch.full_like(room, 7))
    assert wrong(out, back) == []


def test_what_nobody_wants_after_all_is_waited_for_before_its_memory_goes_to_others(device: Device) -> None:
    _, back, store = device
    source = torch.full((SIZE,), 3, dtype=torch.uint8)
    parcel = store.put(source, SIZE, None)
    parcel.fetch()
    room = parcel.room
    assert room is not None
    back._closing = True  # here the thread may wait
    del parcel
    assert np.all(room.numpy() == 3)


def test_more_than_there_are_buffers_for_leaves_and_comes_back_while_more_leaves(device: Device) -> None:
    out, back, store = device
    size = (2 * IN_FLIGHT + 1) * BLOCK_BYTES + 1000
    first, second = (torch.frombuffer(out.device.take(size), dtype=torch.uint8) for _ in range(2))
    out.write(first, 5)
    out.write(second, 6)
    parcel = store.put(first, size, None)
    parcel.fetch()
    other = store.put(second, size, None)
    other.fetch()
    for value, room in ((5, fetched(parcel)), (6, fetched(other))):
        out.launch(room, torch.full_like(room, value))
    assert wrong(out, back) == []


def test_on_a_simulated_accelerator_all_is_done_at_once_and_counted() -> None:
    devices, trace = Devices({0: 10**6}), Trace()
    store = open_host_store(devices, 0)
    ledger = devices.ledger(0)
    assert ledger is not None
    parcel = store.put(torch.arange(200, dtype=torch.uint8), 150, trace)
    assert not parcel.is_leaving
    assert ledger.allocated == 50  # what stays
    parcel.fetch()
    assert torch.equal(fetched(parcel), torch.arange(200, dtype=torch.uint8))
    assert ledger.allocated == 250
    parcel.room = None
    assert ledger.allocated == 50
    del parcel
    assert ledger.allocated == 0
    assert [event["name"] for event in trace._events] == ["activations out", "activations back"]
