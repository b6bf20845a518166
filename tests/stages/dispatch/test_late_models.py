"""Random models, placements and passes over accelerators on which everything happens late: no module sees other bytes.

A case has modules of all kinds (``late_models``) on one accelerator or two; passes with and without gradients, whose
activations may wait on the host meanwhile; calls that go together; and passes that an interrupt ends.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack, nullcontext
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage.stages.finetune import CPUOffload
from offstage.stages.finetune.cpu_offload import TARGETS
from offstage.stages.finetune.disk_store import DiskStore
from offstage.stages.finetune.offload_choice import history_of
from offstage.stages.finetune.stores import HostStore
from offstage.stages.machine.aligned_memory import TensorRoom
from offstage.stages.units import DeviceId
from tests.long_form import in_ci
from tests.stages.dispatch.late_link import LateLink, faults_of_each
from tests.stages.dispatch.late_models import ROUTES, LateDevice, Row, expect, looking, random_block
from tests.stages.dispatch.placed_models import ROOM, Setup, to_disk
from tests.stages.packed_models import TorchScaledRows, coded, to_packed

SHORT, LONG = range(16), range(16, 2000)
PAUSES = (0.0, 0.0005, 0.002)
_MAKING = threading.Lock()
"""Weights are drawn by torch's one generator, which each case seeds."""
SIZE = 1024
"""The bytes that a module computes."""


class LateStore(HostStore):
    """Puts away what lies in a late accelerator's memory, and has it come back there."""

    def room(self, size: int) -> TensorRoom:
        """Return so many bytes of that memory."""
        return TensorRoom(torch.frombuffer(self._out.device.take(size), dtype=torch.uint8))


class LateDisk(DiskStore):
    """The same by way of a disk."""

    room = LateStore.room


