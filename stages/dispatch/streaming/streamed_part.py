"""What streams together: the tensors of one module, or of several in one, as far as they are bound for each call."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import torch
from torch import nn

from offstage.stages.checkpoints.packed import PackedTensor, rows_of
from offstage.stages.dispatch.dispatch_plan import DispatchPlan, ModulePlan
from offstage.stages.dispatch.streaming.mapped_weights import MappedFile, MappedWeights
from offstage.stages.dispatch.streaming.packed_table import PackedTable, can_be_looked_up
from offstage.stages.dispatch.streaming.places import TensorPlace, have_wait_for, place_of
from offstage.stages.dispatch.streaming.waiting_tensor import rebuild
from offstage.stages.dispatch.streaming.weight_cache import WeightCache
from offstage.stages.dispatch.transfer.part_layout import Source
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.devices import Devices
from offstage.stages.machine.row_products import row_ranges
from offstage.stages.plan.serving import Serving
from offstage.stages.shard_load.sources import DiskWeights
from offstage.stages.units import CPU, DeviceId, Position


@dataclass(slots=True)
class StreamedPart:
    """Streamed tensors that calls of ``callers`` use, most often of the module that holds them: where they compute (the
    host, or a device apart), how many calls use them.

    ``cache`` has them, by the ``number`` that it knows the part by. Those that aren't ``brought`` lie where
    they compute, in memory or in the maps of ``files``, and are only bound there for each use, which counts as
    ``streamed_bytes``. ``position`` is when they come in a pass; ``expected`` are calls in lockstep that are about to
    use them, until when they stay. A block of ``rows`` of the tensor ``whole`` is bound in no module: who multiplies by
    it asks for it.
    """

    name: str
    places: list[TensorPlace]
    computes: DeviceId
    callers: tuple[str, ...]
    brought: bool = True
    files: Sequence[MappedFile] = ()
    streamed_bytes: int = 0
    cache: WeightCache | None = None
    number: int = 0
    position: Position = (0,)
    users: int = 0
    expected: int = 0
    is_bound: bool = False
    began: float = 0.0
    whole: TensorPlace | None = None
    rows: range = range(0)

    @property
    def module(self) -> str:
        """The name of the module that holds the tensors."""
        return self.name if self.whole is None else parent(self.whole.name)

    @property
    def bound(self) -> list[torch.Tensor]:
        """The tensors of the places, while they are bound."""
        return [place.bound for place in self.places if place.bound is not None]

    @property
    def is_shared(self) -> bool:
        """Whether calls in lockstep use it one after another: what lies in memory anyway needs no turns."""
        return self.brought or self.streamed_bytes > 0

    @property
    def sources(self) -> list[Source]:
        """Where the tensors wait."""
        sources = [place.at if place.host is None else place.host for place in self.places]
        return [source for source in sources if source is not None]

    def on_host(self) -> list[torch.Tensor]:
        """Return the tensors where they lie in memory, or in maps of what the files were."""
        for file in self.files:
            file.check()
        return [place.host.detach() for place in self.places if place.host is not None]

    def bind(self, tensors: Sequence[torch.Tensor]) -> None:
        """Put the ``tensors`` in their places."""
        for place, tensor in zip(self.places, tensors, strict=True):
            place.bind_data(tensor)
        self.began, self.is_bound = time.perf_counter(), True

    def expect(self, users: int) -> None:
        """Stay bound until so many more calls have used it."""
        self.expected += users

    def unbind(self) -> None:
        """Put back what waits."""
        self.is_bound = False
        for place in self.places:
            place.leave()


def streamed_parts(
    model: nn.Module, plan: DispatchPlan, stored: DiskWeights, *, devices: Devices, stack: ExitStack
) -> Iterator[StreamedPart]:
    """Yield the parts that are bound for each use, those that are used in maps of their shards mapped until ``stack``
    is closed. What several modules have brought together is yielded last.
    """
    maps = MappedWeights(stack)
    groups: dict[str, StreamedPart] = {}
    for name, part in plan.parts.items():
        apart = devices.is_apart(part.execution)
        places = _places(model, part, stored, apart=apart, stack=stack)
        computes = part.execution if apart else CPU
        brought = places["copy"] + places["direct"] if apart else places["direct"]
        around = plan.together.get(name, "")
        at_once = [place for place in brought if place.name not in part.block_rows]
        if at_once and name in plan.together:
            groups.setdefault(around, StreamedPart(around, [], computes, (around,))).places += at_once
        elif at_once:
            yield StreamedPart(name, at_once, computes, part.callers)
        for whole in (place for place in brought if place.name in part.block_rows):
            yield from _row_parts(whole, part.block_rows[whole.name], computes)
        if not apart and places["copy"]:
            yield StreamedPart(name, places["copy"], CPU, part.callers, brought=False)
        for looked_up, mapped in ((False, places["map"]), (True, places["rows"])):
            if mapped:
                files = maps.use(mapped, looked_up=looked_up)
                count = 0 if looked_up else sum(place.at.bytes for place in mapped if place.at is not None)
                yield StreamedPart(name, mapped, CPU, part.callers, brought=False, files=files, streamed_bytes=count)
    yield from groups.values()


def _row_parts(whole: TensorPlace, rows: int, computes: DeviceId) -> Iterator[StreamedPart]:
    """Yield the blocks of so many ``rows`` that ``whole`` is brought in."""
    for block in row_ranges(len(whole.before), rows):
        host = None if whole.host is None else whole.host.detach()[block.start : block.stop]
        # A parameter as the whole is: kernels are chosen by whether a weight requires gradients, too.
        shape = (len(block), *whole.before.shape[1:])
        waiting = rebuild(whole.before, torch.empty(shape, dtype=whole.before.dtype, device="meta"))
        at = None if whole.at is None else rows_of(whole.at, block.start, block.stop)
        place = TensorPlace(whole.name, {"block": waiting}, "block", waiting, host, at)
        name = f"{whole.name}[{block.start}:{block.stop}]"
        yield StreamedPart(name, [place], computes, (whole.name,), whole=whole, rows=block)


def _places(
    model: nn.Module, part: ModulePlan, stored: DiskWeights, *, apart: bool, stack: ExitStack
) -> Mapping[Serving, list[TensorPlace]]:
    """Return the places of what is bound for each use, by how it is served; packed tables are looked up from now on."""
    places: dict[Serving, list[TensorPlace]] = {"copy": [], "direct": [], "map": [], "rows": []}
    for tensor, serving in part.serving.items():
        at = stored.extents.get(tensor)
        # A buffer that this checkpoint lacks is where the constructor computed it, whatever the plan says.
        if serving == "experts" or not (apart or serving in ("copy", "packed") or at is not None):
            continue
        place = place_of(model, tensor, has_data=at is None, at=at)
        if serving == "rows" and isinstance(at, PackedTensor) and can_be_looked_up(at):
            have_wait_for(place, stored, torch.device("cpu"), PackedTable, at)
            stack.callback(place.come_home)
        elif isinstance(at, PackedTensor):  # it is brought: in a map it can't be used
            places["direct"].append(place)
        else:  # where loading found that it doesn't rest packed, it lies on the host as it is used
            places["copy" if serving == "packed" else serving].append(place)
    return places
