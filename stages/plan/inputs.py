"""What a plan depends on, gathered once: model and request, and what config and machine say of the devices.

Nothing here decides where a tensor lies, and nothing after it asks the machine: a plan made from these inputs is the
plan of their key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import read
from offstage.stages.checkpoints.adapters import is_added
from offstage.stages.inputs.finetune_options import Learns
from offstage.stages.machine.hardware import Accelerator, Hardware
from offstage.stages.machine.host_memory import CACHE_LIBRARY_BYTES, PEFT_BYTES, PROCESS_BYTES
from offstage.stages.machine.hosts import host_count
from offstage.stages.machine.kernels import Kernels, identity
from offstage.stages.machine.process_memory import STEP_BYTES
from offstage.stages.machine.rates import Rates
from offstage.stages.plan import options
from offstage.stages.plan.allocator import AllocatorCost, allocator_cost
from offstage.stages.plan.budgets import NO_COST, Allowance, allow, rooms
from offstage.stages.plan.expert_slots import SINGLE, Routing
from offstage.stages.plan.figures import host_is_described
from offstage.stages.plan.hosts import Division
from offstage.stages.plan.lossless import Shares, with_copies
from offstage.stages.plan.memory_needs import BlockCache, MemoryNeeds, block_caches, compute_dtype, memory_needs, most
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.choose import why_not_in_lockstep
from offstage.stages.plan.request.geometry import Geometry, Request, read_geometry
from offstage.stages.plan.request.media_demand import MediaDemand
from offstage.stages.plan.request.requests import (
    lockstep_is_chosen,
    media_request,
    read_request,
    sized_requests,
    what_learns,
    with_adapter,
)
from offstage.stages.plan.request.training import TrainingDemand, training_needs
from offstage.stages.plan.serving import Io, choose_io
from offstage.stages.plan.traffic import Step
from offstage.stages.units import CPU, DTYPE_BYTES, DeviceId, format_bytes


@dataclass(frozen=True, slots=True)
class Demand:
    """What is asked at once, and what it leaves to weights: the bytes that it ``needs``, and the ``allowance`` of
    budgets that is resolved beside them. ``step`` is a pass of its decoding. The host reads what it streams by ``io``.

    ``size`` is how many go together where that is the plan's to choose, else null. ``requests`` are all that may be
    asked, the first of which is decoded in such steps. ``allocator`` is what torch's takes beside on an accelerator.
    """

    size: int | None
    needs: MemoryNeeds
    allowance: Allowance
    step: Step
    io: Io
    requests: tuple[Request, ...] = field(compare=False)
    allocator: AllocatorCost = field(default=NO_COST, compare=False)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The model by the key of its ``skeleton``, the map that was asked for, and what is demanded beside weights.

    ``execution`` says whether layers may compute on the host beside accelerators.

    ``demands`` has one; where the batch size is the plan's to choose, one for each that it may be, the least the last;
    where ``lockstep`` says so, for each number of batches in lockstep. ``count`` prompts or windows are then to be
    answered. ``rooms`` are what those devices have that may have too little for one of the demands: what is
    free elsewhere changes nothing, and so is no part of the key. ``learns`` says which weights are changed by the run,
    and ``offload_ratio`` which share of a training's activations waits elsewhere. ``simulated`` has the accelerators
    that the config lists; those that are here stand in ``machine``, since their free memory is in the budgets already.
    ``process_bytes`` are what the process holds on each device of all that is neither weights nor the request's, and
    ``expandable`` says whether segments of torch's allocator expand on accelerators. ``packing`` is how far floats are
    packed, null if they stay; where that is the plan's to choose, ``plain`` is the same without it. Whether weights may
    be brought by blocks of rows hangs on ``kernel_identity``; ``kernels`` are what those of the host take. ``notes`` is
    what there is to say of the plan beside what it says itself. Where the model is divided among hosts, by the
    ``division``, it is for what one ``host`` has of it.
    """

    skeleton: str
    choice: options.Choice
    overrides: Mapping[str, DeviceId]
    execution: str
    demands: tuple[Demand, ...]
    lockstep: bool
    count: int
    rooms: Mapping[DeviceId, int]
    learns: Learns
    offload_ratio: float | None
    simulated: tuple[Accelerator | None, ...]
    process_bytes: Mapping[DeviceId, int]
    expandable: bool
    rates: Rates
    outline: Outline = field(compare=False)
    machine: Hardware = field(compare=False)
    geometry: Geometry = field(compare=False)
    kernels: Kernels = field(compare=False)
    packing: Shares | None = None
    plain: PlanInputs | None = None
    kernel_identity: str = ""
    notes: tuple[str, ...] = ()
    division: Division | None = None
    host: int = 0

    @property
    def learning(self) -> tuple[str, ...]:
        """The names of the weights that are changed by the run, tied ones under all their names."""
        parameters = (spec for spec in self.outline.skeleton.tensors if spec.kind == "parameter")
        if self.learns == "adapter":
            return tuple(spec.name for spec in parameters if is_added(spec.name))
        floating = (spec.name for spec in parameters if spec.dtype.startswith(("float", "bfloat")))
        return tuple(floating) if self.learns == "all" else ()

    @property
    def hangs_on_kernels(self) -> bool:
        """Whether the plan may be another one where ``kernels`` take less, or its peak by more than steps hide.

        It can be where a budget is worked out beside what they take.
        """
        asked = self.demands
        return any(one.allowance.terms or one.needs.scratch_bytes > STEP_BYTES for one in asked)

    def needs(self, demand: Demand, blocks: Mapping[int, int]) -> MemoryNeeds:
        """Return what ``demand`` needs where weights of so many bytes are multiplied by ``blocks`` of so many."""
        if not blocks:
            return demand.needs
        return _needs(self.outline, self.geometry, demand.requests, self.kernels, demand.needs.library_bytes, blocks)

    def step(self, demand: Demand, prompts: int) -> Step:
        """Return the pass of decoding of ``demand`` for so many ``prompts`` in its place."""
        request = demand.requests[0]
        fewer = replace(request, sequences=prompts * request.copies)
        return _step(self.outline, self.geometry, fewer, pages_stay=demand.step.pages_stay)


