"""``cpu_offload_gb: N``: the first N GB of the decoder layers' parameters live on the host.

All else is on the accelerator. Parameter by parameter, in the order of execution, whole layers or not: each computes on
the accelerator all the same. The experts of a layer go together: an expert is brought with all it has.
What it asks is how much memory to free, where the other policies ask how much there is.
"""

from __future__ import annotations

from offstage.stages.empty_init.skeleton import parent
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets, Placement, budgeted_accelerators
from offstage.stages.units import CPU, DISK, DeviceId


def cpu_offload_gb(outline: Outline, budgets: Budgets, gigabytes: float) -> Placement:
    """Return the placement with ``gigabytes`` (10**9 bytes) of the no-split layers' parameters offloaded.

    A parameter is offloaded while the bytes offloaded before it are fewer than asked for. They live on the host;
    without an accelerator, where the host computes, on disk.
    """
    main = next(iter(budgeted_accelerators(budgets)), CPU)
    away: DeviceId = DISK if main == CPU else CPU
    homes: dict[str, DeviceId] = {tensor.name: main for tensor in outline.skeleton.unique}
    offloaded = 0
    for leader in _parameters(outline):
        if offloaded >= gigabytes * 10**9:
            break
        together = _together(outline, leader) if homes[leader] == main else ()
        homes |= dict.fromkeys(together, away)
        offloaded += sum(outline.sizes[name] for name in together)
    return Placement(homes, main)


def _together(outline: Outline, leader: str) -> tuple[str, ...]:
    """Return the parameters that are offloaded with ``leader``: those of the same experts, else itself alone."""
    return outline.experts[parent(leader)].tensors if leader in outline.expert_tensors else (leader,)


def _parameters(outline: Outline) -> list[str]:
    """Return the parameters that the no-split layers own, in the order of execution."""
    by_name = outline.skeleton.by_name
    owned = [name for layer in outline.layers if layer.name in outline.blocks for name in layer.owned]
    return [name for name in owned if by_name[name].kind == "parameter"]
