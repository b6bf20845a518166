"""Which host computes which part of a model.

A model's repeated blocks run one after another and pass on little, so that is where it is cut: each host has a run of
them. What stands around the blocks is small and computed by all alike (norms, rotary tables, rows of an embedding), but
for the head, whose product is made by the host of the last block.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from offstage.pipeline.errors import ConfigError
from offstage.stages.empty_init.skeleton import Skeleton, TensorSpec, parent, upward
from offstage.stages.machine.hosts import KEY


@dataclass(frozen=True, slots=True)
class Chain:
    """What can be cut: the blocks of each of the ``stacks`` (list → blocks), in the order in which they run.

    ``head`` is the one linear layer that makes the model's output of the last block's, null where it is made otherwise.
    ``is_plain`` says that nothing but norms lies between the two, and that its product alone is what a forward is for.
    """

    stacks: Mapping[str, tuple[str, ...]]
    head: str | None
    is_plain: bool

    @property
    def length(self) -> int:
        """How many blocks there are."""
        return sum(map(len, self.stacks.values()))


@dataclass(frozen=True, slots=True)
class Partition:
    """Which of the hosts computes which block: each of a stack from its cut on up to the next host's.

    ``cuts`` has one number of a block for each host, and one more, by stack. The ``head``, if there is one, is computed
    by the host of the last block. ``shares_end`` has the stacks whose last block's output every host is sent.
    """

    blocks: Mapping[str, tuple[str, ...]]
    cuts: Mapping[str, tuple[int, ...]]
    head: str | None
    shares_end: tuple[str, ...]

    @property
    def hosts(self) -> int:
        """How many hosts there are."""
        return len(next(iter(self.cuts.values()))) - 1

    def owner(self, stack: str, place: int) -> int:
        """Return the host that computes the block at ``place`` of ``stack``."""
        return bisect_right(self.cuts[stack], place, hi=self.hosts) - 1

    @property
    def last(self) -> int:
        """The host of the last block, which computes the head."""
        stack = list(self.cuts)[-1]
        return self.owner(stack, len(self.blocks[stack]) - 1)

    def own(self, host: int, stack: str) -> range:
        """Return the places of the blocks in ``stack`` that ``host`` computes."""
        return range(self.cuts[stack][host], self.cuts[stack][host + 1])

    def away(self, host: int) -> frozenset[str]:
        """Return the names of the modules that others compute for ``host``."""
        blocks = {
            name
            for stack, names in self.blocks.items()
            for place, name in enumerate(names)
            if place not in self.own(host, stack)
        }
        return frozenset(blocks | ({self.head} if self.head is not None and host != self.last else set()))

    def describe(self, host: int) -> str:
        """Return which blocks ``host`` computes, in words."""
        runs = {stack: self.own(host, stack) for stack in self.blocks}
        return ", ".join(f"{stack} {run[0]}-{run[-1]}" for stack, run in runs.items() if run)


def chain_of(skeleton: Skeleton) -> Chain:
    """Return where the model of ``skeleton`` can be cut; a ``ConfigError`` where that can't be told.

    The blocks are those that keep something of a sequence from one forward to the next, and those of an encoder whose
    states are kept; where none does, those of the largest list. Towers for images and sounds are no part of it: they
    run once, and every host has them.
    """
    if skeleton.unrehearsed is not None:
        raise ConfigError(
            f"{KEY}: {skeleton.model_class} couldn't be traced with fake tensors ({skeleton.unrehearsed}), "
            "so the order of its parts isn't known, and it can't be divided; leave hosts null"
        )
    stacks = _stacks(skeleton)
    if not stacks:
        raise ConfigError(f"{KEY}: {skeleton.model_class} has no repeated blocks to divide among hosts; leave it null")
    inside = {name for blocks in stacks.values() for name in blocks}
    final = list(stacks.values())[-1][-1]
    called = [name for name in skeleton.calls if not inside.intersection(upward(name))]
    ends = [place for place, name in enumerate(skeleton.calls) if final in upward(name)]
    after = {name for name in skeleton.calls[ends[-1] :] if name in called} if ends else set[str]()
    linear = {module.name for module in skeleton.modules if module.multiplies}
    heads = [name for name in after if name in linear]
    others = [spec for name in after - set(heads) for spec in skeleton.by_module.get(name, ())]
    head = heads[0] if len(heads) == 1 and skeleton.calls.count(heads[0]) == 1 else None
    # An encoder returns its last states too, beside what a pooler, its only head, makes of them.
    is_plain = head is not None and bool(skeleton.caches) and all(len(spec.shape) <= 1 for spec in others)
    return Chain(stacks, head, is_plain=is_plain)


def _stacks(skeleton: Skeleton) -> dict[str, tuple[str, ...]]:
    """Return the lists of blocks that can be divided, in the order in which they first run."""
    classes = {module.name: module.class_name for module in skeleton.modules}
    listed: dict[str, list[str]] = {}
    around = (above for called in skeleton.order for above in reversed([*upward(called)]))
    for name in dict.fromkeys(around):
        if name.rpartition(".")[2].isdigit() and classes.get(name) in skeleton.no_split:
            listed.setdefault(parent(name), []).append(name)
    caching = {block for cache in skeleton.caches for block in cache.blocks if block}
    once = set(skeleton.once)
    running = {name: blocks for name, blocks in listed.items() if caching.intersection(blocks)}
    if not running and listed:
        sizes = {name: sum(spec.bytes for spec in _tensors(skeleton, blocks)) for name, blocks in listed.items()}
        running = {(largest := max(sizes, key=sizes.__getitem__)): listed[largest]}
    encoders = {
        name: blocks
        for name, blocks in listed.items()
        if once and all(parent(spec.name) in once for spec in _tensors(skeleton, blocks))
    }
    return {
        name: tuple(blocks) for name, blocks in listed.items() if len(blocks) > 1 and name in {**running, **encoders}
    }


def _tensors(skeleton: Skeleton, names: Collection[str]) -> Iterator[TensorSpec]:
    """Yield the tensors of the modules ``names``."""
    return (spec for spec in skeleton.tensors if any(above in names for above in upward(spec.name)))


def partition_of(chain: Chain, cuts: Sequence[int]) -> Partition:
    """Return the partition whose host number i computes the blocks of the whole chain from ``cuts[i]`` up to the next.

    ``cuts`` begin with 0 and end with the chain's length.
    """
    cuts_of, begin = dict[str, tuple[int, ...]](), 0
    for stack, blocks in chain.stacks.items():
        cuts_of[stack] = tuple(min(max(cut - begin, 0), len(blocks)) for cut in cuts)
        begin += len(blocks)
    *earlier, last = chain.stacks
    passes_on = chain.is_plain and all(first < after for first, after in pairwise(cuts_of[last]))
    return Partition(chain.stacks, cuts_of, chain.head, (*earlier, *(() if passes_on else (last,))))


def share(skeleton: Skeleton, away: Collection[str]) -> Skeleton:
    """Return ``skeleton`` as a host has it for which others compute the modules ``away``: without what is in them."""

    def stays(name: str) -> bool:
        return not any(above in away for above in upward(name))

    def staying(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(filter(stays, names))

    tied = (staying(group) for group in skeleton.tied)
    caches = (replace(cache, blocks=staying(cache.blocks)) for cache in skeleton.caches)
    products = (replace(alike, tensors=staying(alike.tensors)) for alike in skeleton.products)
    borrowers = {name: staying(names) for name, names in skeleton.borrowers.items() if stays(name)}
    return replace(
        skeleton,
        tensors=tuple(spec for spec in skeleton.tensors if stays(spec.name)),
        modules=tuple(module for module in skeleton.modules if stays(module.name)),
        tied=tuple(group for group in tied if len(group) > 1),
        order=staying(skeleton.order),
        calls=staying(skeleton.calls),
        borrowers={name: names for name, names in borrowers.items() if names},
        caches=tuple(cache for cache in caches if cache.blocks),
        written={name: module for name, module in skeleton.written.items() if stays(name)},
        experts=tuple(spec for spec in skeleton.experts if stays(spec.module)),
        expert_lists={name: count for name, count in skeleton.expert_lists.items() if stays(name)},
        once=staying(skeleton.once),
        products=tuple(alike for alike in products if alike.tensors),
    )
