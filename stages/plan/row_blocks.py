"""Weights that not even the reserve can hold whole: they are brought by blocks of rows, where the bits allow it.

A linear layer's product is computed a block of its weight's rows at a time. So the least memory isn't the largest
weight (a head of 128k words), and falls to the largest block or to the largest part that can't be divided. Where the
reserve can hold a weight, it comes whole: blocks cost a call each.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from offstage.stages.empty_init.skeleton import TensorSpec, parent
from offstage.stages.machine.row_products import LEAST_ROWS
from offstage.stages.plan.outline import Outline
from offstage.stages.units import DeviceId


def divisible(outline: Outline) -> frozenset[str]:
    """Return the weights that can be brought by blocks of rows: products in their dtype are ``exact`` so.

    They are those of linear layers that nobody else reads. What rests packed is one where its rows can be had alone.
    """
    possible = list(_possible(outline))
    exact = outline.exact() if outline.exact and possible else ()
    return frozenset(spec.name for spec in possible if spec.dtype in exact)


def possible_dtypes(outline: Outline) -> list[str]:
    """Return the dtypes of the weights that can be brought by blocks of rows if products in these are exact."""
    return sorted({spec.dtype for spec in _possible(outline)})


def _possible(outline: Outline) -> Iterator[TensorSpec]:
    borrowed = outline.skeleton.borrowers.keys() | outline.skeleton.expert_of.keys()
    for module in outline.skeleton.modules:
        spec = outline.skeleton.by_name.get(f"{module.name}.weight") if module.multiplies else None
        if spec is None or module.name in borrowed or spec.shape[0] <= LEAST_ROWS:
            continue
        if spec.packed is None or spec.packed.by_row:
            yield spec


def least_sizes(outline: Outline) -> dict[str, int]:
    """Return the bytes of every tensor that there must be room for at once, by name: of what is divisible a block."""
    return outline.sizes | {name: LEAST_ROWS * _row_bytes(outline, name) for name in divisible(outline)}


def block_sizes(outline: Outline, rows: Mapping[str, int]) -> dict[int, int]:
    """Return the bytes of the weights that come by blocks of so many ``rows``, and those of a block.

    Of weights of the same bytes, which may have rows of different lengths, it is the largest block.
    """
    found: dict[int, int] = {}
    for name, count in rows.items():
        size = outline.sizes[name]
        found[size] = max(found.get(size, 0), count * _row_bytes(outline, name))
    return found


def least_blocks(outline: Outline) -> dict[int, int]:
    """Return the ``block_sizes`` at the least; it isn't asked in which dtypes products are exact so."""
    return block_sizes(outline, {spec.name: LEAST_ROWS for spec in _possible(outline)})


def block_rows(
    outline: Outline,
    brought: Collection[str],
    execution: Mapping[str, DeviceId],
    reserves: Mapping[DeviceId, int],
    *,
    least: bool = False,
) -> dict[str, int]:
    """Return how many rows of a weight come at a time, for those of ``brought`` whose module has more than the reserve.

    ``execution`` has where each module computes, ``reserves`` what each device keeps free. The next block comes while
    one computes, so they are doubled as long as two have room; they are the ``least`` where a product with one is to
    take little beside it.
    """
    modules: dict[str, list[str]] = {}
    for name in brought:
        modules.setdefault(parent(name), []).append(name)
    found: dict[str, int] = {}
    for module, names in modules.items():
        room = reserves.get(execution[module], 0)
        if sum(outline.sizes[name] for name in names) <= room:
            continue
        divided = divisible(outline).intersection(names)
        beside = sum(outline.sizes[name] for name in names if name not in divided)
        left = 0 if least else room - beside
        for name in (name for name in names if name in divided):
            found[name] = LEAST_ROWS
            while 4 * found[name] * _row_bytes(outline, name) <= left:
                found[name] *= 2
    return found


def _row_bytes(outline: Outline, name: str) -> int:
    return outline.sizes[name] // outline.skeleton.by_name[name].shape[0]
