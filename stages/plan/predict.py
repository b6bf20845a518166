"""What each device will hold at its peak, and how long a token will take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from operator import mul

from offstage.stages.empty_init.skeleton import Moment, parent
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.kernels import NOMINAL, Kernels
from offstage.stages.machine.probes import CHUNK_BYTES
from offstage.stages.machine.rates import Rates
from offstage.stages.plan.cache_ledger import block_caches, cache_bytes
from offstage.stages.plan.host_buffers import PINNED_BYTES, bounce_bytes
from offstage.stages.plan.layout import Layout, Room
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import SIMULATED, Plan
from offstage.stages.plan.request.geometry import Geometry, Request
from offstage.stages.plan.traffic import PLAIN_STEP, Step, forecast
from offstage.stages.plan.work import Work
from offstage.stages.units import CPU, DISK, DTYPE_BYTES, DeviceId, in_tier_order


def work(
    outline: Outline,
    geometry: Geometry,
    request: Request,
    kernels: Kernels = NOMINAL,
    *,
    blocks: Mapping[int, int] | None = None,
) -> Work:
    """Return what ``request`` takes beside weights: the cache of all layers, and the widest moment of a forward.

    The moments of the prompt's forward are the rehearsal's, which asks for the logits of one position of a sequence.
    Beside them stand the logits that the request asks for, and what decoding takes with a whole cache: a layer's keys
    and values are copied as they grow, and repeated for every head. ``kernels`` says what those of the host take.
    ``blocks`` has the bytes of weights that are multiplied by blocks of rows, and those of a block.
    """
    dtype = compute_dtype(outline)
    width = int(DTYPE_BYTES[dtype])
    caches = block_caches(outline, geometry, request, width=width)
    layers = {"": max(1, geometry.layers)}  # of what isn't known by blocks
    copied = max((one.finished // layers.get(one.block, 1) for one in caches), default=0) // request.members
    grown = copied + request.tokens * max(2 * geometry.hidden, geometry.expanded) * width
    moments = _moments(outline, geometry, request, width=width)
    found = [moment.at(request.sequences, request.prompt, kernels, blocks=blocks) for moment in moments]
    if not found:
        tokens = request.sequences * max(request.prompt, request.length)
        found = [
            (tokens * (6 * geometry.hidden + 2 * geometry.intermediate) * width, 0),
            (0, _scratch_bytes(outline, kernels)),
        ]
    found += [moment.at(1, 1, kernels) for moment in request.moments]
    found += _logits(geometry, request, width=width, head=kernels.get(f"mm {dtype}", ()), blocks=blocks or {})
    activations = max(grown, *(held for held, _ in found))
    scratch = max(map(sum, found)) - activations
    beside = request.members * request.sequences * request.kept * geometry.vocabulary * 4
    beside += request.judged * copied // request.sequences  # each has a block's keys and values in hand
    beside += (request.members - 1) * _parked_bytes(outline, request, at_most=activations)
    return Work(activations + beside, max(0, scratch), request.result_bytes, request.assistant_bytes, caches=caches)


def _moments(outline: Outline, geometry: Geometry, request: Request, *, width: int) -> list[Moment]:
    """Return the moments of the rehearsal's forward that one of ``request`` has too.

    Where one forward is all, and gives the logits of all positions, none has a head that is given the last one alone.
    """
    moments, head = list(outline.skeleton.moments), geometry.hidden * geometry.vocabulary * width
    if request.length or request.positions == 1:
        return moments
    return [one for one in moments if not (one.kernel.startswith("strided ") and one.right_bytes(1, 1) == head)]


def _parked_bytes(outline: Outline, request: Request, *, at_most: int) -> int:
    """Return the most that a call in lockstep keeps of a prompt's forward while it waits for a product's weight."""
    products = [moment for moment in outline.skeleton.moments if moment.kernel.startswith("mm ")]
    return max((moment.before(request.sequences, request.prompt) for moment in products), default=at_most)


def _logits(
    geometry: Geometry, request: Request, *, width: int, head: tuple[float, ...], blocks: Mapping[int, int]
) -> Iterator[tuple[int, int]]:
    """Yield the activations and the scratch of the moments that make ``request``'s logits and then take their softmax.

    They are made in the model's dtype, of ``width`` bytes, by a product whose kernel takes the factors of ``head``
    beside, of as much of the weight as ``blocks`` says; softmax has those that it takes at once twice in float32.
    """
    rows = request.sequences * request.positions
    hidden, logits = rows * geometry.hidden * width, rows * geometry.vocabulary * width
    at_once = rows if request.normalised is None else min(rows, request.normalised)
    if request.positions > 1:  # of one position of each the rehearsal has the product
        weight = geometry.hidden * geometry.vocabulary * width
        block = blocks.get(weight, weight)
        part = logits * block // max(1, weight)
        beside = round(sum(map(mul, head, (hidden, block, part))))
        yield 2 * hidden + logits + (part if block < weight else 0), beside
    yield logits + at_once * geometry.vocabulary * 2 * 4, 0


def _scratch_bytes(outline: Outline, kernels: Kernels) -> int:
    """Return the most that the host's kernels copy of one matrix for a product with it.

    It stands for what a rehearsal would have shown. Of stacked matrices, such as a mixture's experts, one is copied at
    a time.
    """
    matrices = (
        tensor
        for tensor in outline.skeleton.unique
        if tensor.bytes and len(tensor.shape) > 1 and tensor.name not in outline.lookups
    )
    copied = (
        tensor.bytes // math.prod(tensor.shape[:-2]) * kernels[kernel][1]
        for tensor in matrices
        for kernel in (f"mm {tensor.dtype}", f"strided bmm {tensor.dtype}")
        if kernel in kernels
    )
    return round(max(copied, default=0))


def compute_dtype(outline: Outline) -> str:
    """Return the floating dtype that most of the model's bytes have."""
    count: Counter[str] = Counter()
    for tensor in outline.skeleton.unique:
        if tensor.dtype.startswith(("float", "bfloat")):
            count[tensor.dtype] += tensor.bytes
    return max(count, key=lambda dtype: count[dtype], default="float32")


