"""What the link to a CUDA device asks of torch, and in which order; the real thing is in tests/cuda."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offstage.pipeline.errors import BudgetError
from offstage.stages.dispatch.transfer import cuda_link
from offstage.stages.dispatch.transfer.cuda_link import CudaLink, CudaMemory
from offstage.stages.dispatch.transfer.link import pin
from offstage.stages.dispatch.transfer.links import open_link
from offstage.stages.machine.aligned_memory import private_bytes
from offstage.stages.machine.devices import Devices

DEVICE = torch.device("cuda", 1)


class FakeCuda:
    """Writes down what is asked of streams, events and the runtime."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.current = self.stream("main")
        self.refuses, self.entered = False, ["main"]

    def stream(self, name: str) -> Any:
        def wait_event(event: Any) -> None:
            self.log.append(f"{name} waits for {event.name}")

        def wait_stream(other: Any) -> None:
            self.log.append(f"{name} waits for stream {other.name}")

        return SimpleNamespace(name=name, device=DEVICE, wait_event=wait_event, wait_stream=wait_stream)

    def event(self, blocking: bool = False, enable_timing: bool = False) -> Any:
        event = SimpleNamespace(name="blocking event" if blocking else "event")
        event.record = lambda stream: self.log.append(f"{event.name} recorded on {stream.name}")
        event.query = lambda: False
        event.synchronize = lambda: self.log.append(f"host waits for {event.name}")
        return event

    def enter(self, stream: Any) -> None:
        self.entered.append(stream.name)

    def register(self, address: int, size: int, flags: int) -> int:
        self.log.append(f"register {size} with {flags}")
        return 2 if self.refuses else 0

    def unregister(self, address: int) -> int:
        self.log.append("unregister")
        return 0


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(
        torch.cuda, "Stream", lambda _device, priority=0: fake.stream("urgent" if priority < 0 else "copies")
    )
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device=None: fake.current)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE.index)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _index: id(fake.current), raising=False)
    monkeypatch.setattr(torch.cuda, "set_stream", fake.enter)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.log.append(f"host waits for {device}"))
    runtime = SimpleNamespace(cudaHostRegister=fake.register, cudaHostUnregister=fake.unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return fake


class Target:
    def __init__(self, cuda: FakeCuda) -> None:
        self._cuda = cuda

    def copy_(self, _source: object, *, non_blocking: bool) -> None:
        self._cuda.log.append(f"copy on {self._cuda.entered[-1]}, non_blocking={non_blocking}")


def test_a_copy_waits_on_its_own_stream_and_computing_on_the_current_one(cuda: FakeCuda) -> None:
    link: Any = CudaLink(DEVICE)
    done = link.copy([(torch.ones(1), Target(cuda))], after=link.computed())
    link.follow(done)
    link.finish(done)
    assert cuda.log == [
        "event recorded on main",
        "copies waits for event",
        "copy on copies, non_blocking=True",
        "blocking event recorded on copies",
        "event recorded on main",
        "main waits for blocking event",
        "host waits for blocking event",
    ]
    assert cuda.entered[-1] == "main"


def test_what_is_awaited_is_copied_on_a_stream_that_goes_first(cuda: FakeCuda) -> None:
    link: Any = CudaLink(DEVICE)
    link.copy([(torch.ones(1), Target(cuda))], after=link.computed(), urgent=True)
    assert cuda.log[1:] == [
        "urgent waits for event",
        "copy on urgent, non_blocking=True",
        "blocking event recorded on urgent",
    ]


def test_what_is_over_counts_as_stalled_once_by_the_time_of_the_device(cuda: FakeCuda) -> None:
    link, done = CudaLink(DEVICE), [cuda.event() for _ in range(3)]
    for event in done:
        link.follow(event)
    assert link.stalled() == 0.0
    for milliseconds, (came, event) in zip((5.0, -2.0, 3.0), link._followed, strict=True):
        came.query, event.query = (lambda: True), (lambda milliseconds=milliseconds: milliseconds != 3.0)
        came.elapsed_time = lambda _done, milliseconds=milliseconds: milliseconds
    assert link.stalled() == 0.005
    done[-1].query = lambda: True
    assert [link.stalled(), link.stalled()] == [0.003, 0.0]


def test_another_stream_first_waits_for_the_one_before_it(cuda: FakeCuda) -> None:
    link = CudaLink(DEVICE)
    cuda.current = cuda.stream("other")
    link.computed()
    link.computed()
    assert cuda.log == ["other waits for stream main", "event recorded on other", "event recorded on other"]


def test_memory_is_registered_as_it_is_for_all_devices_and_let_go_once(cuda: FakeCuda) -> None:
    undo = pin(CudaLink(DEVICE), private_bytes(3 * 4096))
    undo()
    undo()
    assert cuda.log == [f"register {3 * 4096} with 1", "unregister"]


def test_memory_is_unregistered_when_its_last_view_goes(cuda: FakeCuda) -> None:
    memory = private_bytes(4096)
    pin(CudaLink(DEVICE), memory)
    view = torch.frombuffer(memory[8:16], dtype=torch.uint8)
    del memory
    assert cuda.log[1:] == []
    del view
    assert cuda.log[1:] == ["unregister"]


def test_a_refusal_is_taken_for_one(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    def ones(*_: object, **__: object) -> None:
        raise RuntimeError("CUDA error: the refusal, again")

    cuda.refuses = True
    monkeypatch.setattr(torch, "ones", ones)
    assert not CudaLink(DEVICE).register(private_bytes(4096))


def test_a_full_device_is_a_budget_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "empty", full)
    with pytest.raises(BudgetError, match=r"max_memory\.1: accelerator 1 is full: 2\.00 kB more"):
        CudaMemory(DEVICE, 2000)


def test_a_region_is_a_tensor_made_from_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, object]] = []
    memory = CudaMemory(torch.device("cpu"), 2048)
    monkeypatch.setattr(torch, "as_tensor", lambda span, device: asked.append((span, device)))
    _, watched = memory.lend(512, 100)
    ((span, device),) = asked
    assert watched is span
    interface = span.__cuda_array_interface__
    assert (interface["data"], interface["shape"]) == ((memory._base.data_ptr() + 512, False), (100,))
    assert (interface["typestr"], device) == ("|u1", torch.device("cpu"))


def test_a_cuda_device_gets_this_link(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices()
    monkeypatch.setattr(devices, "torch_device", lambda _device: DEVICE)
    link = open_link(devices, 1)
    assert isinstance(link, cuda_link.CudaLink)
    link.close()
    assert cuda.log == ["host waits for cuda:1"]
