from __future__ import annotations

import threading
from collections import deque
from contextlib import suppress

import pytest
import torch
from torch import nn

from offstage.pipeline.errors import BudgetError, ConfigError
from offstage.stages.machine.aligned_memory import private_bytes
from offstage.stages.machine.devices import Devices, torch_device


def tensor(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


def test_a_simulated_device_gets_a_copy_and_the_host_does_not() -> None:
    devices, source = Devices({0: 10}), tensor(4)
    assert devices.put(source, 0).data_ptr() != source.data_ptr()
    assert devices.put(source, "cpu").data_ptr() == source.data_ptr()
    assert (devices.is_apart(0), devices.is_apart("cpu")) == (True, False)
    assert devices.torch_device(0) == torch.device("cpu")


def test_a_ledger_counts_until_the_last_view_is_gone() -> None:
    devices = Devices({0: 10, 1: 10})
    parameter = nn.Parameter(devices.put(tensor(8), 0), requires_grad=False)
    view = parameter[:2]
    del parameter
    with pytest.raises(BudgetError):
        devices.put(tensor(3), 0)
    del view
    again = devices.put(tensor(9), 0)
    assert devices.peaks == {0: 9, 1: 0}
    del again


def test_threads_that_ask_at_once_get_no_more_than_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    both, errors = threading.Barrier(2, timeout=0.5), []

    def slowly(size: int) -> object:
        with suppress(threading.BrokenBarrierError):
            both.wait()
        return private_bytes(size)

    monkeypatch.setattr("offstage.stages.machine.devices.private_bytes", slowly)
    ledger, kept = Devices({0: 10}).ledger(0), []

    def take() -> None:
        assert ledger is not None
        try:
            kept.append(ledger.allocate(8))
        except BudgetError as error:
            errors.append(error)

    threads = [threading.Thread(target=take) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(kept), len(errors)) == (1, 1)


def test_a_full_ledger_raises_and_says_how_much_would_do() -> None:
    devices = Devices({3: 10})
    on_device = devices.put(tensor(10), 3)
    with pytest.raises(BudgetError, match=r"max_memory\.3: the simulated accelerator 3 is full.*give it 11 bytes"):
        devices.put(tensor(1), 3)
    assert devices.peaks == {3: on_device.nbytes}


def test_what_was_made_on_a_simulated_device_is_counted_once() -> None:
    devices = Devices({0: 100})
    room = devices.room((8,), torch.float32, 0)
    assert devices.put(room.tensor, 0) is room.tensor
    assert devices.put(room.tensor[2:], 0).data_ptr() == room.tensor.data_ptr() + 8
    with pytest.raises(BudgetError, match=r"max_memory\.0: .*give it 132 bytes"):
        devices.room((25,), torch.float32, 0)
    del room
    assert devices.put(tensor(100), 0).nbytes == 100
    assert devices.peaks == {0: 100}


def test_what_computing_left_on_a_simulated_device_can_be_counted_and_only_once() -> None:
    devices = Devices({0: 1000})
    ledger = devices.ledger(0)
    assert ledger is not None
    computed, placed = torch.ones(100), devices.put(torch.ones(50), 0)
    for tensor in (computed, computed.view(10, 10), placed):
        ledger.hold(tensor)
    assert ledger.allocated == 600
    with pytest.raises(BudgetError, match=r"600 B of 1\.00 kB"):
        ledger.hold(torch.ones(101))
    view = computed[3:]
    del computed, tensor
    assert ledger.allocated == 600
    del view, placed
    assert (ledger.allocated, ledger.peak) == (0, 600)


def test_memory_that_is_allocated_counts_until_its_last_view_is_gone() -> None:
    devices = Devices({0: 10})
    ledger = devices.ledger(0)
    assert ledger is not None
    assert devices.ledger("cpu") is None
    view = ledger.allocate(8)[2:4]
    assert ledger.allocated == 8
    with pytest.raises(BudgetError, match="give it 11 bytes"):
        ledger.allocate(3)
    del view
    assert (ledger.allocated, ledger.peak) == (0, 8)


def test_threads_that_take_and_give_back_at_once_leave_nothing_counted() -> None:
    ledger = Devices({0: 2**30}).ledger(0)
    assert ledger is not None

    def work() -> None:
        kept: deque[object] = deque(maxlen=3)
        for size in range(1, 800):
            kept += [ledger.allocate(size), torch.ones(size)]
            ledger.hold(torch.ones(size))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ledger.allocated == 0
    assert not ledger.holds(torch.ones(5))


def test_a_full_accelerator_is_a_budget_error_and_names_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch.Tensor, "to", full)
    with pytest.raises(BudgetError, match=r"max_memory\.1: accelerator 1 is full: 4 B more of weights"):
        Devices().put(tensor(4), 1)


def test_an_accelerator_that_a_machine_with_others_lacks_is_named_and_not_computed_for_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    assert torch_device(1) == torch.device("cuda", 1)
    assert torch_device("cpu") == torch_device("disk") == torch.device("cpu")
    with pytest.raises(ConfigError, match="accelerator 5 isn't here: this machine has 2, the last is 1"):
        torch_device(5)
    assert Devices({5: 100}).torch_device(5) == torch.device("cpu"), "it is simulated"
