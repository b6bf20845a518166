"""What the modules of any ``nn.Module`` weigh: the field's functions for sizes, and the outline they are read from."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import TensorSpec, upward
from offstage.stages.plan.outline import Outline
from offstage.stages.units import DTYPE_BYTES, parse_size

Classes = str | Iterable[str] | None


def compute_module_sizes(
    model: nn.Module,
    dtype: Any = None,
    special_dtypes: Mapping[str, Any] | None = None,
    buffers_only: bool = False,
) -> dict[str, int]:
    """Return the bytes of every module, parameter and buffer by dotted name; ``""`` is the whole model.

    With ``dtype`` each tensor counts at the smaller of its own and that dtype, integers at their own; a dtype in
    ``special_dtypes``, by tensor name, wins. Within each module a tied tensor counts once. What has no tensors is 0.
    """
    outline = outline_of(model, dtype=dtype, special_dtypes=special_dtypes)
    leader = outline.skeleton.leader
    sizes: dict[str, int] = defaultdict(int)
    counted: set[tuple[str, str]] = set()
    for tensor in outline.skeleton.tensors:
        if buffers_only and tensor.kind != "buffer":
            continue
        for name in upward(tensor.name):
            if (name, leader(tensor.name)) not in counted:
                counted.add((name, leader(tensor.name)))
                sizes[name] += outline.sizes[tensor.name]
    return sizes


def get_max_layer_size(
    modules: Sequence[tuple[str, Any]], module_sizes: Mapping[str, int], no_split_module_classes: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the bytes of the largest layer among ``modules`` (pairs of name and module), and the names that have it.

    A layer is what is never split: a module of one of ``no_split_module_classes``, or one without children.
    """
    layers = dict(_layers(modules, set(no_split_module_classes)))
    largest = max((module_sizes[name] for name in layers), default=0)
    return largest, [name for name in layers if module_sizes[name] == largest]


def compute_module_total_buffer_size(
    model: nn.Module, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> int:
    """Return the bytes of all buffers of ``model``; the dtypes are taken as ``compute_module_sizes`` takes them."""
    return compute_module_sizes(model, dtype=dtype, special_dtypes=special_dtypes, buffers_only=True).get("", 0)


def calculate_maximum_sizes(model: nn.Module) -> tuple[int, tuple[int, list[str]]]:
    """Return the bytes of ``model``, and those of its largest layer with the names of the layers that have them.

    A layer is never split: see ``get_max_layer_size``; the classes are those that a transformers model declares.
    """
    sizes = compute_module_sizes(model)
    pieces = [*model.named_parameters(recurse=False), *model.named_children(), *model.named_buffers(recurse=False)]
    return sizes[""], get_max_layer_size(pieces, sizes, list(getattr(model, "_no_split_modules", None) or ()))


def convert_file_size_to_int(size: int | str) -> int:
    """Return ``size`` in bytes: what ``parse_size`` accepts, and a small b after a power of ten for bits.

    >>> convert_file_size_to_int("1MiB"), convert_file_size_to_int("8Mb")
    (1048576, 1000000)
    """
    in_bits = isinstance(size, str) and size.endswith("b") and not size.upper().endswith("IB")
    return parse_size(f"{str(size)[:-1]}B") // 8 if in_bits else parse_size(size)


def dtype_byte_size(dtype: object) -> float:
    """Return the bytes of one element of ``dtype``: torch's, its name, or an enum of names (``int4`` takes a half).

    A bool counts an eighth, as the field's function has it, though torch keeps each in a byte of its own. What is no
    dtype is a ``ValueError``.
    """
    name = _dtype(dtype)
    return 1 / 8 if name == "bool" else DTYPE_BYTES[name]


def _layers(modules: Iterable[tuple[str, Any]], no_split: Collection[str]) -> Iterator[tuple[str, Any]]:
    """Yield those of ``modules``, and of the modules in them, that are never split, in order."""
    for name, module in modules:
        children = dict(module.named_children()) if isinstance(module, nn.Module) else {}
        if children and type(module).__name__ not in no_split:
            inner = ((f"{name}.{child}" if name else child, below) for child, below in children.items())
            yield from _layers(inner, no_split)
        else:
            yield name, module


def outline_of(
    model: nn.Module, no_split: Classes = (), *, dtype: Any = None, special_dtypes: Mapping[str, Any] | None = None
) -> Outline:
    """Return the outline of ``model`` in the order of registration, its tensors at the dtypes asked for."""
    classes = [no_split] if isinstance(no_split, str) else list(no_split or ())
    skeleton = describe(model, no_split=classes, rehearsed=False)
    special = {name: _dtype(value) for name, value in (special_dtypes or {}).items()}
    wanted = None if dtype is None else _dtype(dtype)
    tensors = tuple(_cast(tensor, wanted, special.get(tensor.name)) for tensor in skeleton.tensors)
    return Outline(replace(skeleton, tensors=tensors), gathers=False, routes=False)


def _cast(tensor: TensorSpec, wanted: str | None, special: str | None) -> TensorSpec:
    """Return ``tensor`` at its special dtype, or at the smaller of its own and the wanted one if it isn't integral."""
    if special is not None:
        return replace(tensor, dtype=special)
    integral = tensor.dtype.startswith(("int", "uint", "bool"))
    if wanted is None or integral or DTYPE_BYTES[tensor.dtype] <= DTYPE_BYTES[wanted]:
        return tensor
    return replace(tensor, dtype=wanted)


def _dtype(value: object) -> str:
    """Return the name of a dtype that is given as torch's, by name, or as an enum of names."""
    name = dtype_name(getattr(value, "value", value))
    if name not in DTYPE_BYTES:
        raise ValueError(f"{value!r} is not a dtype; accepted: {', '.join(DTYPE_BYTES)}")
    return name
