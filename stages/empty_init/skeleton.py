"""The skeleton as data: all that is known of a model but the values of its weights.

A ``Skeleton`` holds no tensors and needs no torch, so that a plan can be made from a cached ``skeleton.json`` in
milliseconds. ``describe.py`` makes one from a live module.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from operator import mul
from pathlib import Path
from typing import Literal

from offstage.pipeline.atomic_files import write_text
from offstage.stages.machine.kernels import Kernels
from offstage.stages.units import tensor_bytes

FILE_NAME = "skeleton.json"


@dataclass(frozen=True, slots=True)
class DeviceUnpacking:
    """What unpacking a tensor on an accelerator takes there beside what comes of it, in bytes: blocks that have come
    over the link, temporaries, and tables; and the bytes that it reads and writes there.
    """

    landing_bytes: int
    scratch_bytes: int
    table_bytes: int
    moved_bytes: int


@dataclass(frozen=True, slots=True)
class PackedSpec:
    """What a tensor rests in, where that is other than as it is used: the name of its ``codec``, and its ``bytes``.

    The threads that unpack it take ``working_bytes`` together at most: what they read into, and what is made on the
    way.
    ``by_row`` says that a row of it can be had without the others. ``device`` is what it takes an
    accelerator to unpack it, null where only the host can.
    """

    codec: str
    bytes: int
    working_bytes: int
    by_row: bool = False
    device: DeviceUnpacking | None = None


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One parameter or buffer: dotted ``name``, ``shape`` in elements, ``dtype`` as torch names it (``bfloat16``).

    ``packed`` is null where it rests as it is used, and where it must be made of what the checkpoint has.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    kind: Literal["parameter", "buffer"] = "parameter"
    persistent: bool = True
    packed: PackedSpec | None = None

    @property
    def bytes(self) -> int:
        """The size of the tensor's data in bytes, as it is used."""
        return tensor_bytes(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class ModuleSpec:
    """One module: its dotted ``name`` (``""`` is the model) and the name of its class.

    ``looks_up`` says that it is an embedding: a call reads a few rows of its weight. ``multiplies`` says that it is a
    linear layer: each number of its result depends on one row of its weight. ``multiplies_packed`` says the same of one
    whose weight stays packed, by rows.
    """

    name: str
    class_name: str
    looks_up: bool = False
    multiplies: bool = False
    multiplies_packed: bool = False


@dataclass(frozen=True, slots=True)
class PackedProducts:
    """Weights, all alike, that are multiplied as they rest: matrices in ``parts``, each of a dtype and a shape.

    ``matrix_text`` is what their products are told of them (see ``codecs.packed_matrices``), but for what is one
    weight's own. What they multiply is rounded to the dtype ``compute`` first, if there is one, and multiplied in
    ``tiles`` or not. ``tensors`` (full names) are all that they rest in, those of experts each with a row for one.
    """

    matrix_text: str
    parts: tuple[tuple[str, tuple[int, ...]], ...]
    compute: str | None
    tiles: bool
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """The experts of one layer of a mixture: the ``module`` whose forward is told which of them each token uses.

    ``count`` experts lie in the ``tensors`` (full names), each along the first dimension: one expert is a row of every
    one. ``per_token`` of them compute for a token.
    """

    module: str
    count: int
    per_token: int
    tensors: tuple[str, ...]


def monomials(sequences: int, length: int) -> tuple[int, ...]:
    """Return what the sizes of a forward's tensors are sums of, for ``sequences`` of ``length`` tokens each."""
    tokens = sequences * length
    return 1, sequences, length, tokens, length * length, tokens * length


@dataclass(frozen=True, slots=True)
class Moment:
    """What one moment of a forward holds beside weights and cache, at any shape of the request.

    ``activations`` are the bytes of tensors, as coefficients of the ``monomials``. ``kernel`` names the product that is
    computed, as ``offstage.stages.machine.kernels`` does, or is empty; ``operands`` are the bytes of its left operand,
    its right one and its result: what the kernel takes beside, on whatever machine, is in proportion to them.
    """

    activations: tuple[float, ...]
    kernel: str = ""
    operands: tuple[tuple[float, ...], ...] = ()

    def before(self, sequences: int, length: int) -> int:
        """Return the bytes of activations without the product's result: as they are before it is computed."""
        terms = monomials(sequences, length)
        live, result = (
            sum(factor * term for factor, term in zip(factors, terms, strict=True))
            for factors in (self.activations, self.operands[2])
        )
        return max(0, round(live - result))

    def at(
        self, sequences: int, length: int, kernels: Kernels, *, blocks: Mapping[int, int] | None = None
    ) -> tuple[int, int]:
        """Return the bytes of activations, and of scratch with ``kernels``, for ``sequences`` of ``length`` tokens.

        ``blocks`` has the bytes of weights that are multiplied by blocks of rows, and those of a block.
        """
        terms = monomials(sequences, length)
        live, *operands = (
            sum(factor * term for factor, term in zip(factors, terms, strict=True))
            for factors in (self.activations, *self.operands)
        )
        for whole, block in (blocks or {}).items():
            if operands and round(operands[1]) in (whole, whole * sequences):  # a batch has it for each sequence
                operands[1:] = [operand * block / whole for operand in operands[1:]]
                live += operands[2]  # the block's product, beside that of all rows
                break
        beside = sum(map(mul, kernels.get(self.kernel, ()), operands))
        return max(0, round(live)), max(0, round(beside))


@dataclass(frozen=True, slots=True)
class CacheSpec:
    """What each of ``blocks``, modules that are alike, keeps of a sequence from one forward to the next, in bytes.

    That is ``state_bytes`` whatever its length, ``position_bytes`` for each of its tokens, or for the last ones that a
    ``window`` holds, and ``encoded_bytes`` for each position that an encoder beside made of it. What the model keeps
    outside of its blocks has the name of the model, which is empty.
    """

    blocks: tuple[str, ...]
    state_bytes: float = 0
    position_bytes: float = 0
    encoded_bytes: float = 0
    window: int | None = None

    @property
    def keeps_all(self) -> bool:
        """Whether keys and values of all positions are all that it is, an encoder's among them."""
        return self.window is None and not self.state_bytes

    def after_prompt(self, positions: int, *, encoded: int) -> float:
        """Return the bytes of one block and sequence after the first forward: of all ``positions``.

        A window's keys are then a view of all of them; the next token's forward lets go of those outside of it.
        """
        return self.state_bytes + self.position_bytes * positions + self.encoded_bytes * encoded

    def after_token(self, positions: int, *, encoded: int) -> float:
        """Return the bytes of one block and sequence after a forward of one token, with so many ``positions`` then."""
        in_window = positions if self.window is None else min(positions, self.window)
        return self.after_prompt(in_window, encoded=encoded)


@dataclass(frozen=True)
class Skeleton:
    """A model without its data: what a meta model is, and what a fake-tensor trace (a rehearsal) showed of it.

    ``tensors`` lists every name, tied ones each under its own name, in the order of registration. ``tied`` groups the
    names that share one tensor, each group sorted; the first name of a group stands for it. ``no_split`` names the
    classes whose modules compute on one device. ``order`` lists the modules in the order in which they are first
    called; ``calls`` the modules that hold tensors directly, in the order of every call, repeats included.
    ``unrehearsed`` says why the order had to be that of registration, and is null where a rehearsal gave it.
    ``borrowers`` lists, for a module whose tensors other modules' code reads directly, those other modules (a
    mixer that reads the weight of its convolution without calling it). ``moments`` are those of a forward that can be
    the peak of what it holds beside weights; none where no rehearsal gave them. ``caches`` are what such a forward
    leaves for the next one, by kind of block. Those of ``decoding`` are of that next one, after so many positions; none
    where it couldn't be rehearsed.
    ``written`` has the tensors that the model's own code changes in place, each with the module that does.
    ``experts`` are those of a mixture whose experts can be brought one by one, in the order of registration.
    ``expert_lists`` are those whose experts are modules in a list, of which a forward calls some: each such list, and
    how many of its members a token uses. ``once`` lists the modules with tensors of an encoder-decoder that the first
    token's forward alone calls: what they make is kept. ``products`` are those of weights that are multiplied as they
    rest.
    """

    tensors: tuple[TensorSpec, ...]
    modules: tuple[ModuleSpec, ...]
    tied: tuple[tuple[str, ...], ...] = ()
    no_split: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    calls: tuple[str, ...] = ()
    borrowers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unrehearsed: str | None = None
    model_class: str = ""
    moments: tuple[Moment, ...] = ()
    caches: tuple[CacheSpec, ...] = ()
    decoding: tuple[Moment, ...] = ()
    written: Mapping[str, str] = field(default_factory=dict)
    experts: tuple[ExpertsSpec, ...] = ()
    expert_lists: Mapping[str, int] = field(default_factory=dict)
    once: tuple[str, ...] = ()
    products: tuple[PackedProducts, ...] = ()

    @cached_property
    def by_name(self) -> dict[str, TensorSpec]:
        """Every tensor by its name."""
        return {tensor.name: tensor for tensor in self.tensors}

    @cached_property
    def by_module(self) -> dict[str, list[TensorSpec]]:
        """The tensors that each module holds itself; modules that hold none aren't there."""
        tensors: dict[str, list[TensorSpec]] = {}
        for tensor in self.tensors:
            tensors.setdefault(parent(tensor.name), []).append(tensor)
        return tensors

    @cached_property
    def _groups(self) -> dict[str, tuple[str, ...]]:
        return {name: group for group in self.tied for name in group}

    def names_of(self, name: str) -> tuple[str, ...]:
        """Return all names of the tensor ``name``: its own, or those of its tied group."""
        return self._groups.get(name, (name,))

    def leader(self, name: str) -> str:
        """Return the name that stands for the tensor ``name``: its own, or the first of its tied group."""
        return self.names_of(name)[0]

    @cached_property
    def unique(self) -> tuple[TensorSpec, ...]:
        """The tensors, tied ones once."""
        return tuple(tensor for tensor in self.tensors if self.leader(tensor.name) == tensor.name)

    @cached_property
    def expert_of(self) -> dict[str, str]:
        """The member of ``expert_lists`` that each module with tensors is in; those in none aren't there."""
        inside = ((name, above) for name in self.by_module for above in upward(name) if above)
        return {name: above for name, above in inside if parent(above) in self.expert_lists}

    @property
    def bytes(self) -> int:
        """The bytes of all parameters and buffers, tied ones counted once."""
        return sum(tensor.bytes for tensor in self.unique)

    @property
    def rest_bytes(self) -> int:
        """The same as they rest: of what is packed the bytes at rest."""
        return sum(tensor.packed.bytes if tensor.packed else tensor.bytes for tensor in self.unique)

    @property
    def parameters(self) -> dict[str, int]:
        """How many parameters there are, tied ones counted once: dtype → count."""
        counts: dict[str, int] = {}
        for tensor in self.unique:
            if tensor.kind == "parameter":
                counts[tensor.dtype] = counts.get(tensor.dtype, 0) + math.prod(tensor.shape)
        return counts

    def save(self, folder: Path) -> None:
        """Write ``skeleton.json`` into ``folder``."""
        write_text(folder / FILE_NAME, json.dumps(asdict(self), indent=1) + "\n")


def parent(name: str) -> str:
    """Return the dotted name of the module that holds ``name``."""
    return name.rpartition(".")[0]


def upward(name: str) -> Iterator[str]:
    """Yield ``name`` and the names of all modules around it, the model's ``""`` last."""
    while name:
        yield name
        name = parent(name)
    yield ""


def longest_prefix(name: str, device_map: Mapping[str, object]) -> str | None:
    """Return the longest of ``name`` and the modules around it that ``device_map`` has, ``""`` the last; else null."""
    return next((prefix for prefix in upward(name) if prefix in device_map), None)
