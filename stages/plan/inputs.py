"""What a plan depends on, gathered once: model and request, and what config and machine say of the devices.

Nothing here decides where a tensor lies, and nothing after it asks the machine: a plan made from these inputs is the
plan of their key.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path

from offstage.pipeline.stage import MEASURED, Config
from offstage.pipeline.typed_config import read
from offstage.stages.checkpoints.adapters import is_added
from offstage.stages.checkpoints.codec_rates import mean_rate, unpacking_rates
from offstage.stages.checkpoints.hub import local_weights
from offstage.stages.machine.hardware import Accelerator, Hardware, hardware
from offstage.stages.machine.host_memory import PEFT_BYTES, PROCESS_BYTES
from offstage.stages.machine.kernels import NOMINAL, Kernels, local_kernels
from offstage.stages.machine.process_memory import process_bytes
from offstage.stages.machine.rates import Rates, coarse_rate, local_rates, read_rates
from offstage.stages.machine.row_products import exact_dtypes
from offstage.stages.plan import options
from offstage.stages.plan.budgets import Allowance, allow, rooms
from offstage.stages.plan.expert_slots import SINGLE, Routing
from offstage.stages.plan.lossless import LosslessPacking
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.predict import compute_dtype, work
from offstage.stages.plan.request.choose import why_not_in_lockstep
from offstage.stages.plan.request.geometry import Request, read_geometry
from offstage.stages.plan.request.media_demand import MediaDemand
from offstage.stages.plan.request.requests import (
    asking,
    lockstep_is_chosen,
    media_request,
    read_request,
    read_requests,
    what_learns,
    with_adapter,
)
from offstage.stages.plan.request.training import Learns
from offstage.stages.plan.row_blocks import possible_dtypes
from offstage.stages.plan.serving import Io, choose_io
from offstage.stages.plan.token_time import LayerOutput
from offstage.stages.plan.traffic import Step
from offstage.stages.plan.training_work import TrainingWork, product_bytes
from offstage.stages.plan.work import Work, most
from offstage.stages.units import CPU, DTYPE_BYTES, DeviceId, format_bytes

ByBlocks = Callable[[Mapping[int, int]], Work]
"""The work of a request, by the bytes of weights that are multiplied by blocks of rows, and those of a block."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What a request takes, and what it leaves to weights: its work, and the budgets that are resolved beside it.

    ``io``, ``pages_stay`` and ``tight`` are all that free memory changes of a plan: how the host reads, whether what
    it maps stays in memory, and the memory that is free where it may be too little, else null. ``routing`` is how the
    tokens of a pass use a mixture's experts, null for other models. ``members`` share a pass in lockstep;
    ``output`` is what a layer of one of them hands to the next, where that may go to another memory. Where it
    ``decodes``, passes after the first need what that didn't keep.
    """

    work: Work
    allowance: Allowance
    io: Io
    pages_stay: bool
    tight: int | None
    routing: Routing | None
    members: int
    output: LayerOutput
    decodes: bool = True

    @property
    def step(self) -> Step:
        """A pass of decoding, as far as placements go by it."""
        routing = self.routing or SINGLE
        return Step(routing, self.members, self.output, decodes=self.decodes, pages_stay=self.pages_stay)


@dataclass(frozen=True, slots=True)
class PlanInputs:
    """The model by the key of its ``skeleton``, the map that was asked for, and what is demanded beside weights.

    ``execution`` says whether layers may compute on the host beside accelerators.

    ``demands`` has one, under null; where the batch size is the plan's to choose, one for each that it may be, the
    least the last; where ``lockstep`` says so, for each number of batches in lockstep. ``count`` prompts or windows,
    each of ``copies`` rows that compute at once, are then to be answered, in the ``rooms`` of those devices that may
    have too little for one of the sizes: what is free elsewhere changes nothing, and so is no part of the key.
    ``learns`` says which weights are changed by the run, and ``offload_ratio`` which share of a training's activations
    waits elsewhere. ``simulated`` has the accelerators that the config lists; those that are here stand in ``machine``,
    since their free memory is in the budgets already. ``process_bytes`` are what the process holds on the host of all
    that is neither weights nor the request's. ``packing`` is how floats are packed, null if they stay. Whether weights
    may be brought by blocks of rows hangs on ``kernels``: ``works`` are those of ``demands``, by the blocks. ``notes``
    is what there is to say of the plan beside what it says itself.
    """

    skeleton: str
    choice: options.Choice
    overrides: Mapping[str, DeviceId]
    execution: str
    demands: Mapping[int | None, Demand]
    lockstep: bool
    count: int
    copies: int
    rooms: Mapping[DeviceId, int]
    learns: Learns
    offload_ratio: float | None
    simulated: tuple[Accelerator | None, ...]
    process_bytes: int
    rates: Rates
    outline: Outline = field(compare=False)
    machine: Hardware = field(compare=False)
    works: Mapping[int | None, ByBlocks] = field(compare=False)
    packing: LosslessPacking | None = None
    kernels: str = ""
    notes: tuple[str, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether the run trains: a simulated accelerator's ledger counts what a step saves there."""
        return self.offload_ratio is not None

    @property
    def learning(self) -> tuple[str, ...]:
        """The names of the weights that are changed by the run, tied ones under all their names."""
        parameters = (spec for spec in self.outline.skeleton.tensors if spec.kind == "parameter")
        if self.learns == "adapter":
            return tuple(spec.name for spec in parameters if is_added(spec.name))
        floating = (spec.name for spec in parameters if spec.dtype.startswith(("float", "bfloat")))
        return tuple(floating) if self.learns == "all" else ()