def gather_inputs(
    outline: Outline,
    config: Config,
    *,
    machine: Hardware,
    rates: Rates,
    kernels: Kernels,
    skeleton: str = "",
    measured: MediaDemand | TrainingDemand | None = None,
    packing: Shares | None = None,
) -> PlanInputs:
    """Return what the plan of ``outline`` under ``config`` depends on; ``skeleton`` is its key.

    ``rates`` and ``kernels`` are those of the machine, ``measured`` is what prompts with images or audio take, or what
    a step of training does. ``packing`` is how far floats of the outline can be packed.
    """
    given, geometry = read(options.PlanConfig, config), read_geometry(config.get("model") or {})
    again = partial(gather_inputs, outline, config, machine=machine, rates=rates, kernels=kernels, skeleton=skeleton)
    plain = again(measured=measured) if packing and given.storage.codec == "auto" else None
    outline = with_copies(outline, packing)
    library = _library_bytes(config, whole := read_request(config))
    requests, notes = _requests(whole, outline, config)
    apart = [media_request(config, measured)] if isinstance(measured, MediaDemand) else []
    ratio, demands, chosen = None, list[Demand](), None not in requests
    for size, request in requests.items():
        asked, step = (request, *apart), _step(outline, geometry, request)
        if isinstance(measured, TrainingDemand):
            needs, ratio = training_needs(measured, outline, config, machine, kernels, library=library)
        else:
            needs = _needs(outline, geometry, asked, kernels, library)
        demands.append(replace(_demand(outline, given, machine, needs, step), size=size, requests=asked))
    return PlanInputs(
        skeleton=skeleton,
        choice=options.read_choice(given.device_map),
        overrides=options.read_overrides(given.device_map_overrides),
        execution=given.execution,
        demands=tuple(demands),
        lockstep=chosen and lockstep_is_chosen(config),
        count=whole.prompts if chosen else 0,
        rooms=_scarce(rooms(machine, leaves=chosen and bool(given.max_memory)), outline, demands, machine),
        learns=what_learns(config),
        offload_ratio=ratio,
        simulated=tuple(device if device.simulated else None for device in machine.accelerators),
        process_bytes=machine.process_bytes,
        expandable=machine.expands,
        rates=rates,
        outline=outline,
        machine=machine,
        geometry=geometry,
        kernels=kernels,
        packing=packing,
        plain=plain,
        kernel_identity=identity() if outline.exact else "",
        notes=(*notes, *_assumed_of_host(config), *_disturbed(rates)),
    )


def _library_bytes(config: Config, whole: Request) -> int:
    """Return what libraries take of the host's process that the ``whole`` request under ``config`` alone needs."""
    library = PEFT_BYTES if with_adapter(config) else 0
    if whole.cache_bits is not None:
        library += CACHE_LIBRARY_BYTES[whole.cache_bits.backend]
    return library


def _requests(whole: Request, outline: Outline, config: Config) -> tuple[dict[int | None, Request], tuple[str, ...]]:
    """Return ``whole`` by the sizes to choose from, and why it isn't in lockstep where the model rules that out."""
    whole = replace(whole, groups=min(whole.members, host_count(config.get("hardware") or {})))
    requests = sized_requests(whole, config)
    if None in requests or not lockstep_is_chosen(config) or not (why := why_not_in_lockstep(outline.skeleton)):
        return requests, ()
    return {None: replace(whole, members=1)}, (why,)


def _needs(
    outline: Outline,
    geometry: Geometry,
    requests: Sequence[Request],
    kernels: Kernels,
    library: int,
    blocks: Mapping[int, int] | None = None,
) -> MemoryNeeds:
    """Return what those of ``requests`` take that take the most, beside ``library`` bytes; see ``memory_needs``."""
    needs = most(memory_needs(outline, geometry, one, kernels, blocks=blocks) for one in requests)
    return replace(needs, library_bytes=library)


