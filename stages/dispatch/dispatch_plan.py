"""The dispatch plan: which module's weights are brought in, for whose calls, and where each module computes.

It is made from the skeleton and the plan alone, so that ``dispatch.json`` can be written without a model.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from offstage.pipeline.atomic_files import write_text
from offstage.stages.empty_init.skeleton import ExpertsSpec, Skeleton, parent, upward
from offstage.stages.plan.memory_needs import UNUSED_SHARE
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.serving import Serving, is_streamed
from offstage.stages.units import CPU, DeviceId

_LITTLE = 1 / 64
"""Of what is held: about twice as much was found to be left unused."""

FILE_NAME = "dispatch.json"
_AT_ONCE = 4
"""So many parts that were put together have room at once, at least."""


@dataclass(frozen=True, slots=True)
class ModulePlan:
    """One module that holds tensors directly: where it computes and how its tensors get there.

    ``serving`` is the plan's, by tensor; what isn't in it is resident. ``callers`` are the modules whose calls bring in
    what is streamed: the module itself, and those that read its tensors without calling it. ``experts`` are those of a
    mixture that are brought one by one, if the module has such. ``listed_expert`` is the expert that it is a piece of,
    if it is one of a list of modules: it is brought once that is called. Of a weight in ``block_rows`` so many rows are
    brought at a time.
    """

    execution: DeviceId
    serving: Mapping[str, Serving]
    callers: tuple[str, ...]
    experts: ExpertsSpec | None = None
    listed_expert: str | None = None
    block_rows: Mapping[str, int] = field(default_factory=dict)

    @property
    def streamed(self) -> tuple[str, ...]:
        """The tensors that are brought in for each use."""
        return tuple(name for name, serving in self.serving.items() if is_streamed(serving))

    @property
    def waits(self) -> bool:
        """Whether a pass may have something of it brought in."""
        return bool(self.streamed) or self.experts is not None


@dataclass(frozen=True, slots=True)
class DispatchPlan:
    """All parts by module name, the modules that inputs are moved for, and the order in which those that wait are used.

    ``together`` maps module name → module around it whose call brings in the tensors of both, with those of others.
    ``entries`` maps module name → device: each is the root of a subtree that computes on one device alone.
    ``streamed_bytes`` are brought in for every pass, whatever experts it calls. ``staging_bytes`` may be held on the
    host for streamed weights that it computes: its reserve, and what the plan left of its budget. ``reserves`` are kept
    free on each device that computes what is streamed: what an accelerator holds for weights on their way. ``slots``
    are the bytes for experts on each device that computes some which lie elsewhere; they are divided for passes of
    ``pass_tokens``. ``unpacking`` are those in which an accelerator dequantises what streams to it; on one that isn't
    listed nothing is. ``host_peak_bytes`` is the predicted peak of a host that stands in for accelerators, null where
    none is simulated. Where a pass ``reuses`` the host's memory, what it frees is taken again and not given back.
    """

    main_device: DeviceId
    parts: Mapping[str, ModulePlan]
    entries: Mapping[str, DeviceId]
    order: tuple[str, ...]
    streamed_bytes: int
    staging_bytes: int
    reserves: Mapping[DeviceId, int]
    slots: Mapping[DeviceId, int]
    host_peak_bytes: int | None = None
    pass_tokens: int = 1
    unpacking: Mapping[DeviceId, int] = field(default_factory=dict)
    together: Mapping[str, str] = field(default_factory=dict)
    reuses: bool = False

    def save(self, folder: Path) -> None:
        """Write ``dispatch.json`` into ``folder``."""
        write_text(folder / FILE_NAME, json.dumps(asdict(self), indent=1) + "\n")


def make_dispatch_plan(skeleton: Skeleton, plan: Plan) -> DispatchPlan:
    """Return the dispatch plan of a model with this ``skeleton`` placed by this ``plan``.

    >>> with offstage.load(checkpoint, max_memory={"cpu": "3MB"}) as loaded:
    ...     plan = make_dispatch_plan(describe(loaded.model, rehearsed=False), loaded.plan)
    >>> type(plan).__name__, plan.main_device
    ('DispatchPlan', 'cpu')
    """
    parts, experts, devices = {}, _experts(skeleton, plan), plan.devices.items()
    simulated = any(one.simulated is not None and one.ledger for _, one in devices)
    for module, tensors in skeleton.by_module.items():
        lines = [plan.tensors[spec.name] for spec in tensors]
        serving = {line.name: line.serving for line in lines if line.serving is not None}
        callers = (module, *skeleton.borrowers.get(module, ()))
        listed = skeleton.expert_of.get(module)
        blocks = {spec.name: plan.block_rows[spec.name] for spec in tensors if spec.name in plan.block_rows}
        parts[module] = ModulePlan(lines[0].computes, serving, callers, experts.get(module), listed, blocks)
    staging_bytes = plan.staging_bytes if plan.serving else 0  # what nobody uses would be news to every key
    reserves = {device: one.reserve for device, one in devices if one.reserve}
    return DispatchPlan(
        main_device=plan.main_device,
        parts=parts,
        entries=_entries(skeleton, plan),
        order=tuple(name for name in skeleton.calls if name in parts and parts[name].waits),
        streamed_bytes=sum(
            skeleton.by_name[name].bytes
            for part in parts.values()
            if part.listed_expert is None
            for name in part.streamed
        ),
        staging_bytes=staging_bytes,
        reserves=reserves,
        slots={device: one.expert_cache for device, one in devices if one.pool is not None},
        host_peak_bytes=sum(plan.devices[CPU].ledger.values()) if simulated else None,
        pass_tokens=plan.pass_tokens,
        unpacking={device: one.dequantising for device, one in devices if one.dequantising},
        together=_together(skeleton, parts, {**reserves, CPU: staging_bytes}),
        reuses=not simulated and _is_little(plan.devices[CPU].ledger),
    )


def _is_little(ledger: Mapping[str, int]) -> bool:
    """Return whether what the C library leaves unused in taking again what a pass computes with makes no peak another
    one, so little is it of what ``ledger`` has. Of a ledger that has nothing it isn't known.

    Keys and values that would be mapped, and so are no part of the heap's, lie among the rest then.
    """
    computed = sum(ledger.get(part, 0) for part in ("activations", "scratch"))
    beside = UNUSED_SHARE * ledger.get("cache", 0) - ledger.get("heap", 0)
    return computed > 0 and computed + beside <= _LITTLE * sum(ledger.values())


@dataclass(slots=True)
class _Subtree:
    """The modules in one subtree that bring something in, these ``bytes``; ``kinds`` is what has to be alike.

    ``is_mixed`` says that there is something in it that goes its own way.
    """

    modules: list[str] = field(default_factory=list)
    kinds: set[tuple[DeviceId, bool]] = field(default_factory=set)
    bytes: int = 0
    is_mixed: bool = False


def brought_together(
    skeleton: Skeleton, brought: Mapping[str, DeviceId | None], sizes: Mapping[str, int], rooms: Mapping[DeviceId, int]
) -> dict[str, str]:
    """Return for each module whose tensors are brought with others' the module whose call uses them all.

    What a part costs the thread that runs the model (to ask for it, bind it and let it go, and for the hooks around the
    call that uses it) doesn't depend on its size. Where parts are small beside the memory for what streams, that is
    what bounds a token. So the tensors of modules that a call of the module around them uses, each once, are one part,
    as long as several of its size are there together: what comes next is still on its way while one computes.

    ``brought`` are the modules that have something brought in: to which device; null for one that goes its own way, as
    experts do. ``sizes`` is what each brings, in bytes, and ``rooms`` what each device has for what streams.
    Only what a rehearsal has seen is put together: modules that are called once, inside one call of what is around.
    """
    if skeleton.unrehearsed is not None:
        return {}
    calls, once = Counter(skeleton.calls), {*skeleton.once}
    trees: dict[str, _Subtree] = {}
    for module, device in brought.items():
        alone = device is None or calls[module] != 1 or any(
            module not in upward(name) for name in skeleton.borrowers.get(module, ())
        )  # fmt: skip
        for above in upward(module):
            tree = trees.setdefault(above, _Subtree())
            tree.modules.append(module)
            tree.bytes += sizes[module]
            tree.is_mixed |= alone
            if device is not None:
                tree.kinds.add((device, module in once))
    caller_of: dict[str, str] = {}
    for name in filter(None, skeleton.order):  # what is around comes first
        tree = trees.get(name, _Subtree())
        if tree.is_mixed or len(tree.kinds) != 1 or len(tree.modules) < 2:
            continue
        ((device, _),) = tree.kinds
        if _AT_ONCE * tree.bytes <= rooms.get(device, 0):
            caller_of |= {module: caller_of.get(module, name) for module in tree.modules}
    return caller_of


def _together(skeleton: Skeleton, parts: Mapping[str, ModulePlan], rooms: Mapping[DeviceId, int]) -> dict[str, str]:
    """Return the module around each that is brought in with others, as far as the ``rooms`` are for several such."""
    waiting = {name: part for name, part in parts.items() if part.waits}
    brought = {
        name: None if part.experts or part.listed_expert or part.block_rows else part.execution
        for name, part in waiting.items()
    }
    sizes = {name: sum(skeleton.by_name[each].bytes for each in part.streamed) for name, part in waiting.items()}
    return brought_together(skeleton, brought, sizes, rooms)


def _experts(skeleton: Skeleton, plan: Plan) -> dict[str, ExpertsSpec]:
    """Return the experts that the plan has brought one by one, by module."""
    return {
        spec.module: spec
        for spec in skeleton.experts
        if all(plan.serving.get(name) == "experts" for name in spec.tensors)
    }


def _entries(skeleton: Skeleton, plan: Plan) -> dict[str, DeviceId]:
    """Return the roots of the largest subtrees that compute on one device."""
    computing: dict[str, set[DeviceId]] = {module.name: set() for module in skeleton.modules}
    for module, device in plan.execution.items():
        for above in upward(module):
            computing[above].add(device)
    return {
        name: next(iter(devices))
        for name, devices in computing.items()
        if len(devices) == 1 and (not name or len(computing[parent(name)]) > 1)
    }