class LateModel:
    """The model of one case, and how it is called, until ``stack`` is closed."""

    def __init__(self, chance: random.Random, folder: Path, stack: ExitStack) -> None:
        torch.manual_seed(chance.randrange(2**31))
        self.chance, self.folder, self.stack = chance, folder, stack
        self.links = [self._link() for _ in range(chance.choice([1, 1, 2]))]
        for link in self.links[1:]:
            link.pinned = self.links[0].pinned  # all copy from what one has registered
        self.devices = [LateDevice(link) for link in self.links]
        blocks = [random_block(chance.choice(self.devices), chance) for _ in range(chance.randint(2, 7))]
        self.model = Row(blocks)
        self.offloads = len(self.links) == 1 and chance.random() < 0.5
        self.setup = self._setup(folder)
        stack.callback(self.setup.streamer.remove)
        self.tag = f"late {id(self)}"
        if self.offloads:
            self._offload()

    def _link(self, beside: LateLink | None = None) -> LateLink:
        chance = self.chance
        pauses = {name: chance.choice(PAUSES) for name in ("copy_pause", "compute_pause", "unpack_pause")}
        link = LateLink(**pauses, urgent_pause=chance.choice([*PAUSES, 0.02]), beside=beside)
        self.stack.callback(link.end)
        return link

    def _setup(self, folder: Path) -> Setup:
        chance, model = self.chance, self.model
        codec = chance.choice([None, TorchScaledRows(), TorchScaledRows(turned=True), TorchScaledRows(block_rows=30)])
        expect(model, lambda weight: coded(weight, codec)[2] if codec and weight.dim() > 1 else weight.clone())
        computes = {name: self.devices.index(module.device) for name, module in looking(model)}
        sizes = [sum(weight.nbytes + 512 for weight in block.parameters()) for block in model.blocks]
        room = max(sizes) + chance.choice([0, sum(sizes) // 3, sum(sizes)])
        share = chance.choice([0.0, 0.2])
        homes: dict[str, DeviceId] = {
            name: computes[name.rpartition(".")[0]] if chance.random() < share else chance.choice(["cpu", "disk"])
            for name, _ in model.named_parameters()
        }
        for name in homes:
            mixture, listed, _ = name.partition(".experts.")
            if listed:  # all experts of a mixture together
                homes[name] = next(home for other, home in homes.items() if other.startswith(mixture + listed))
        places = range(len(self.links))
        return Setup(
            model,
            homes.__getitem__,
            folder,
            example=torch.ones(SIZE // 4),
            execution=computes.__getitem__,
            rooms=dict.fromkeys(places, room),
            slots=dict.fromkeys(places, chance.choice([0, max(sizes) // 2, sum(sizes)])),
            unpacking=dict.fromkeys(places, chance.choice([0, ROOM // 10])) if codec else {},
            store=to_packed(codec) if codec else to_disk,
            open_link=lambda _devices, device: self.links[device],
        )

    def _offload(self) -> None:
        """Have activations go to the host over links of their own, beside that of the weights."""
        link = self.links[0]
        out, back = self._link(link), self._link(link)
        devices = self.setup.devices
        for store in (
            LateStore(devices, 0, out=out, back=back),
            LateDisk(devices, 0, self.folder, out=out, back=back),
        ):
            target, folder = ("disk", self.folder) if isinstance(store, LateDisk) else ("host", None)
            settings = devices.ledger(0), folder
            history_of(self.tag).stores[target, torch.device("cpu")] = settings, store

    def play(self) -> None:
        """Call the model in one of the ways, with other routes each time."""
        chance = self.chance
        way: Callable[[], None] = chance.choice([self._call, self._call, self._train, self._together])
        self.model.interrupted = 0.02 if way != self._together and not self.offloads else 0.0
        try:
            copy_context().run(way)
        except KeyboardInterrupt:
            return

    def _begin(self, seed: int) -> torch.Tensor:
        ROUTES.set(random.Random(seed))
        return self.devices[0].compute(SIZE).view(torch.float32)

    def _call(self) -> None:
        with self.chance.choice([torch.no_grad, torch.inference_mode])():
            self.model(self._begin(self.chance.randrange(2**31)))

    def _train(self) -> None:
        """Call it with gradients, once or twice, and go through the graphs in any order."""
        graphs = []
        for _ in range(self.chance.choice([1, 1, 2])):
            with self._offloaded(self.chance.choice(TARGETS)):
                graphs.append(self.model(self._begin(self.chance.randrange(2**31)).requires_grad_()))
        self.chance.shuffle(graphs)
        for graph in graphs:
            graph.backward(torch.ones_like(graph))

    def _offloaded(self, target: str) -> Any:
        if not self.offloads:
            return nullcontext()
        folder = self.folder if target == "disk" else None
        return CPUOffload(1.0, self.tag, target=target, folder=folder, devices=self.setup.devices)

    def _together(self) -> None:
        seeds = [self.chance.randrange(2**31) for _ in range(self.chance.randint(2, 4))]
        calls = [partial(copy_context().run, self._one_of_several, seed) for seed in seeds]
        self.setup.streamer.passes.go_together(calls, size=self.chance.randint(1, 3))

    def _one_of_several(self, seed: int) -> None:
        self.model(self._begin(seed))


def faults(seed: int, folder: Path) -> Sequence[str]:
    """Return what is wrong in the passes of the case ``seed``, once its accelerators are done."""
    chance = random.Random(seed)
    with ExitStack() as stack:
        with _MAKING:
            one = LateModel(chance, folder, stack)
        for _ in range(chance.randint(2, 5)):
            one.play()
    return [wrong for link in one.links for wrong in link.wrong]


@pytest.mark.parametrize("cases", in_ci(SHORT, of=[SHORT, LONG]))
def test_no_module_of_any_model_computes_with_other_bytes(cases: range, tmp_path: Path) -> None:
    assert [*faults_of_each(faults, cases, tmp_path)] == [[]] * len(cases), "by their places: the cases that fail"
