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
from offstage.stages.plan.assembly import lying_bytes
from offstage.stages.plan.cache_ledger import block_caches, cache_bytes
from offstage.stages.plan.expert_slots import (
    SINGLE,
    ExpertTraffic,
    Routing,
    expert_traffic,
    host_calls,
    host_share,
    offstage_in,
    read_bytes,
)
from offstage.stages.plan.host_buffers import PINNED_BYTES, bounce_bytes
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.plan import SIMULATED, Plan
from offstage.stages.plan.request.geometry import Geometry, Request
from offstage.stages.plan.serving import is_streamed, is_unpacked, waits_on
from offstage.stages.plan.token_time import (
    ONE_TOKEN,
    Brought,
    HostShare,
    LayerOutput,
    expected_seconds,
    forwards_for_free,
    slowest,
    token_seconds,
)
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
    outline: Outline,
    plan: Plan,
    needs: Work,
    rates: Rates,
    *,
    routing: Routing = SINGLE,
    members: int = 1,
    pages_stay: bool = False,
    process_bytes: int = PROCESS_BYTES,
    output: LayerOutput = ONE_TOKEN,
    decodes: bool = True,
) -> Plan:
    """Return ``plan`` with what is predicted of it: each device's peak by its parts, and the seconds of a token.

    A token stands for a pass of decoding, whose tokens are routed as ``routing`` says; of ``members`` in lockstep each
    has one a pass, and what is streamed is shared out among them. Where ``pages_stay``, what is
    mapped is read from storage once, and is in memory for every token that follows. The host's process holds
    ``process_bytes`` of its own. A layer hands ``output`` to the next. A pass that ``decodes`` isn't the first one.
    """
    outline = replace(outline, unpacks=frozenset(plan.unpacking)) if plan.unpacking else outline
    offstage = offstage_in(outline, plan.serving, plan.execution)
    experts = expert_traffic(
        outline, plan.homes, offstage, slots=plan.slots, routing=routing, packed=plan.packed_on_host
    )
    needed = outline.without_first_pass if decodes else outline
    brought = _brought(needed, plan, experts, routing, pages_stay=pages_stay)
    used = _used_bytes(needed, plan, experts, routing)
    share = _host_share(outline, plan, output, routing)
    calls = host_calls(outline, plan.execution, routing)
    seconds = token_seconds(
        brought, used, rates=rates, members=members, reserves=plan.reserves, on_host=share, host_calls=calls
    )
    bound, _ = slowest(seconds)
    forecast: dict[str, float | int | str] = _token_bytes(brought, experts if offstage else None, members)
    if share is not None:
        told = {"host_read": share.read_bytes, "crossing": share.crossings * output.bytes}
        forecast |= {f"{name}_bytes_per_token": round(count) for name, count in told.items()}
        forecast["crossings_per_token"] = share.crossings
    forecast |= {"seconds_per_token": expected_seconds(seconds), "bound": bound}
    if brought.bytes:
        forecast["forwards_for_free"] = round(forwards_for_free(seconds, members), 2)
    if brought.at_rest.get(DISK):
        forecast["storage_bandwidth_bytes_per_second"] = rates.storage
    links = brought.links
    return replace(
        plan,
        predicted=_peaks(outline, plan, needs, process=process_bytes),
        forecast=forecast,
        link_bytes_per_token={device: round(links[device] / members) for device in in_tier_order(links)},
        used_bytes=used,
        rates=rates.shared,
        device_rates=rates.apart,
        pass_tokens=routing.tokens,
    )


def _token_bytes(brought: Brought, experts: ExpertTraffic | None, members: int) -> dict[str, float | int | str]:
    """Return the forecast of what is brought for a token of each of ``members``, and of the ``experts`` that wait."""
    found: dict[str, float | int | str] = {"streamed_bytes_per_token": round(brought.bytes / members)}
    if brought.unpacked:
        found["packed_bytes_per_token"] = round(brought.packed / members)
        found["unpacked_bytes_per_token"] = round(brought.unpacked / members)
    if brought.moved:
        found["device_unpacked_bytes_per_token"] = round(brought.unpacked_there / members)
        found["device_moved_bytes_per_token"] = round(brought.moved.total() / members)
    if experts is not None:
        found["expert_bytes_per_token"] = round(experts.brought.bytes / members)
        found |= {"expert_hit_rate": round(experts.hit_rate, 4), "expert_routing": experts.routing}
    return found


