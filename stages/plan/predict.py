"""What each device will hold at its peak, and how long a token will take."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, astuple, dataclass, replace
from operator import mul

from stages.empty_init.skeleton import parent
from stages.machine.host_memory import PROCESS_BYTES
from stages.machine.kernels import NOMINAL, Kernels
from stages.machine.probes import CHUNK_BYTES, READERS
from stages.machine.rates import Rates
from stages.plan.assembly import lying_bytes
from stages.plan.expert_slots import SINGLE, ExpertTraffic, Routing, expert_traffic, offstage_in
from stages.plan.outline import Outline
from stages.plan.plan import SIMULATED, Plan
from stages.plan.request.geometry import Geometry, Request
from stages.plan.serving import is_streamed, is_unpacked, waits_on
from stages.plan.token_time import HOST, UNPACKING, Brought, slowest, token_seconds
from stages.units import CPU, DISK, DTYPE_BYTES, DeviceId, in_tier_order

PINNED_BYTES = 16 * 2**20
"""The host memory that weights pass through on their way from storage to an accelerator."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request takes on the device that computes a layer, in bytes: keys and values, and activations.

    ``scratch_bytes`` are what the host's kernels take beside them, ``result_bytes`` what the host keeps to the end,
    and ``assistant_bytes`` what a second model takes on the main device. ``library_bytes`` are those of libraries that
    the host's process has for this model alone. ``learning_bytes`` are what a training keeps from step to step of the
    weights that learn; ``offloaded_bytes`` of an accelerator's activations wait on the host.
    """

    cache_bytes: int
    activation_bytes: int
    scratch_bytes: int = 0
    result_bytes: int = 0
    assistant_bytes: int = 0
    library_bytes: int = 0
    learning_bytes: int = 0
    offloaded_bytes: int = 0

    @property
    def bytes(self) -> int:
        """All of it."""
        return sum(astuple(self))


def most(works: Iterable[Work]) -> Work:
    """Return what the one of ``works`` takes that takes the most, of each part."""
    parts = zip(*(astuple(one) for one in works), strict=True)
    return Work(*map(max, parts))


def work(outline: Outline, geometry: Geometry, request: Request, kernels: Kernels = NOMINAL) -> Work:
    """Return what ``request`` takes beside weights: the cache of all layers, and the widest moment of a forward.

    The moments of the prompt's forward are the rehearsal's, which asks for the logits of one position of a sequence.
    Beside them stand the logits that the request asks for, and what decoding takes with a whole cache: a layer's keys
    and values are copied as they grow, and repeated for every head. ``kernels`` says what those of the host take.
    """
    dtype = compute_dtype(outline)
    width = int(DTYPE_BYTES[dtype])
    cache = request.members * geometry.layers * geometry.cached * request.tokens * width
    grown = request.tokens * (geometry.cached + 2 * geometry.hidden) * width
    found = [moment.at(request.sequences, request.prompt, kernels) for moment in outline.skeleton.moments]
    if not found:
        tokens = request.sequences * max(request.prompt, request.length)
        found = [
            (tokens * (6 * geometry.hidden + 2 * geometry.intermediate) * width, 0),
            (0, _scratch_bytes(outline, kernels)),
        ]
    found += [moment.at(1, 1, kernels) for moment in request.moments]
    found += _logits(geometry, request, width=width, head=kernels.get(f"mm {dtype}", ()))
    activations = max(grown, *(held for held, _ in found))
    scratch = max(map(sum, found)) - activations
    beside = request.members * request.sequences * request.kept * geometry.vocabulary * 4
    beside += request.judged * request.length * geometry.cached * width  # each has a layer's keys and values in hand
    beside += (request.members - 1) * _parked_bytes(outline, request, at_most=activations)
    return Work(cache, activations + beside, max(0, scratch), request.result_bytes, request.assistant_bytes)


def _parked_bytes(outline: Outline, request: Request, *, at_most: int) -> int:
    """Return the most that a call in lockstep keeps of a prompt's forward while it waits for a product's weight."""
    products = [moment for moment in outline.skeleton.moments if moment.kernel.startswith("mm ")]
    return max((moment.before(request.sequences, request.prompt) for moment in products), default=at_most)


def _logits(geometry: Geometry, request: Request, *, width: int, head: tuple[float, ...]) -> Iterator[tuple[int, int]]:
    """Yield the activations and the scratch of the moments that make ``request``'s logits and then take their softmax.

    They are made in the model's dtype, of ``width`` bytes, by a product whose kernel takes the factors of ``head``
    beside; softmax has those that it takes at once twice in float32.
    """
    rows = request.sequences * request.positions
    hidden, logits = rows * geometry.hidden * width, rows * geometry.vocabulary * width
    at_once = rows if request.normalised is None else min(rows, request.normalised)
    if request.positions > 1:  # of one position of each the rehearsal has the product
        weight = geometry.hidden * geometry.vocabulary * width
        yield 2 * hidden + logits, round(sum(map(mul, head, (hidden, weight, logits))))
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
) -> Plan:
    """Return ``plan`` with what is predicted of it: each device's peak by its parts, and the seconds of a token.

    A token stands for a pass of decoding, whose tokens are routed as ``routing`` says; of ``members`` in lockstep each
    has one a pass, and what is streamed is shared out among them. Where ``pages_stay``, what is
    mapped is read from storage once, and is in memory for every token that follows. The host's process holds
    ``process_bytes`` of its own.
    """
    offstage = offstage_in(outline, plan.serving, plan.execution)
    experts = expert_traffic(
        outline, plan.homes, offstage, slots=plan.slots, routing=routing, packed=plan.packed_on_host
    )
    brought = _brought(outline, plan, experts, routing, pages_stay=pages_stay)
    used = _used_bytes(outline, plan, experts, routing)
    seconds = token_seconds(brought, used, main=plan.main_device, rates=rates, members=members)
    bound, slowest_seconds = slowest(seconds)
    forecast: dict[str, float | int | str] = {"streamed_bytes_per_token": round(brought.bytes / members)}
    if brought.unpacked:
        forecast["packed_bytes_per_token"] = round(brought.packed / members)
        forecast["unpacked_bytes_per_token"] = round(brought.unpacked / members)
    if offstage:
        forecast["expert_bytes_per_token"] = round(experts.brought.bytes / members)
        forecast["expert_hit_rate"] = round(experts.hit_rate, 4)
    forecast |= {"seconds_per_token": slowest_seconds, "bound": bound}
    if brought.bytes:
        forecast["forwards_for_free"] = round(_carried(seconds, members), 2)
    if brought.at_rest.get(DISK):
        forecast["storage_bandwidth_bytes_per_second"] = rates.storage
    peaks = _peaks(outline, plan, needs, process=process_bytes)
    return replace(
        plan, predicted=peaks, forecast=forecast, used_bytes=used, rates=asdict(rates), pass_tokens=routing.tokens
    )


def _brought(outline: Outline, plan: Plan, experts: ExpertTraffic, routing: Routing, *, pages_stay: bool) -> Brought:
    """Return what a pass brings: of experts what is expected, of all else that is streamed each use."""
    whole = Counter({device: round(count) for device, count in experts.brought.at_rest.items()})
    found = Brought(whole, experts.brought.packed, experts.brought.unpacked)
    for name, serving in plan.serving.items():
        if is_streamed(serving):
            share = routing.share(*outline.listed[name]) if name in outline.listed else 1
            waits = CPU if pages_stay and serving == "map" else waits_on(serving)
            packed = is_unpacked(outline, name, serving)
            size = (outline.rest_sizes if packed else outline.sizes)[name]
            found.add(waits, round(size * share), unpacked=outline.sizes[name] * share if packed else None)
    return found


def _carried(seconds: Mapping[str, float], members: int) -> float:
    """Return how many forwards of one token compute while the weights for a pass are brought.

    ``seconds`` are a token's, of which a pass has ``members``.
    """
    computing, waiting = max(seconds[HOST], seconds["device memory"]), max(seconds["storage"], seconds["link"])
    if seconds[HOST]:  # the cores that compute unpack too
        waiting = max(0.0, waiting - seconds[UNPACKING])
    return members * max(waiting, 0 if seconds[HOST] else seconds[UNPACKING]) / computing if computing else 0.0


def _used_bytes(outline: Outline, plan: Plan, experts: ExpertTraffic, routing: Routing) -> dict[DeviceId, int]:
    """Return the bytes that a token reads of what each device holds: all weights, but only those experts it uses."""
    used, lying = Counter(plan.resident_bytes), lying_bytes(outline, plan)
    for name in outline.expert_tensors:
        used[plan.homes[name]] -= lying[name]
    for name, experts_of in outline.listed.items():
        used[plan.homes[name]] -= round(lying[name] * (1 - routing.share(*experts_of)))
    for there in (experts.resident, experts.found):
        used.update({device: round(count) for device, count in there.items()})
    return dict(used)


def _peaks(outline: Outline, plan: Plan, needs: Work, *, process: int) -> dict[DeviceId, dict[str, int]]:
    """Return the bytes of each device at its peak, by what they are for; the host's own process takes ``process``."""
    through = sum(outline.sizes[name] for name, serving in plan.serving.items() if serving in ("direct", "packed"))
    staging = min(plan.staging_bytes, through)
    layers = [layer.name for layer in outline.layers if layer.name in outline.blocks] or [""]
    computing = [_computes(outline, plan, name) for name in layers]
    bounced = _bounced(outline, plan)
    peaks: dict[DeviceId, dict[str, int]] = {}
    for device in in_tier_order([*plan.resident_bytes, plan.main_device, CPU]):
        held = {"weights": plan.resident_bytes.get(device, 0)}
        if device != DISK:
            held["reserve"] = plan.reserve_bytes if device == plan.main_device else 0
            held |= {"slots": plan.slots[device]} if device in plan.slots else {}
            held["cache"] = needs.cache_bytes * computing.count(device) // len(computing)
            held["activations"] = needs.activation_bytes if device in plan.execution.values() else 0
            if needs.learning_bytes:
                held["learning"] = round(needs.learning_bytes * _computed_share(outline, plan, device))
        if device == plan.main_device and needs.assistant_bytes:
            held["assistant"] = needs.assistant_bytes
        if device == CPU:
            held |= {"reserve": staging} if plan.main_device == CPU else {"staging": min(staging, PINNED_BYTES)}
            held |= {"staging": held.get("staging", 0) + bounced} if bounced else {}
            held["scratch"] = needs.scratch_bytes if CPU in plan.execution.values() else 0
            held |= {"unpacking": unpacking} if (unpacking := _unpacking_bytes(outline, plan)) else {}
            held |= {"results": needs.result_bytes} if needs.result_bytes else {}
            held |= {"offloaded": needs.offloaded_bytes} if needs.offloaded_bytes else {}
            held["process"] = process + needs.library_bytes
        peaks[device] = held
    return _with_simulated(peaks, plan, needs)


