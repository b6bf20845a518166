"""Choosing tensors from all over the order of execution: those that fit, and those that wait on the host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Budgets
from offstage.stages.units import CPU, DISK, DeviceId

GOLDEN = 0.6180339887498949


def total_bytes(outline: Outline, names: Iterable[str]) -> int:
    """Return the bytes of ``names`` together, as they are used."""
    return sum(outline.sizes[name] for name in names)


def turns(count: int) -> list[float]:
    """Return a number for each of ``count`` places: taken in that order, they are from all over at any moment.

    Steps by the golden ratio never bunch.
    """
    return [index * GOLDEN % 1 for index in range(count)]


def fitting(outline: Outline, names: Iterable[str], room: int, *, at_rest: bool = False) -> set[str]:
    """Return those of ``names`` that fit into ``room`` bytes together, as they are used or ``at_rest``: the largest
    are taken first.

    Among equals they are taken from all over the order of execution.
    """
    taken: set[str] = set()
    sizes = outline.rest_sizes if at_rest else outline.sizes
    chosen = set(names)
    ordered = [name for layer in outline.layers for name in layer.owned if name in chosen]
    turn = dict(zip(ordered, turns(len(ordered)), strict=True))
    for name in sorted(ordered, key=lambda name: (-sizes[name], turn[name])):
        if sizes[name] <= room:
            taken.add(name)
            room -= sizes[name]
    return taken


def below(outline: Outline, names: Sequence[str], main: DeviceId, budgets: Budgets) -> dict[str, DeviceId]:
    """Return where streamed tensors wait: on the host as far as it goes, the rest on disk, evenly in between.

    The shares are kept even by error diffusion along the order of execution: storage and link work side by side.
    """
    room = budgets.get(CPU, 0) if main != CPU else 0
    total = total_bytes(outline, names)
    if room is None or room >= total:
        return dict.fromkeys(names, CPU)
    homes: dict[str, DeviceId] = dict.fromkeys(names, DISK)
    passed = held = 0
    for name in names:
        size = outline.sizes[name]
        passed += size
        if held + size <= room * passed / total:
            homes[name], held = CPU, held + size
    late = [name for name in names if homes[name] == DISK]
    return {**homes, **dict.fromkeys(fitting(outline, late, room - held), CPU)}
