"""How each tensor that doesn't lie where it computes is served there: decided here, once, for all that comes later.

A tensor is **resident** where it computes, and not served at all; **streamed**, brought in for each use; **looked
up**, which brings a few of its rows; or one of a mixture's **experts**, of which those are brought that tokens are
routed to, and kept in slots. Which it is follows from where it lies, where its module computes, and what kind of module
that is. Nothing but ``storage.io`` is left to choose: whether the host reads what lies on disk into staging memory, or
uses it where a map of its file has it. What rests packed is of no use in a map: it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Literal

from offstage.stages.empty_init.skeleton import ExpertsSpec, parent
from offstage.stages.plan.outline import Outline
from offstage.stages.units import CPU, DISK, DeviceId

Serving = Literal["direct", "map", "rows", "copy", "packed", "experts"]
"""``direct``: read from disk past the page cache, for each use. ``map``: used where a map of its file has it. ``rows``:
looked up in such a map. ``copy``: it waits in memory, and is copied over a link for each use. ``packed``: it waits in
memory as it rests on disk, and is unpacked for each use. ``experts``: an expert's row is brought from wherever the
tensor waits, once tokens are routed to it and no slot has it."""

Io = Literal["direct", "mmap"]

SHARE_OF_FREE_MEMORY = 0.8
"""The most of the free memory that mapped weights may fill with their pages, before direct reads are the better way."""


def choose_io(asked: str, *, streamed_bytes: int, free_bytes: int) -> Io:
    """Return how the host reads what is streamed: as asked, or for ``auto`` mapped where the pages can stay in memory.

    Page cache isn't the process's own memory, so it stands beside the budget; but pages that don't fit would be read
    again for every token, and through the cache that is slower than directly.
    """
    if asked != "auto":
        return "mmap" if asked == "mmap" else "direct"
    return "mmap" if streamed_bytes <= SHARE_OF_FREE_MEMORY * free_bytes else "direct"


def serve(
    outline: Outline,
    homes: Mapping[str, DeviceId],
    execution: Mapping[str, DeviceId],
    *,
    io: Io,
    packed: Collection[str] = (),
) -> dict[str, Serving]:
    """Return how each tensor is served that isn't resident where it computes.

    ``homes`` has every tensor's device, tied names included; ``execution`` that of every module that holds tensors.
    The leaders that are ``packed`` lie so on the host.
    """
    placed = (
        (name, serving_of(outline, name, homes, computes=execution[module], io=io, packed=packed))
        for module, names in outline.direct.items()
        for name in names
    )
    return {name: serving for name, serving in placed if serving is not None}


def serving_of(
    outline: Outline,
    name: str,
    homes: Mapping[str, DeviceId],
    *,
    computes: DeviceId,
    io: Io = "direct",
    packed: Collection[str] = (),
) -> Serving | None:
    """Return how the tensor ``name`` gets from its home to where it ``computes``; null where it is resident.

    ``homes`` has the device of every leader at least. A buffer that no checkpoint has (it isn't persistent) can't lie
    on disk: it waits on the host, where the constructor computed it.
    """
    home = homes[name] if name in homes else homes[outline.skeleton.leader(name)]
    if home == DISK and name in outline.computed:
        home = CPU
    rests_here = home == CPU and outline.skeleton.leader(name) in packed
    if home == computes and not rests_here:
        return None
    if name in outline.expert_tensors and is_offstage(outline.experts[parent(name)], homes, packed, computes=computes):
        return "experts"
    if home != DISK:
        return "packed" if rests_here else "copy"
    if computes != CPU:
        return "direct"
    if name in outline.lookups:
        return "rows"
    return "map" if io == "mmap" and name not in outline.packed else "direct"


def is_offstage(
    experts: ExpertsSpec, homes: Mapping[str, DeviceId], packed: Collection[str], *, computes: DeviceId
) -> bool:
    """Return whether ``experts`` lie elsewhere than where they compute, or ``packed``, all of their tensors.

    Where a map keeps some of the tensors, the others are streamed whole: an expert is brought with all it has, or not.
    """
    return all(homes[name] != computes or name in packed for name in experts.tensors)


def routed(serving: Mapping[str, Serving]) -> tuple[str, ...]:
    """Return the tensors of which those experts are brought that tokens are routed to."""
    return tuple(name for name, how in serving.items() if how == "experts")


def is_streamed(serving: Serving | None) -> bool:
    """Return whether all of the tensor is brought in for each use."""
    return serving not in (None, "rows", "experts")


def is_unpacked(outline: Outline, name: str, serving: Serving) -> bool:
    """Return whether all of the tensor ``name`` is unpacked for each use."""
    return serving in ("direct", "packed") and name in outline.packed


def waits_on(serving: Serving) -> DeviceId:
    """Return where a tensor waits between its uses, as far as it matters to what brings it: on disk, or in memory."""
    return CPU if serving in ("copy", "packed") else DISK