def gather_inputs(
    outline: Outline,
    config: Config,
    *,
    machine: Hardware,
    rates: Rates,
    kernels: Kernels,
    skeleton: str = "",
    media: MediaDemand | None = None,
    training: TrainingWork | None = None,
) -> PlanInputs:
    """Return what the plan of ``outline`` under ``config`` depends on; ``skeleton`` is its key.

    ``rates`` and ``kernels`` are those of the machine, ``media`` what prompts with images or audio take, ``training``
    what a step of training does.
    """
    given = read(options.PlanConfig, config)
    (requests, one_by_one), apart = _requests(outline, config), [media_request(config, media)] if media else []
    chosen, largest = None not in requests, next(iter(requests.values()))
    works, ratio = _works(outline, config, requests, apart=apart, kernels=kernels, training=training)
    mixed = bool(outline.experts or outline.listed)
    demands = {
        size: _demand(outline, config, machine, works[size]({}), _routing(request) if mixed else None, request)
        for size, request in requests.items()
    }
    return PlanInputs(
        skeleton=skeleton,
        choice=options.read_choice(given.device_map),
        overrides=options.read_overrides(given.device_map_overrides),
        execution=given.execution,
        demands=demands,
        lockstep=chosen and lockstep_is_chosen(config),
        notes=(one_by_one,) if one_by_one else (),
        count=read_request(config).sequences // largest.copies if chosen else 0,
        copies=largest.copies * largest.positions if chosen else 0,
        rooms={
            device: room
            for device, room in (rooms(machine, leaves=bool(given.max_memory)) if chosen else {}).items()
            if any(_most_held(outline, demand, machine, device) > room for demand in demands.values())
        },
        learns=what_learns(config),
        offload_ratio=ratio,
        simulated=tuple(device if device.simulated else None for device in machine.accelerators),
        process_bytes=machine.host.process_bytes,
        rates=rates,
        outline=outline,
        machine=machine,
        works=works,
    )


def _requests(outline: Outline, config: Config) -> tuple[dict[int | None, Request], str]:
    """Return what is asked, as ``read_requests`` does, and why it isn't in lockstep where the model rules that out."""
    requests = read_requests(config)
    if None in requests or not lockstep_is_chosen(config):
        return requests, ""
    why = why_not_in_lockstep(outline.skeleton)
    return ({None: replace(next(iter(requests.values())), members=1)} if why else requests), why


