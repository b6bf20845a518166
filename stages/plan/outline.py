"""The skeleton as a tree, cut into the layers that a policy places.

A layer is what is never torn apart by a policy that places whole layers: a no-split module, a leaf module, or a tensor
that belongs to a module with children. The layers stand in the order of execution, so that a policy which fills device
after device cuts the model where the activations cross from one device to the next only once.

Tied tensors belong to the layer that executes first. A leaf module that shares one of its tensors with an earlier layer
follows it with its other tensors too (the bias of a tied head lies beside the embedding): it computes on one device.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offstage.stages.empty_init.skeleton import DeviceUnpacking, ExpertsSpec, PackedSpec, Skeleton, parent, upward
from offstage.stages.plan.serving import Line

PARTS, PARTS_UNPACKED = 2, 4
"""How many of the largest parts are to have room at once: one computes while others are read, or read and unpacked."""


def read_on(layers: Iterable[Sequence[int]]) -> Iterator[tuple[int, int]]:
    """Yield the bytes of the largest part that streams of each layer, and the staging memory that it takes for reading
    to go on while that is in use.

    Of ``layers``, in the order of execution, parts of these sizes stream; a part is what one module holds. What comes
    next is there by then, up to the largest of the following layer, which is on its way.
    """
    streamed = [parts for parts in layers if parts]
    for parts, following in zip(streamed, [*streamed[1:], *streamed[:1]], strict=True):
        yield max(parts), max(parts) + (sum(following) if len(streamed) > 1 else 0)


def most_unpacking_bytes(needs: Iterable[DeviceUnpacking | None]) -> int:
    """Return the bytes by which an accelerator unpacks any of what has such ``needs``; null ones it doesn't."""
    apart = [(one.landing_bytes, one.scratch_bytes, one.table_bytes) for one in needs if one is not None]
    return sum(map(max, zip(*apart, strict=True)))


@dataclass(frozen=True, slots=True)
class Layer:
    """One piece of the model that computes on one device.

    ``tensors`` are the names in it, tied ones included; ``owned`` the leaders that are placed with it, and ``bytes`` is
    their size. A layer whose tensors all belong to earlier ones owns nothing.
    """

    name: str
    tensors: tuple[str, ...]
    owned: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class ExpertKind:
    """What experts have in common that can lie in each other's slots: attribute, shape and dtype of their ``rows``.

    One of them has so many ``bytes``.
    """

    rows: tuple[tuple[str, tuple[int, ...], str], ...]
    bytes: int