def _host_share(outline: Outline, plan: Plan, output: LayerOutput, routing: Routing) -> HostShare | None:
    """Return what the host computes of a token beside accelerators; null where it computes nothing, or all."""
    computing = {layer.name: plan.execution[parent(layer.tensors[0])] for layer in outline.layers}
    return host_share(outline, computing, output, routing) if plan.host_layers else None


def _brought(outline: Outline, plan: Plan, experts: ExpertTraffic, routing: Routing, *, pages_stay: bool) -> Brought:
    """Return what a pass brings: of experts what is expected, of all else that is streamed each use."""
    at_rest, used, saved = (
        Counter({device: round(count) for device, count in counts.items()})
        for counts in (experts.brought.at_rest, experts.brought.used, experts.brought.saved)
    )
    found = replace(experts.brought, at_rest=at_rest, used=used, saved=saved, runs=[])
    on_host = set(plan.host_layers)
    for layer in outline.layers:
        for name in layer.tensors:
            serving = plan.serving.get(name)
            if serving is None or not is_streamed(serving):
                continue
            share = routing.share(*outline.listed[name]) if name in outline.listed else 1
            waits = CPU if pages_stay and serving == "map" else waits_on(serving)
            packed = is_unpacked(outline, name, serving)
            size = round((outline.rest_sizes if packed else outline.sizes)[name] * share)
            unpacked = outline.sizes[name] * share if packed else None
            computes, ahead = plan.execution[parent(name)], name not in outline.listed
            moved = outline.moved_bytes(name, computes) if packed else None
            moved_there = None if moved is None else moved * share
            found.add(waits, size, computes=computes, unpacked=unpacked, moved=moved_there, tensors=share, ahead=ahead)
        if layer.name in on_host:
            found.compute_on_host(read_bytes(outline, layer.tensors, routing))
    return found


def _used_bytes(outline: Outline, plan: Plan, experts: ExpertTraffic, routing: Routing) -> dict[DeviceId, int]:
    """Return the bytes that a token reads on each device which computes with what it holds; of experts those it uses.

    What waits on the host for an accelerator isn't among them.
    """
    lying = lying_bytes(outline, plan)
    on_host = {outline.skeleton.leader(name) for name in outline.sizes if plan.execution[parent(name)] == CPU}
    used = {device: 0 for device in plan.resident_bytes if device != DISK}
    for spec in outline.skeleton.unique:
        home, unused = plan.homes[spec.name], 0.0
        if spec.name in outline.listed:
            unused = 1 - routing.share(*outline.listed[spec.name])
        read = spec.name not in outline.expert_tensors and spec.name not in outline.tables
        if home in used and read and (home != CPU or spec.name in on_host):
            used[home] += lying[spec.name] - round(lying[spec.name] * unused)
    for there in (experts.resident, experts.found):
        for device, count in there.items():
            if device in used and (device != CPU or on_host):
                used[device] += round(count)
    return used