def _works(
    outline: Outline,
    config: Config,
    requests: Mapping[int | None, Request],
    *,
    apart: Sequence[Request],
    kernels: Kernels,
    training: TrainingWork | None,
) -> tuple[dict[int | None, ByBlocks], float | None]:
    """Return what each of ``requests`` takes, or those ``apart``; of a ``training`` the ratio of its offload too."""
    model = config.get("model") or {}
    geometry, library = read_geometry(model), PEFT_BYTES if with_adapter(config) else 0
    if training is None:

        def asked(requests: Sequence[Request], blocks: Mapping[int, int]) -> Work:
            needs = most(work(outline, geometry, one, kernels, blocks=blocks) for one in requests)
            return replace(needs, library_bytes=library)

        return {size: partial(asked, (request, *apart)) for size, request in requests.items()}, None
    (request,) = requests.values()
    scratch = product_bytes(outline, geometry, request, kernels)
    ratio = training.ratio(outline, beside=scratch + library)
    needs = training.at(ratio, scratch=scratch)
    needs = replace(needs, library_bytes=needs.library_bytes + library)
    return {None: lambda _blocks: needs}, ratio


def _routing(request: Request) -> Routing:
    """Return how the tokens of ``request`` use a mixture's experts."""
    return Routing(request.pass_tokens, prompt_tokens=request.prompt_tokens, passes=request.passes)


def _demand(
    outline: Outline,
    config: Config,
    machine: Hardware,
    needs: Work,
    routing: Routing | None,
    request: Request,
) -> Demand:
    """Return what ``request`` comes to, whose ``needs`` are known."""
    given = read(options.PlanConfig, config)
    fastest = given.execution == options.FASTEST
    on_device, on_host = _needed(machine, needs, host_computes=fastest)
    allowance = allow(
        given.max_memory, machine, needed=on_device, host_needed=on_host, unpacking=outline.unpacking_bytes
    )
    streaming = _streaming(machine, outline, allowance, needs)
    demand = Demand(
        work=needs,
        allowance=allowance,
        io=choose_io(given.storage.io, **streaming),
        pages_stay=choose_io("auto", **streaming) == "mmap",
        tight=None,
        routing=routing,
        members=request.members,
        output=_output(outline, config, request) if fastest else LayerOutput(),
        decodes=request.length > 0,
    )
    return replace(demand, tight=_tight(demand, machine, outline))


def _output(outline: Outline, config: Config, request: Request) -> LayerOutput:
    """Return what a layer hands to the next in a pass of ``request``, of one member."""
    hidden = read_geometry(config.get("model") or {}).hidden * int(DTYPE_BYTES[compute_dtype(outline)])
    tokens = request.pass_tokens // request.members
    return LayerOutput(tokens, tokens * hidden)


def known_machine(config: Config, cache: Path) -> Hardware:
    """Return the machine that ``config`` describes; this host with what the process of a run was measured to hold.

    Of another host nothing is measured here: what its process holds is the nominal figure.
    """
    machine, described = hardware(config), config.get("hardware") or {}
    if described.get("host") is not None:
        return machine
    process = process_bytes(cache / MEASURED, rates=described.get("devices") is None)
    return replace(machine, host=replace(machine.host, process_bytes=process))


def assumed_of_host(config: Config) -> tuple[str, ...]:
    """Return in words what is assumed of a host that ``config`` describes: it isn't asked, nor is this one for it."""
    if (config.get("hardware") or {}).get("host") is None:
        return ()
    held = format_bytes(PROCESS_BYTES)
    return (f"hardware.host is described: a process is taken to hold {held} there, its kernels what the widest do",)


