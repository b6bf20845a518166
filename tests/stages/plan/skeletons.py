"""Small skeletons to plan for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from offstage.stages.empty_init.skeleton import DeviceUnpacking, ModuleSpec, PackedSpec, Skeleton, TensorSpec
from offstage.stages.plan.outline import Outline


def outline(
    tensors: Mapping[str, int],
    *,
    classes: Mapping[str, str] | None = None,
    tied: Sequence[Sequence[str]] = (),
    no_split: Sequence[str] = (),
    order: Sequence[str] = (),
) -> Outline:
    """Return the outline of a model whose ``tensors`` (name → bytes) imply its modules; ``classes`` names some."""
    names = {""}
    for tensor in tensors:
        parts = tensor.split(".")
        names |= {".".join(parts[:count]) for count in range(1, len(parts))}
    seen = [name for name in _in_order(tensors) if name in names]
    modules = [ModuleSpec(name, (classes or {}).get(name, "Module")) for name in seen]
    specs = tuple(TensorSpec(name, (count,), "uint8") for name, count in tensors.items())
    groups = tuple(tuple(sorted(group)) for group in tied)
    return Outline(Skeleton(specs, tuple(modules), groups, tuple(no_split), tuple(order)))


def _in_order(tensors: Mapping[str, int]) -> list[str]:
    modules = {"": None}
    for tensor in tensors:
        parts = tensor.split(".")
        modules |= {".".join(parts[:count]): None for count in range(1, len(parts))}
    return list(modules)


def stack(count: int, size: int = 10) -> Outline:
    """Return a model of ``count`` equal layers, ``layers.0`` and so on, of ``size`` bytes each."""
    return outline({f"layers.{index}.weight": size for index in range(count)})


def at_rest(
    model: Outline, sizes: Mapping[str, int], *, working: int = 0, device: DeviceUnpacking | None = None
) -> Outline:
    """Return ``model`` with those of its tensors packed at rest that ``sizes`` gives bytes for, by the codec half.

    That is unpacked on a ``device`` by so much of it, if at all.
    """
    packed = {name: PackedSpec("half", size, working, device=device) for name, size in sizes.items()}
    specs = tuple(replace(spec, packed=packed.get(spec.name)) for spec in model.skeleton.tensors)
    return replace(model, skeleton=replace(model.skeleton, tensors=specs))
