"""From a live module to its skeleton."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from torch import nn

from offstage.stages.checkpoints.codecs.ordered_linear import OrderedLinear
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.empty_init.activation_peaks import Weighed, weigh
from offstage.stages.empty_init.experts import describe_experts, find_expert_lists, guess_expert_lists
from offstage.stages.empty_init.fake_weights import REFUSALS, RefusedError, answered, rehearsing, unchanged_buffers
from offstage.stages.empty_init.rehearsal import Rehearsal, holds_tensors, rehearse, rehearse_next_token
from offstage.stages.empty_init.skeleton import ExpertsSpec, ModuleSpec, PackedProducts, Skeleton, TensorSpec, parent
from offstage.stages.empty_init.tied import find_tied_parameters, non_persistent_buffers


def describe(
    model: nn.Module,
    *,
    no_split: Iterable[str] | None = None,
    call: Callable[[nn.Module], object] | None = None,
    rehearsed: bool = True,
) -> Skeleton:
    """Return the skeleton of ``model``, all that a meta model is; its tensors may lie on any device.

    ``no_split`` names the classes whose modules compute on one device; by default what a transformers model
    declares. ``call`` runs the rehearsal's forward (see ``rehearse``). Code that fake tensors don't have the values
    for is rehearsed as ``deciding`` decides. A model that can't be rehearsed is described
    in the order of registration, and ``unrehearsed`` says why.

    >>> skeleton = describe(nn.Sequential(nn.Linear(4, 2)), rehearsed=False)
    >>> [(tensor.name, tensor.shape, tensor.dtype) for tensor in skeleton.tensors]
    [('0.weight', (2, 4), 'float32'), ('0.bias', (2,), 'float32')]
    """
    declared = getattr(model, "_no_split_modules", None) if no_split is None else no_split
    tied = find_tied_parameters(model)
    with unchanged_buffers(model), rehearsing(model):
        seen, refusal = _try_rehearsal(model, call) if rehearsed else (None, "no trace was asked for")
        weighed = weigh(model, declared or ()) if seen and call is None else Weighed()
        once = _called_once(model, seen) if rehearsed and call is None else ()
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    borrowers = _borrowers(seen, tied) if seen else _likely_borrowers(model)
    return Skeleton(
        tensors=tuple(_tensors(model)),
        modules=tuple(_module(name, module) for name, module in model.named_modules(remove_duplicate=False)),
        tied=tuple(tuple(group) for group in tied),
        no_split=tuple(sorted(declared or ())),
        order=tuple(seen.order) if seen else tuple(names),
        calls=tuple(seen.calls) if seen else tuple(name for name in names if holds_tensors(model.get_submodule(name))),
        borrowers=borrowers,
        unrehearsed=refusal,
        moments=weighed.moments,
        caches=weighed.caches,
        decoding=weighed.decoding,
        model_class=type(model).__name__,
        written=seen.written if seen else {},
        experts=tuple(_experts(model, seen, tied, borrowers)),
        expert_lists=_expert_lists(model, seen),
        once=tuple(name for name in once if name not in borrowers),
        products=_products(model),
    )


def _called_once(model: nn.Module, seen: Rehearsal | None) -> tuple[str, ...]:
    """Return the modules with tensors of an encoder-decoder that only the first token's forward calls.

    None where it can't be rehearsed how the next one is made.
    """
    if not getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        return ()
    try:
        again = rehearse_next_token(model, seen)
    except (AttributeError, *REFUSALS):
        return ()
    called = seen.calls if seen else [name for name, module in model.named_modules() if holds_tensors(module)]
    return tuple(dict.fromkeys(name for name in called if name not in again)) if again else ()


def _module(name: str, module: nn.Module) -> ModuleSpec:
    forwards = nn.Linear.forward, OrderedLinear.forward
    is_linear = isinstance(module, nn.Linear) and type(module).forward in forwards  # and nothing else
    looks_up, is_packed = isinstance(module, nn.Embedding), getattr(module, "has_own_rows", False) is True
    return ModuleSpec(name, type(module).__name__, looks_up, is_linear, is_packed)


def _products(model: nn.Module) -> tuple[PackedProducts, ...]:
    """Return the products of weights that stay packed, alike ones as one."""
    if all(getattr(module, "matrices", None) is None for module in model.modules()):
        return ()
    from offstage.stages.checkpoints.codecs.packed_matrices import as_text, of_text, without_own_numbers
    from offstage.stages.empty_init.packed_modules import PackedExperts, PackedLinear, packed_modules

    found: dict[PackedProducts, list[str]] = {}
    packed = packed_modules(model).items()
    multiply = {place: module for place, module in packed if isinstance(module, PackedLinear | PackedExperts)}
    for place, module in multiply.items():
        for matrix_text, names in module.matrices:
            parts = [module.get_parameter(name) for name in names]
            shapes = [part.shape[1:] if isinstance(module, PackedExperts) else part.shape for part in parts]
            kinds = tuple((dtype_name(part.dtype), tuple(shape)) for part, shape in zip(parts, shapes, strict=True))
            compute = None if module.how.compute is None else dtype_name(module.how.compute)
            matrix = as_text(without_own_numbers(of_text(matrix_text)))
            alike = PackedProducts(matrix, kinds, compute, module.how.tiles, ())
            found.setdefault(alike, []).extend(f"{place}.{name}" for name in names)
    return tuple(replace(products, tensors=tuple(tensors)) for products, tensors in found.items())


def _experts(
    model: nn.Module, seen: Rehearsal | None, tied: list[list[str]], borrowers: Mapping[str, tuple[str, ...]]
) -> Iterator[ExpertsSpec]:
    """Yield the experts that can be brought one by one: nobody but their module reads or changes their weights."""
    shared = {name for group in tied for name in group} | (set(seen.written) if seen else set())
    borrowed = {f"{owner}.{key}" for owner in borrowers for key in model.get_submodule(owner)._parameters}
    yield from describe_experts(model, routed=seen.routed if seen else {}, unsuited=shared | borrowed)


def _expert_lists(model: nn.Module, seen: Rehearsal | None) -> dict[str, int]:
    """Return the lists of experts: as a rehearsal that had to decide saw them, or by their looks."""
    if seen is None:
        return guess_expert_lists(model)
    return find_expert_lists(model, set(seen.order)) if seen.decided else {}


def _tensors(model: nn.Module) -> Iterable[TensorSpec]:
    hidden = non_persistent_buffers(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        yield TensorSpec(name, tuple(parameter.shape), dtype_name(parameter.dtype))
    for name, buffer in model.named_buffers(remove_duplicate=False):
        persistent = name not in hidden
        yield TensorSpec(name, tuple(buffer.shape), dtype_name(buffer.dtype), "buffer", persistent)


def _try_rehearsal(model: nn.Module, call: Callable[[nn.Module], object] | None) -> tuple[Rehearsal | None, str | None]:
    """Return what a rehearsal saw and null, or null and why the model's code refused fake tensors."""
    try:
        return answered(lambda decides: rehearse(model, call, decides=decides)), None
    except RefusedError as refusal:
        return None, str(refusal)


def _borrowers(seen: Rehearsal, tied: list[list[str]]) -> dict[str, tuple[str, ...]]:
    """Return, for each module whose tensors were read by code of modules that don't own them, those modules.

    Every module that a tied tensor is bound in owns it.
    """
    owners = {name: {parent(other) for other in group} for group in tied for name in group}
    borrowers: dict[str, set[str]] = {}
    for name, users in seen.users.items():
        strangers = users - owners.get(name, {parent(name)})
        if strangers:
            borrowers.setdefault(parent(name), set()).update(strangers)
    return {owner: tuple(sorted(users)) for owner, users in sorted(borrowers.items())}


def _likely_borrowers(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the borrowers to expect where no rehearsal could show them.

    A module with tensors of its own and leaf children (``nn.MultiheadAttention`` and its ``out_proj``) may read the
    children's directly; taking too many costs a read, missing one would break the forward.
    """
    return {
        name: (parent(name),)
        for name, module in model.named_modules()
        if name and not any(True for _ in module.children())
        if holds_tensors(module) and any(True for _ in model.get_submodule(parent(name)).parameters(recurse=False))
    }