def _step(outline: Outline, geometry: Geometry, request: Request, *, pages_stay: bool = False) -> Step:
    """Return one pass of decoding of ``request``."""
    tokens = request.pass_tokens // request.together
    routing = SINGLE
    if outline.routed:
        routing = Routing(request.pass_tokens, prompt_tokens=request.prompt_tokens, passes=request.passes)
    return Step(
        routing,
        request.together,
        tokens,
        tokens * geometry.hidden * int(DTYPE_BYTES[compute_dtype(outline)]),
        decodes=request.length > 0,
        pages_stay=pages_stay,
        forwards=request.forwards,
        caches=_caches(outline, geometry, request),
    )


def _caches(outline: Outline, geometry: Geometry, request: Request) -> tuple[BlockCache, ...]:
    """Return the caches of ``request``, as large as they are half-way through the answers; of quantised ones what takes
    as long to read and write whole.
    """
    middle, bits = (min(request.prompt, request.length) + request.length) // 2, request.cache_bits
    width = int(DTYPE_BYTES[compute_dtype(outline)])
    caches = block_caches(outline, geometry, replace(request, length=middle, cache_bits=None), width=width)
    if bits is None:
        return caches
    slowness = bits.slowness(width=width)
    return tuple(
        replace(cache, finished=round(cache.finished * slowness)) if cache.grows else cache for cache in caches
    )


def _demand(outline: Outline, given: options.PlanConfig, machine: Hardware, needs: MemoryNeeds, step: Step) -> Demand:
    """Return what a request comes to whose ``needs`` are known."""
    on_device = needs.device_cache_bytes + needs.activation_bytes + needs.assistant_bytes + needs.learning_bytes
    allocator = allocator_cost(outline, needs, expands=machine.expands) if machine.accelerators else NO_COST
    host_computes = given.execution == options.FASTEST or not machine.accelerators
    allowance = allow(
        given.max_memory,
        machine,
        needed=on_device,
        host_needed=needs.host_bytes if host_computes else needs.apart_bytes,
        unpacking=outline.unpacking_bytes,
        allocator=allocator,
    )
    streaming = _streaming(machine, outline, allowance, needs)
    step = replace(step, pages_stay=choose_io("auto", **streaming) == "mmap")
    return Demand(None, needs, allowance, step, choose_io(given.storage.io, **streaming), (), allocator)


def _assumed_of_host(config: Config) -> tuple[str, ...]:
    """Return in words what is assumed of a host that ``config`` describes: it isn't asked, nor is this one for it."""
    if not host_is_described(config):
        return ()
    size = format_bytes(PROCESS_BYTES)
    return (f"hardware.host is described: a process is taken to hold {size} there, its kernels what the widest do",)


def _disturbed(rates: Rates) -> tuple[str, ...]:
    """Return in words that others had a part of the machine while its ``rates`` were measured."""
    if not rates.disturbed:
        return ()
    return ("this machine's speeds were measured while other processes computed, so predictions may be off",)


def _streaming(machine: Hardware, outline: Outline, allowance: Allowance, needs: MemoryNeeds) -> dict[str, int]:
    """Return the least that the host streams where it holds all that it may, and what is free for its pages then.

    They are told before the placement is known, so that a key can hold what follows: a plan that was made when memory
    was free isn't found again where it isn't. Experts aren't among it: those that are routed to are read into slots.
    """
    whole, most = outline.skeleton.bytes, allowance.budgets.get(CPU, 0)
    resident = whole if most is None else min(most, whole)
    process = machine.host.process_bytes + outline.unpacking_bytes
    libraries = -allowance.host_terms.get("libraries", 0)  # theirs, and not the weights' pages'
    free = machine.free(CPU) - resident - needs.bytes - process - libraries
    return {"streamed_bytes": max(0, outline.dense.skeleton.bytes - resident), "free_bytes": free}


def _scarce(
    free: Mapping[DeviceId, int], outline: Outline, demands: Collection[Demand], machine: Hardware
) -> dict[DeviceId, int]:
    """Return what is ``free`` where that may be too little for one of ``demands``."""
    return {
        device: room
        for device, room in free.items()
        if any(_most_held(outline, demand, machine, device) > room for demand in demands)
    }


def _most_held(outline: Outline, demand: Demand, machine: Hardware, device: DeviceId) -> int:
    """Return bytes that no plan of such a request comes to on ``device``, whatever it places there."""
    most = demand.allowance.budgets.get(device)
    weights = outline.skeleton.bytes if most is None else min(most, outline.skeleton.bytes)
    process = machine.process_bytes[device]
    process += outline.unpacking_bytes if device == CPU else demand.allocator.beside(weights)
    return weights + max(outline.sizes.values(), default=0) + demand.needs.bytes + process