@dataclass(frozen=True)
class Outline:
    """The tree of a skeleton's modules and its layers; everything is worked out once, on first use.

    ``gathers`` says that an embedding on disk is served row by row where the host computes: it is a lookup, and neither
    streamed nor given room for; and that of experts which are modules in a list those are brought that are called.
    ``routes`` says that of a mixture's stacked experts which lie elsewhere only those are brought that a token uses.
    Without both the layers are those that the field's own functions see. In which dtypes products by blocks of rows are
    ``exact`` is asked where it matters; see ``offstage.stages.plan.reserves``.
    """

    skeleton: Skeleton
    gathers: bool = True
    routes: bool = True
    exact: Callable[[], Collection[str]] | None = None

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every tensor by name, as it is used."""
        return {tensor.name: tensor.bytes for tensor in self.skeleton.tensors}

    @cached_property
    def packed(self) -> dict[str, PackedSpec]:
        """What those tensors rest in, by name, that rest otherwise than as they are used."""
        return {tensor.name: tensor.packed for tensor in self.skeleton.tensors if tensor.packed is not None}

    @cached_property
    def multiplied(self) -> frozenset[str]:
        """The names of all tensors that are multiplied as they rest."""
        return frozenset(name for products in self.skeleton.products for name in products.tensors)

    @cached_property
    def rest_sizes(self) -> dict[str, int]:
        """Bytes of every tensor by name, as it rests on disk."""
        return self.sizes | {name: packed.bytes for name, packed in self.packed.items()}

    @property
    def unpacking_bytes(self) -> int:
        """What the threads that unpack take on the host at most, if anything rests packed."""
        return max((packed.working_bytes for packed in self.packed.values()), default=0)

    @property
    def device_unpacking_bytes(self) -> int:
        """What an accelerator takes at most to unpack what comes to it packed, if torch can unpack any of it there."""
        return most_unpacking_bytes(packed.device for packed in self.packed.values())

    @cached_property
    def names(self) -> frozenset[str]:
        """Every name that a device map may use: modules and tensors."""
        return frozenset(self.sizes) | {module.name for module in self.skeleton.modules}

    @cached_property
    def direct(self) -> dict[str, list[str]]:
        """The tensors that each module holds itself."""
        owned = {name: [spec.name for spec in tensors] for name, tensors in self.skeleton.by_module.items()}
        return {module.name: [] for module in self.skeleton.modules} | owned

    @cached_property
    def children(self) -> dict[str, list[str]]:
        """The child modules of each module, in the order of execution."""
        children: dict[str, list[str]] = {module.name: [] for module in self.skeleton.modules}
        for module in self.skeleton.modules:
            if module.name:
                children.setdefault(parent(module.name), []).append(module.name)
        return {name: sorted(below, key=self._rank.__getitem__) for name, below in children.items()}

    @cached_property
    def _rank(self) -> dict[str, int]:
        """When each module, or the first one inside it, is called; what is never called follows its elder sibling."""
        first = {name: index for index, name in reversed(list(enumerate(self.skeleton.order)))}
        for name, borrowers in self.skeleton.borrowers.items():
            first.setdefault(name, min(first.get(borrower, len(first)) for borrower in borrowers))
        for name in list(first):
            above = parent(name)
            while above:
                first[above] = min(first.get(above, first[name]), first[name])
                above = parent(above)
        ranks: dict[str, int] = {}
        elder: dict[str, int] = {}
        for module in self.skeleton.modules:
            above = parent(module.name)
            ranks[module.name] = first.get(module.name, elder.get(above, ranks.get(above, 0)))
            elder[above] = ranks[module.name]
        return ranks

    @cached_property
    def _pieces(self) -> list[tuple[str, list[str]]]:
        """Every layer's name and tensors, in the order of execution."""
        classes = {module.name: module.class_name for module in self.skeleton.modules}
        pieces: list[tuple[str, list[str]]] = []
        stack = [("", False)]
        while stack:
            name, tensor = stack.pop()
            if tensor:
                pieces.append((name, [name]))
            elif classes.get(name) in self.skeleton.no_split or not self.children[name] or name in self.experts:
                pieces.append((name, self.below(name)))
            else:
                stack += [(child, False) for child in reversed(self.children[name])]
                stack += [(child, True) for child in reversed(self.direct[name])]
        pieces = [piece for piece in pieces if piece[1]]
        return sorted(pieces, key=lambda piece: self._rank[self._module(piece[0])])

    @cached_property
    def blocks(self) -> frozenset[str]:
        """The names of the no-split modules."""
        return frozenset(m.name for m in self.skeleton.modules if m.class_name in self.skeleton.no_split)

    @cached_property
    def lookups(self) -> frozenset[str]:
        """The tensors that are only ever looked up row by row; not where a row can't be had without the others."""
        tables = {module.name for module in self.skeleton.modules if module.looks_up} if self.gathers else set()
        looked_up = (name for name in self.sizes if parent(name) in tables - self.skeleton.borrowers.keys())
        return frozenset(looked_up) - {name for name, packed in self.packed.items() if not packed.by_row}

    @cached_property
    def tables(self) -> frozenset[str]:
        """The leaders of tensors that are only looked up, under all their names: on disk they cost next to nothing."""
        leaders = {self.skeleton.leader(name) for name in self.lookups}
        return frozenset(name for name in leaders if self.lookups.issuperset(self.skeleton.names_of(name)))

    @cached_property
    def experts(self) -> dict[str, ExpertsSpec]:
        """The modules whose experts can be brought one by one, in the order of registration."""
        return {spec.module: spec for spec in self.skeleton.experts} if self.routes else {}

    @cached_property
    def expert_tensors(self) -> frozenset[str]:
        """The tensors of which one expert is a row."""
        return frozenset(name for spec in self.experts.values() for name in spec.tensors)

    @cached_property
    def expert_kinds(self) -> dict[str, ExpertKind]:
        """What experts each of the ``experts`` has, by module."""
        by_name = self.skeleton.by_name
        return {
            module: ExpertKind(
                tuple((name.rpartition(".")[2], by_name[name].shape[1:], by_name[name].dtype) for name in spec.tensors),
                sum(self.sizes[name] for name in spec.tensors) // spec.count,
            )
            for module, spec in self.experts.items()
        }

    @cached_property
    def listed(self) -> dict[str, tuple[int, int]]:
        """The tensors of experts that are modules in a list: of how many a token uses how many."""
        expert_of = self.skeleton.expert_of if self.gathers else {}
        counts = Counter(map(parent, set(expert_of.values())))
        inside = {name: parent(expert_of[parent(name)]) for name in self.sizes if parent(name) in expert_of}
        return {name: (counts[above], self.skeleton.expert_lists[above]) for name, above in inside.items()}

    @cached_property
    def routed(self) -> dict[str, tuple[int, int]]:
        """The tensors of all experts, stacked or listed: of how many a token uses how many."""
        stacked = ((name, (spec.count, spec.per_token)) for spec in self.experts.values() for name in spec.tensors)
        return self.listed | dict(stacked)

    @cached_property
    def dense(self) -> Outline:
        """The model without its experts: what every token needs."""
        return self.without(self.routed)

    def without(self, names: Collection[str]) -> Outline:
        """Return the model without the tensors ``names``: of tied ones all, of experts that are stacked too."""
        tensors = tuple(spec for spec in self.skeleton.tensors if spec.name not in names)
        experts = tuple(spec for spec in self.skeleton.experts if spec.tensors[0] not in names)
        return replace(self, skeleton=replace(self.skeleton, tensors=tensors, experts=experts))

    def read_ahead_bytes(self, names: Iterable[str], *, unpacked: bool) -> int:
        """Return the bytes in use of the largest parts of ``names`` that are to have room at once.

        A part is what one module holds. There are two, one read while the other computes; four where what is read is
        also ``unpacked`` meanwhile.
        """
        parts: Counter[str] = Counter()
        for name in names:
            parts[parent(name)] += self.sizes[name]
        return sum(sorted(parts.values())[-(PARTS_UNPACKED if unpacked else PARTS) :])

    @cached_property
    def computed(self) -> frozenset[str]:
        """The buffers that no checkpoint has: the constructor computes them."""
        return frozenset(tensor.name for tensor in self.skeleton.tensors if not tensor.persistent)

    def _module(self, name: str) -> str:
        return parent(name) if name in self.sizes else name

    def below(self, name: str) -> list[str]:
        """Return the names of all tensors in the module ``name``, or ``name`` itself where it is a tensor."""
        if name in self.sizes:
            return [name]
        names: list[str] = []
        stack = [name]
        while stack:
            module = stack.pop()
            names += self.direct[module]
            stack += reversed(self.children[module])
        return names

    @cached_property
    def layers(self) -> tuple[Layer, ...]:
        """The layers in the order of execution."""
        owner: dict[str, int] = {}
        owned: list[list[str]] = [[] for _ in self._pieces]
        for index, (name, tensors) in enumerate(self._pieces):
            leaders = dict.fromkeys(map(self.skeleton.leader, tensors))
            fresh = [leader for leader in leaders if leader not in owner]
            elders = [owner[leader] for leader in leaders if leader in owner]
            leaf = name in self.sizes or not self.children[name]
            holder = min(elders) if leaf and elders else index
            owned[holder] += fresh
            owner |= dict.fromkeys(fresh, holder)
        return tuple(
            Layer(name, tuple(tensors), tuple(mine), sum(self.sizes[leader] for leader in mine))
            for (name, tensors), mine in zip(self._pieces, owned, strict=True)
        )

    @cached_property
    def leaders_of(self) -> dict[str, tuple[str, ...]]:
        """The leaders of each layer's tensors, by its name."""
        return {layer.name: tuple(map(self.skeleton.leader, layer.tensors)) for layer in self.layers}

    @cached_property
    def lines(self) -> dict[Hashable, Sequence[Line]]:
        """The lines of layers that were laid out, by all that they hang on: ``layout`` fills it."""
        return {}

    @cached_property
    def drawn_by(self) -> dict[str, tuple[str, ...]]:
        """The tensors that draw each layer to a device, by its name: its own, else those of others that it uses."""
        leaders = {name: tuple(dict.fromkeys(own)) for name, own in self.leaders_of.items()}
        return {
            layer.name: tuple(name for name in leaders[layer.name] if name in layer.owned) or leaders[layer.name]
            for layer in self.layers
        }

    @cached_property
    def around(self) -> dict[str, tuple[str, ...]]:
        """Each module that holds tensors or borrows some, with those of these that are around it; itself the first."""
        using = {parent(name) for name in self.sizes}.union(*self.skeleton.borrowers.values())
        return {name: tuple(above for above in upward(name) if above in using) for name in using}

    @cached_property
    def layer_of(self) -> dict[str, Layer]:
        """The layer that each tensor is a part of, by the tensor's name."""
        return {name: layer for layer in self.layers for name in layer.tensors}
