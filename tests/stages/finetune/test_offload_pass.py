"""When saved bytes go and come back, on an accelerator whose copies are done as late as they may be."""

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from offstage.stages.dispatch.transfer.link import Piece
from offstage.stages.dispatch.transfer.trace import Trace
from offstage.stages.finetune import CPUOffload, offload_choice
from offstage.stages.finetune.stores import HostStore
from offstage.stages.machine.aligned_memory import Bytes
from offstage.stages.machine.devices import Devices
from tests.stages.finetune.trained_models import INPUTS, expected, gradients, net, same

GIB = 2**30


class LazyLink:
    """Does a copy when somebody follows or waits for it, or for one that was asked for later, and never before."""

    def __init__(self) -> None:
        self.asked: deque[tuple[object, Callable[[], None]]] = deque()
        self.copies = self.lost = 0

    def memory(self, size: int) -> Any:
        raise NotImplementedError

    def computed(self) -> None:
        return None

    def copy(self, pieces: Sequence[Piece], *, after: object, urgent: bool = False) -> object:
        ((source, target),) = pieces
        ends = [(weakref.ref(end.untyped_storage()), end.storage_offset(), end.nbytes) for end in (source, target)]

        def work() -> None:
            storages = [storage() for storage, _, _ in ends]
            if None in storages:
                self.lost += 1
                return
            views = [
                torch.empty(0, dtype=torch.uint8).set_(storage, begin, (count,), (1,))
                for storage, (_, begin, count) in zip(storages, ends, strict=True)
            ]
            views[1].copy_(views[0])

        self.copies += 1
        event = object()
        self.asked.append((event, work))
        return event

    def follow(self, event: object) -> None:
        while any(event is asked for asked, _ in self.asked):
            self.asked.popleft()[1]()

    finish = follow

    def register(self, memory: Bytes) -> bool:
        return True

    def unregister(self, address: int) -> None:
        return None

    def close(self) -> None:
        return None


@pytest.fixture
def back(monkeypatch: pytest.MonkeyPatch) -> LazyLink:
    """Have simulated accelerators reached over lazy links; return the one that brings back."""
    link = LazyLink()
    monkeypatch.setattr(
        offload_choice,
        "open_host_store",
        lambda devices, device: HostStore(devices, device, out=LazyLink(), back=link),
    )
    return link


@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0])
def test_late_copies_give_the_same_bits_and_no_more_is_held_than_stays(ratio: float, back: LazyLink) -> None:
    model = net()
    for step in range(4):
        with CPUOffload(ratio, f"late {ratio}", devices=Devices({0: GIB})) as context:
            loss = model(INPUTS.clone()).square().sum()
        loss.backward()
        assert same(gradients(model), expected(INPUTS))
        got = context.traffic[context.tag]
        stays = (1 - ratio) * (got.kept_bytes + got.offloaded_bytes)
        assert step == 0 or got.peak_bytes <= stays + 3 * INPUTS.nbytes  # two that leave, and the one that is saved
    assert back.copies > 2
    assert back.lost == 0


def test_a_graph_that_is_dropped_while_copies_are_under_way_frees_no_memory_under_them(back: LazyLink) -> None:
    model = net()
    for _ in range(3):
        with CPUOffload(0.5, "dropped", devices=Devices({0: GIB})):
            hidden = model[:6](INPUTS.clone())
            loss = model[6:](hidden).square().sum()
        torch.autograd.grad(loss, hidden)  # what comes ahead of the rest isn't wanted any more
        assert back.asked
        del hidden, loss
        assert not back.asked
    assert back.lost == 0


@pytest.mark.parametrize("count", [1, 8])
def test_what_is_written_to_while_it_leaves_is_autograds_error(count: int, back: LazyLink) -> None:
    for _ in range(2):
        values = torch.rand(3000, requires_grad=True)
        with CPUOffload(1.0, f"written {count}", devices=Devices({0: GIB})):
            hidden = values * 2
            loss = hidden.square().sum()
            hidden.detach().add_(1)
            for _ in range(count):  # so that it is let go, or is still there when it is wanted
                loss = loss + (values * 3).square().sum()
        with pytest.raises(RuntimeError, match="modified by an inplace operation: it is at version 1"):
            loss.backward()


def test_what_is_saved_last_comes_back_first_and_one_comes_ahead_of_its_use() -> None:
    log: list[tuple[str, int]] = []

    class LoggedTrace(Trace):
        def add(self, name: str, category: str, began: float, **details: Any) -> None:
            log.append((name, details["bytes"]))

    class Save(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(values.clone())
            return values[1:]

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            (saved,) = ctx.saved_tensors
            log.append(("used", saved.nbytes))
            return torch.cat([torch.zeros(1), gradient])

    for _ in range(2):
        log.clear()
        hidden = torch.rand(1004, requires_grad=True)
        with CPUOffload(1.0, "order", devices=Devices({0: GIB}), trace=LoggedTrace()):
            for _ in range(4):
                hidden = Save.apply(hidden)
        hidden.sum().backward()
    sizes = [4 * (1004 - index) for index in range(4)]
    out, back, used = "activations out", "activations back", "used"
    assert log[:4] == [(out, size) for size in sizes]
    assert log[4:] == [
        (back, sizes[3]), (back, sizes[2]), (used, sizes[3]), (back, sizes[1]), (used, sizes[2]), (back, sizes[0]),
        (used, sizes[1]), (used, sizes[0]),
    ]  # fmt: skip


def test_of_a_graph_that_is_kept_only_what_stays_is_held_between_two_backwards() -> None:
    model, devices = net(), Devices({0: GIB})
    for _ in range(2):
        with CPUOffload(0.75, "kept", devices=devices) as context:
            loss = model(INPUTS.clone()).square().sum()
        got, ledger = context.traffic["kept"], devices.ledger(0)
        assert ledger is not None
        for _ in range(3):
            loss.backward(retain_graph=True)
            assert ledger.allocated <= got.kept_bytes
        del loss
        assert ledger.allocated == 0