def predict(
    layout: Layout,
    plan: Plan,
    needs: Work,
    rates: Rates,
    *,
    step: Step = PLAIN_STEP,
    process_bytes: int = PROCESS_BYTES,
) -> Plan:
    """Return ``plan``, of ``layout``, with what is predicted: each device's peak by its parts, and a token's seconds.

    A token stands for a ``step`` of decoding. The host's process holds ``process_bytes`` of its own.
    """
    expected = forecast(layout, step, rates)
    return replace(
        plan,
        predicted=_peaks(layout, plan, needs, process=process_bytes),
        forecast=expected.figures,
        link_bytes_per_token=expected.link_bytes,
        used_bytes=expected.used,
        rates=rates.shared,
        device_rates=rates.apart,
        pass_tokens=step.routing.tokens,
    )


def _peaks(layout: Layout, plan: Plan, needs: Work, *, process: int) -> dict[DeviceId, dict[str, int]]:
    """Return the bytes of each device at its peak, by what they are for; the host's own process takes ``process``."""
    main = layout.placement.main
    staged, bounced = _staged_bytes(layout), _bounced(layout)
    caches = cache_bytes(needs.caches, partial(_computes, layout))
    computed = {line.computes for line in layout.lines}
    peaks: dict[DeviceId, dict[str, int]] = {}
    for device in in_tier_order([*layout.rooms, main, CPU]):
        room = layout.rooms.get(device, Room(0, 0))
        held = {"weights": room.weights}
        if device != DISK:
            held["reserve"] = layout.reserves.get(device, 0)
            held |= {"slots": room.slots} if device in layout.slots else {}
            held |= {"unpacking": room.unpacking} if device in layout.unpacking else {}
            held["cache"] = caches.get(device, 0)
            held["activations"] = needs.activation_bytes if device in computed else 0
            if needs.learning_bytes:
                held["learning"] = round(needs.learning_bytes * _computed_share(layout, device))
        if device == main and needs.assistant_bytes:
            held["assistant"] = needs.assistant_bytes
        if device == CPU:
            held["reserve"] = staged.pop(CPU, 0)
            held |= {"staging": min(sum(staged.values()), PINNED_BYTES)} if main != CPU else {}
            held |= {"staging": held.get("staging", 0) + bounced} if bounced else {}
            held["scratch"] = needs.scratch_bytes if CPU in computed else 0
            held |= {"unpacking": unpacking} if (unpacking := _unpacking_bytes(layout)) else {}
            held |= {"results": needs.result_bytes} if needs.result_bytes else {}
            held |= {"offloaded": needs.offloaded_bytes} if needs.offloaded_bytes else {}
            held["process"] = process + needs.library_bytes
        peaks[device] = held
    return _with_simulated(peaks, plan, needs)


def _staged_bytes(layout: Layout) -> dict[DeviceId, int]:
    """Return the host memory that streamed weights are read or unpacked into, by the device that computes them.

    What accelerators compute passes through on its way over their links, by way of the same few buffers; so does what
    they unpack, as it rests, if it is read.
    """
    through: Counter[DeviceId] = Counter()
    for line in layout.lines:
        if line.serving in ("direct", "packed"):
            there = layout.moved_bytes(line) is not None
            through[line.computes] += 0 if there and line.serving == "packed" else line.bytes if there else line.used
    rooms = {device: layout.reserves.get(device, 0) for device in through} | {CPU: layout.staging_bytes}
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
    chunks = sum(bounce_bytes(min(CHUNK_BYTES, pool.unit_bytes)) for pool in pools)
    unpacked: dict[DeviceId, int] = {}
    for line in brought:
        if line.computes != CPU and line.at_rest:
            there = layout.moved_bytes(line) is not None
            size = (line.bytes if there else line.used) // layout.outline.experts[parent(line.name)].count
            size = 0 if there and line.home == CPU else size
            unpacked[line.computes] = max(unpacked.get(line.computes, 0), size)
    return max(chunks, sum(map(bounce_bytes, unpacked.values())))


def _unpacking_bytes(layout: Layout) -> int:
    """Return the host memory of the threads that unpack what is brought: what each reads into, and what it takes."""
    packed = layout.outline.packed
    by_host = (line for line in layout.lines if line.is_unpacked and layout.moved_bytes(line) is None)
    return max((packed[line.name].working_bytes for line in by_host), default=0)


def _with_simulated(peaks: dict[DeviceId, dict[str, int]], plan: Plan, needs: Work) -> dict[DeviceId, dict[str, int]]:
    """Return ``peaks``; the host's with what simulated accelerators hold, which really lies there.

    One of them computes at a time, on the host, so the widest moment of a forward counts once for all.
    """
    there = [held for device, held in peaks.items() if device in plan.ledgers]
    if there:
        held = sum(sum(parts.values()) - parts["activations"] for parts in there)
        computes = any(parts["activations"] for parts in there) and not peaks[CPU]["activations"]
        peaks[CPU][SIMULATED] = held + (needs.activation_bytes + needs.scratch_bytes if computes else 0)
    return peaks


def _computes(layout: Layout, name: str) -> DeviceId:
    inside = (layout.by_name[tensor].computes for tensor in layout.outline.below(name))
    return next(inside, layout.placement.main)
