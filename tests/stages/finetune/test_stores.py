"""Who waits for what when saved bytes leave an accelerator on which everything happens late, and come back."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune.stores import HostStore, Parcel, open_host_store
from offstage.stages.machine.aligned_memory import TensorRoom
from offstage.stages.machine.devices import Devices
from tests.stages.dispatch.late_link import POISON, LateLink

SIZE = 70_000


class PoisonedStore(HostStore):
    """A store whose rooms have poison in them until something was copied there."""

    def room(self, size: int) -> TensorRoom:
        room = super().room(size)
        room.tensor.fill_(POISON)
        return room


@pytest.fixture
def device() -> Iterator[tuple[LateLink, LateLink, HostStore]]:
    out = LateLink()
    back = LateLink(beside=out)
    yield out, back, PoisonedStore(Devices(), "cpu", out=out, back=back)
    for link in (back, out):
        link.end()


def wrong(out: LateLink, back: LateLink) -> list[str]:
    """Return what went wrong once all has happened. Memory of the device is no pinned memory, and none is needed."""
    for link in (out, back, out):
        link.close()
    return [told for told in out.wrong if "isn't pinned" not in told]


def fetched(parcel: Parcel[torch.Tensor]) -> torch.Tensor:
    """Return what has come back, or will have before what is computed from now on."""
    parcel.ready()
    assert parcel.room is not None
    return parcel.room


def test_the_source_may_be_written_to_once_its_parcel_is_ready_and_comes_back_as_it_was(
    device: tuple[LateLink, LateLink, HostStore],
) -> None:
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


def test_what_is_fetched_before_it_has_left_waits_for_that_by_itself(
    device: tuple[LateLink, LateLink, HostStore],
) -> None:
    out, back, store = device
    sources = [torch.zeros(SIZE, dtype=torch.uint8) for _ in range(8)]
    for source in sources:
        out.write(source, 7)
    parcels = [store.put(source, SIZE, None) for source in sources]  # the last leaves behind all others
    parcels[-1].fetch()
    room = fetched(parcels[-1])
    out.launch(room, torch.full_like(room, 7))
    assert wrong(out, back) == []


def test_what_nobody_wants_after_all_is_waited_for_before_its_memory_goes_to_others(
    device: tuple[LateLink, LateLink, HostStore],
) -> None:
    _, back, store = device
    source = torch.full((SIZE,), 3, dtype=torch.uint8)
    parcel = store.put(source, SIZE, None)
    parcel.fetch()
    room = parcel.room
    assert room is not None
    back._closing = True  # here the thread may wait
    del parcel
    assert np.all(room.numpy() == 3)


def test_on_a_simulated_accelerator_all_is_done_at_once_and_counted() -> None:
    devices, trace = Devices({0: 10**6}), Trace()
    store = open_host_store(devices, 0)
    ledger = devices.ledger(0)
    assert ledger is not None
    parcel = store.put(torch.arange(200, dtype=torch.uint8), 150, trace)
    assert not parcel.is_leaving
    assert ledger.held == 50  # what stays
    parcel.fetch()
    assert torch.equal(fetched(parcel), torch.arange(200, dtype=torch.uint8))
    assert ledger.held == 250
    parcel.room = None
    assert ledger.held == 50
    del parcel
    assert ledger.held == 0
    assert [event["name"] for event in trace._events] == ["activations out", "activations back"]