def _computed_share(outline: Outline, plan: Plan, device: DeviceId) -> float:
    """Return the share of the model's bytes that ``device`` computes with."""
    computed: Counter[DeviceId] = Counter()
    for tensor in outline.skeleton.unique:
        computed[plan.execution[parent(tensor.name)]] += tensor.bytes
    return computed[device] / max(1, computed.total())


def _bounced(outline: Outline, plan: Plan) -> int:
    """Return the host memory that experts pass through on their way from storage to a slot, wherever that is.

    For an accelerator an expert's tensor that rests packed is unpacked there, whole where it must be.
    """
    brought = [name for name, serving in plan.serving.items() if serving == "experts"]
    stored = any(plan.homes[name] == DISK for name in brought)
    chunks = READERS * sum(min(CHUNK_BYTES, pool.unit_bytes) for pool in plan.pools.values()) if stored else 0
    unpacked: dict[DeviceId, int] = {}
    on_host = set(plan.packed_on_host)
    for name in brought:
        device = plan.execution[parent(name)]
        if device != CPU and name in outline.packed and (plan.homes[name] == DISK or name in on_host):
            size = outline.sizes[name] // outline.experts[parent(name)].count
            unpacked[device] = max(unpacked.get(device, 0), size)
    return max(chunks, sum(min(READERS * size, max(PINNED_BYTES, size)) for size in unpacked.values()))


