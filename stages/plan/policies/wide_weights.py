"""Placements on the host of which the widest weights come by blocks of rows, and the others partly stay.

A head of 128k words is the largest part of most models. What holds it whole, or a reserve for it, has less room for all
else; and a product with it can take as much again beside it, where a kernel copies its weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement, resident_bytes
from offstage.stages.plan.policies.even_choice import fitting
from offstage.stages.plan.row_blocks import divisible, least_sizes
from offstage.stages.units import CPU, DISK

Split = Callable[[int, frozenset[str]], Iterator[Placement]]
"""Yields the placements of partly resident layers in so many bytes on the host, of which some tensors are streamed."""


def with_wide_streamed(outline: Outline, room: int, split: Split) -> Iterator[Placement]:
    """Yield the placements in ``room`` bytes of which the widest weights come by blocks of rows, the best of each kind.

    That are the widest alone, or those of the two widest sizes, and so on.
    """
    least = least_sizes(outline)
    for wide in _wide_sets(outline):
        block = max(least[name] for leader in wide for name in outline.skeleton.names_of(leader))
        for placement in split(room - block, wide):
            away = {name for name, home in placement.homes.items() if home == DISK} - wide - outline.lookups
            left = room - resident_bytes(outline, placement.homes)[CPU] - outline.two_largest(away) - block
            more = fitting(outline, away, max(0, left))
            yield replace(placement, homes={**placement.homes, **dict.fromkeys(more, CPU)})


def _wide_sets(outline: Outline) -> Iterator[frozenset[str]]:
    """Yield the leaders of the widest divisible weights, of the two widest sizes, and so on; tied tables count too."""
    divided = divisible(outline)
    users = {
        name: set(outline.skeleton.names_of(name)) - outline.lookups for layer in outline.layers for name in layer.owned
    }
    wide = {leader: outline.sizes[leader] for leader, names in users.items() if names and names <= divided}
    for least in sorted(set(wide.values()), reverse=True):
        yield frozenset(leader for leader, size in wide.items() if size >= least)
