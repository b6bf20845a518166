"""Which prompts are decoded together.

A batch has one set of options, and prompts of like length, so that little of it is padding. It is made of the prompts
alone: a run that goes on where another was killed makes the same ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from offstage.stages.inputs.batches import by_length
from offstage.stages.inputs.generate_options import LOOKUP

ALONE = (LOOKUP,)
"""Options that transformers takes for one sequence at a time only. Prompts with media are taken one at a time too."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One prompt to answer: its place among all, its token ids, its seed, and all options that it is answered with.

    One ``with_media`` has no token ids yet: its processor makes them, with all else that the model is given.
    """

    index: int
    ids: Sequence[int]
    seed: int
    options: Mapping[str, Any] = field(default_factory=dict)
    with_media: bool = False


def make_batches(asked: Sequence[Asked], *, size: int | None, alone: bool, padded: bool = True) -> list[list[Asked]]:
    """Return ``asked`` in batches of at most ``size`` prompts (null: any number), or each ``alone``.

    Unless they can be ``padded`` the prompts of a batch have one length. In a batch they keep their order; the batches
    with the longest prompts come first, so that what doesn't fit shows at once.
    """

    batches: list[list[Asked]] = []
    for group in _groups(asked, lambda one: (json.dumps(one.options, sort_keys=True), one.with_media)):
        single = alone or group[0].with_media or any(group[0].options.get(option) for option in ALONE)
        places = by_length([len(one.ids) for one in group], size=1 if single else size, padded=padded)
        batches += [[group[place] for place in batch] for batch in places]
    return batches


def _groups(asked: Sequence[Asked], key: Callable[[Asked], Hashable]) -> Iterator[list[Asked]]:
    groups: dict[Hashable, list[Asked]] = {}
    for one in asked:
        groups.setdefault(key(one), []).append(one)
    yield from groups.values()