def _unpacking_bytes(outline: Outline, plan: Plan) -> int:
    """Return the host memory of the threads that unpack what is brought: what each reads into, and what it takes."""
    on_host = set(plan.packed_on_host)
    unpacked = (
        outline.packed[name].working_bytes
        for name, serving in plan.serving.items()
        if name in outline.packed and (plan.homes[name] == DISK or name in on_host)
    )
    return READERS * max(unpacked, default=0)


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


def bound_seconds(plan: Plan, *, streamed_bytes: float, storage_bytes: float, members: float = 1) -> float:
    """Return the least seconds of a token in a pass for which so much was streamed, ``storage_bytes`` of it read.

    A pass has a token for each of ``members``. The rates are those that ``plan`` was made with.
    """
    expected = float(plan.forecast.get("streamed_bytes_per_token", 0))
    share = streamed_bytes / expected if expected else 0.0
    packed, unpacked = (
        float(plan.forecast.get(f"{kind}_bytes_per_token", 0)) * share for kind in ("packed", "unpacked")
    )
    streamed = Counter({DISK: storage_bytes, CPU: streamed_bytes - storage_bytes})
    used = plan.used_bytes or plan.resident_bytes
    brought = Brought(streamed, packed, unpacked)
    seconds = token_seconds(brought, used, main=plan.main_device, rates=Rates(**plan.rates), members=members)
    return slowest(seconds)[1]
