"""What each device will hold at its peak, and how long a token will take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import replace

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.probes import CHUNK_BYTES, PINNED_BYTES, bounce_buffers
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.allocator import allocator_bytes
from offstage.stages.plan.layout import Layout
from offstage.stages.plan.memory_needs import MemoryNeeds, cache_bytes, heap_bytes
from offstage.stages.plan.plan import SIMULATED, Plan
from offstage.stages.plan.traffic import PLAIN_STEP, Step, forecast
from offstage.stages.units import CPU, DISK, DeviceId

ByPart = dict[DeviceId, dict[str, int]]
"""The bytes of each device at its peak, by what they are for: those of its budget come first."""

ALLOCATOR = "allocator"
"""The part of an accelerator's peak that torch reserves there beside what is asked of it."""

NOMINAL_PROCESS: Mapping[DeviceId, int] = {CPU: PROCESS_BYTES}
"""What a process holds beside weights and request that nothing is known of."""


def predict(
    layout: Layout,
    plan: Plan,
    needs: MemoryNeeds,
    rates: Rates,
    *,
    step: Step = PLAIN_STEP,
    process_bytes: Mapping[DeviceId, int] = NOMINAL_PROCESS,
) -> Plan:
    """Return ``plan``, of ``layout``, with what is predicted: each device's peak by its parts, and a token's seconds.

    A token stands for a ``step`` of decoding. Of each device the process takes ``process_bytes`` for itself.
    """
    expected = forecast(layout, step, rates)
    ledgers = ledger(layout, needs, process_bytes=process_bytes, expands=plan.expandable)
    simulated = [device for device in ledgers if plan.devices[device].simulated is not None]
    ledgers[CPU] |= _held_for(simulated, ledgers, needs) if simulated else {}
    devices = {
        device: replace(
            one,
            ledger=ledgers.get(device, {}),
            transfer_bytes=expected.link_bytes.get(device, 0),
            used_bytes=expected.brought.resident.get(device, 0),
            rates=rates.apart.get(device, {}),
        )
        for device, one in plan.devices.items()
    }
    return replace(
        plan, devices=devices, forecast=expected.figures, rates=rates.shared, pass_tokens=step.routing.tokens
    )


def ledger(
    layout: Layout,
    needs: MemoryNeeds,
    *,
    process_bytes: Mapping[DeviceId, int] = NOMINAL_PROCESS,
    expands: bool = False,
) -> ByPart:
    """Return what each device holds at its peak beside a request that ``needs`` so much, by what it is for.

    What lies on disk is there without a part of a request. The process takes ``process_bytes`` of the host, and of an
    accelerator that computes; ``expands`` says whether segments of torch's allocator do.
    """
    main = layout.placement.main
    caches = cache_bytes(needs.caches, layout.block_device)
    computed = {line.computes for line in layout.lines}
    ledgers: ByPart = {}
    for device, room in layout.rooms.items():
        parts = ledgers[device] = {"weights": room.weights}
        if device == DISK:
            continue
        parts["reserve"] = room.reserve
        parts |= {"expert_cache": room.expert_cache} if device in layout.slots else {}
        parts |= {"dequantising": room.dequantising} if device in layout.unpacking else {}
        parts["cache"] = caches.get(device, 0)
        parts["activations"] = needs.activation_bytes if device in computed else 0
        if needs.learning_bytes:
            parts["learning"] = round(needs.learning_bytes * _computed_share(layout, device))
        if device == main and needs.assistant_bytes:
            parts["assistant"] = needs.assistant_bytes
        parts |= {"process": process_bytes[device]} if device in computed and process_bytes.get(device) else {}
        mine = [cache for cache in needs.caches if layout.block_device(cache.block) == device]
        if device == CPU:
            parts |= {"heap": unused} if (unused := heap_bytes(mine)) else {}
        else:
            activations = parts["activations"]
            parts[ALLOCATOR] = allocator_bytes(
                layout, device, caches=mine, activation_bytes=activations, expands=expands
            )
    host, staged, bounced = ledgers[CPU], _staged_bytes(layout), _bounced(layout)
    host["reserve"] = staged.pop(CPU, 0)
    host |= {"staging": min(sum(staged.values()), PINNED_BYTES)} if main != CPU else {}
    host |= {"staging": host.get("staging", 0) + bounced} if bounced else {}
    host["scratch"] = needs.scratch_bytes if CPU in computed else 0
    host |= {"dequantising": unpacking} if (unpacking := _unpacking_bytes(layout)) else {}
    host |= {"results": needs.result_bytes} if needs.result_bytes else {}
    host |= {"offloaded": needs.offloaded_bytes} if needs.offloaded_bytes else {}
    host["process"] = process_bytes[CPU] + needs.library_bytes
    return ledgers