def _peaks(outline: Outline, plan: Plan, needs: Work, *, process: int) -> dict[DeviceId, dict[str, int]]:
    """Return the bytes of each device at its peak, by what they are for; the host's own process takes ``process``."""
    staged = _staged_bytes(outline, plan)
    caches = cache_bytes(needs.caches, partial(_computes, outline, plan))
    bounced = _bounced(outline, plan)
    peaks: dict[DeviceId, dict[str, int]] = {}
    for device in in_tier_order([*plan.resident_bytes, plan.main_device, CPU]):
        held = {"weights": plan.resident_bytes.get(device, 0)}
        if device != DISK:
            held["reserve"] = plan.reserves.get(device, 0)
            held |= {"slots": plan.slots[device]} if device in plan.slots else {}
            held |= {"unpacking": plan.unpacking[device]} if device in plan.unpacking else {}
            held["cache"] = caches.get(device, 0)
            held["activations"] = needs.activation_bytes if device in plan.execution.values() else 0
            if needs.learning_bytes:
                held["learning"] = round(needs.learning_bytes * _computed_share(outline, plan, device))
        if device == plan.main_device and needs.assistant_bytes:
            held["assistant"] = needs.assistant_bytes
        if device == CPU:
            held["reserve"] = staged.pop(CPU, 0)
            held |= {"staging": min(sum(staged.values()), PINNED_BYTES)} if plan.main_device != CPU else {}
            held |= {"staging": held.get("staging", 0) + bounced} if bounced else {}
            held["scratch"] = needs.scratch_bytes if CPU in plan.execution.values() else 0
            held |= {"unpacking": unpacking} if (unpacking := _unpacking_bytes(outline, plan)) else {}
            held |= {"results": needs.result_bytes} if needs.result_bytes else {}
            held |= {"offloaded": needs.offloaded_bytes} if needs.offloaded_bytes else {}
            held["process"] = process + needs.library_bytes
        peaks[device] = held
    return _with_simulated(peaks, plan, needs)


def _staged_bytes(outline: Outline, plan: Plan) -> dict[DeviceId, int]:
    """Return the host memory that streamed weights are read or unpacked into, by the device that computes them.

    What accelerators compute passes through on its way over their links, by way of the same few buffers; so does what
    they unpack, as it rests, if it is read.
    """
    through: Counter[DeviceId] = Counter()
    for name, serving in plan.serving.items():
        if serving in ("direct", "packed"):
            device = plan.execution[parent(name)]
            there = outline.moved_bytes(name, device) is not None
            size = (outline.rest_sizes if there else outline.sizes)[name]
            through[device] += 0 if there and serving == "packed" else size
    rooms = {device: plan.reserves.get(device, 0) for device in through} | {CPU: plan.staging_bytes}
    return {device: min(count, rooms[device]) for device, count in through.items()}


def _computed_share(outline: Outline, plan: Plan, device: DeviceId) -> float:
    """Return the share of the model's bytes that ``device`` computes with."""
    computed: Counter[DeviceId] = Counter()
    for tensor in outline.skeleton.unique:
        computed[plan.execution[parent(tensor.name)]] += tensor.bytes
    return computed[device] / max(1, computed.total())


def _bounced(outline: Outline, plan: Plan) -> int:
    """Return the host memory that experts pass through on their way from storage to a slot, wherever that is.

    For an accelerator an expert's tensor that rests packed is unpacked there, whole where it must be; one that unpacks
    itself has it pass through as it rests, if it is read.
    """
    brought = [name for name, serving in plan.serving.items() if serving == "experts"]
    stored = any(plan.homes[name] == DISK for name in brought)
    chunks = sum(bounce_bytes(min(CHUNK_BYTES, pool.unit_bytes)) for pool in plan.pools.values()) if stored else 0
    unpacked: dict[DeviceId, int] = {}
    on_host = set(plan.packed_on_host)
    for name in brought:
        device = plan.execution[parent(name)]
        if device != CPU and name in outline.packed and (plan.homes[name] == DISK or name in on_host):
            there = outline.moved_bytes(name, device) is not None
            size = (outline.rest_sizes if there else outline.sizes)[name] // outline.experts[parent(name)].count
            size = 0 if there and name in on_host else size
            unpacked[device] = max(unpacked.get(device, 0), size)
    return max(chunks, sum(map(bounce_bytes, unpacked.values())))


def _unpacking_bytes(outline: Outline, plan: Plan) -> int:
    """Return the host memory of the threads that unpack what is brought: what each reads into, and what it takes."""
    on_host = set(plan.packed_on_host)
    unpacked = (
        outline.packed[name].working_bytes
        for name, serving in plan.serving.items()
        if name in outline.packed
        and (plan.homes[name] == DISK or name in on_host)
        and outline.moved_bytes(name, plan.execution[parent(name)]) is None
    )
    return max(unpacked, default=0)


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


def _computes(outline: Outline, plan: Plan, name: str) -> DeviceId:
    inside = (plan.execution.get(tensor.rpartition(".")[0]) for tensor in outline.below(name))
    return next((device for device in inside if device is not None), plan.main_device)