def machine_rates(config: Config, machine: Hardware, cache: Path, outline: Outline | None = None) -> Rates:
    """Return the rates that the config gives, the others as they are measured on the checkpoint's largest file.

    Those of a machine that is described and isn't this one are nominal where they aren't given. That of unpacking is
    of the codecs which tensors of ``outline`` rest in.
    """
    described = config.get("hardware") or {}
    if described.get("devices") is not None:
        return read_rates(described)
    files = local_weights(config["model"])
    sample = max(files, key=lambda path: path.stat().st_size, default=None)
    names = [accelerator.name for accelerator in machine.accelerators]
    pinned = described.get("rates") or {}
    rates = local_rates(cache / MEASURED, sample, names, pinned=pinned)
    if outline is None or "unpacking" in pinned:
        return rates
    used: Counter[str] = Counter()
    for name, packed in outline.packed.items():
        used[packed.codec] += outline.sizes[name]
    unpacking = mean_rate(unpacking_rates(cache / MEASURED, used), used)
    return rates if unpacking is None else replace(rates, unpacking=coarse_rate(unpacking))


def host_kernels(config: Config, cache: Path) -> Kernels:
    """Return what this machine's kernels take beside their operands; nominal figures where the host is another one."""
    described = config.get("hardware") or {}
    return local_kernels(cache / MEASURED) if described.get("host") is None else NOMINAL


def with_row_blocks(outline: Outline, config: Config, cache: Path, machine: Hardware) -> Outline:
    """Return ``outline`` with what says in which dtypes products by blocks of rows have the same bits as whole ones.

    It is known of this host's kernels alone, and not of an accelerator's that is really there. A training is never
    computed so: what autograd saves is whole weights.
    """
    described = config.get("hardware") or {}
    elsewhere = described.get("host") is not None or not all(device.simulated for device in machine.accelerators)
    dtypes = possible_dtypes(outline)
    if elsewhere or asking(config) == "finetune" or not dtypes:
        return outline
    return replace(outline, exact=lru_cache(partial(exact_dtypes, cache / MEASURED, dtypes)))


def _needed(machine: Hardware, needs: Work, *, host_computes: bool) -> tuple[int, int]:
    """Return what the request takes beside weights on accelerators that compute, and on the host.

    That computes where nothing else does, and where ``host_computes`` says that it may.
    """
    needed = needs.cache_bytes + needs.activation_bytes + needs.assistant_bytes + needs.learning_bytes
    return needed, host_needed(needs) if host_computes or not machine.accelerators else 0


def host_needed(needs: Work) -> int:
    """Return what the request takes beside weights on a host that computes."""
    return needs.bytes - needs.offloaded_bytes


def _streaming(machine: Hardware, outline: Outline, allowance: Allowance, needs: Work) -> dict[str, int]:
    """Return the least that the host streams where it holds all that it may, and what is free for its pages then.

    They are told before the placement is known, so that a key can hold what follows: a plan that was made when memory
    was free isn't found again where it isn't. Experts aren't among it: those that are routed to are read into slots.
    """
    whole, most = outline.skeleton.bytes, allowance.budgets.get(CPU, 0)
    held = whole if most is None else min(most, whole)
    process = machine.host.process_bytes + outline.unpacking_bytes
    libraries = -allowance.terms.get(str(CPU), {}).get("libraries", 0)  # theirs, and not the weights' pages'
    free = machine.free(CPU) - held - needs.bytes - process - libraries
    return {"streamed_bytes": max(0, outline.dense.skeleton.bytes - held), "free_bytes": free}


def _tight(demand: Demand, machine: Hardware, outline: Outline) -> int | None:
    """Return the memory that is free where it may be too little, else null: then it changes nothing of the plan."""
    free = machine.host.available_bytes
    return None if _most_held(outline, demand, machine, CPU) <= free else machine.free(CPU)


def _most_held(outline: Outline, demand: Demand, machine: Hardware, device: DeviceId) -> int:
    """Return bytes that no plan of such a request comes to on ``device``, whatever it places there."""
    most = demand.allowance.budgets.get(device)
    weights = outline.skeleton.bytes if most is None else min(most, outline.skeleton.bytes)
    process = machine.host.process_bytes + outline.unpacking_bytes if device == CPU else 0
    return weights + max(outline.sizes.values(), default=0) + demand.work.bytes + process