def _staged_bytes(layout: Layout) -> dict[DeviceId, int]:
    """Return the host memory that streamed weights are read or unpacked into, by the device that computes them.

    What accelerators compute passes through on its way over their links, by way of the same few buffers; so does what
    they unpack, as it rests, if it is read.
    """
    through: Counter[DeviceId] = Counter()
    for line in layout.lines:
        if line.serving in ("direct", "packed"):
            on_device = layout.moved_bytes(line) is not None
            through[line.computes] += (
                0 if on_device and line.serving == "packed" else line.bytes if on_device else line.used
            )
    rooms = {device: layout.reserves.get(device, 0) for device in through}
    rooms[CPU] = layout.rooms[CPU].staging_bytes(is_main=layout.placement.main == CPU)
    return {device: min(count, rooms[device]) for device, count in through.items()}


def _computed_share(layout: Layout, device: DeviceId) -> float:
    """Return the share of the model's bytes that ``device`` computes with."""
    unique = [line for line in layout.lines if line.name == line.leader]
    return sum(line.used for line in unique if line.computes == device) / max(1, sum(line.used for line in unique))


def _bounced(layout: Layout) -> int:
    """Return the host memory that experts pass through on their way from storage to a slot, wherever that is.

    For an accelerator an expert's tensor that rests packed is unpacked there, whole where it must be; one that unpacks
    itself has it pass through as it rests, if it is read.
    """
    brought = [line for line in layout.lines if line.serving == "experts"]
    stored = any(line.home == DISK for line in brought)
    pools = layout.pools.values() if stored else ()
    chunks = sum(_bounce_bytes(min(CHUNK_BYTES, pool.unit_bytes)) for pool in pools)
    unpacked: dict[DeviceId, int] = {}
    for line in brought:
        if line.computes != CPU and line.at_rest:
            on_device = layout.moved_bytes(line) is not None
            size = (line.bytes if on_device else line.used) // layout.outline.experts[parent(line.name)].count
            size = 0 if on_device and line.home == CPU else size
            unpacked[line.computes] = max(unpacked.get(line.computes, 0), size)
    return max(chunks, sum(map(_bounce_bytes, unpacked.values())))


def _bounce_bytes(size: int) -> int:
    return bounce_buffers(size) * size if size else 0


def _unpacking_bytes(layout: Layout) -> int:
    """Return the host memory of the threads that unpack what is brought: what each reads into, and what it takes."""
    packed = layout.outline.packed
    by_host = (line for line in layout.lines if line.is_unpacked and layout.moved_bytes(line) is None)
    return max((packed[line.name].working_bytes for line in by_host), default=0)


def _held_for(simulated: Collection[DeviceId], ledgers: ByPart, needs: MemoryNeeds) -> dict[str, int]:
    """Return what the host holds for ``simulated`` accelerators, whose bytes really lie there.

    One of them computes at a time, on the host, so the widest moment of a forward counts once for all.
    """
    simulated_ledgers = [ledgers[device] for device in simulated]
    beside = sum(sum(parts.values()) - parts["activations"] - parts[ALLOCATOR] for parts in simulated_ledgers)
    computes = any(parts["activations"] for parts in simulated_ledgers) and not ledgers[CPU]["activations"]
    return {SIMULATED: beside + (needs.activation_bytes + needs.scratch_bytes if computes else 0)}
