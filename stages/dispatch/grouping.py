"""Which modules' tensors are brought together: an attention's, or a whole layer's, where many such find room at once.

What a part costs the thread that runs the model (to ask for it, bind it and let it go, and for the hooks around the
call that uses it) doesn't depend on its size. Where parts are small beside the memory for what streams, that is what
bounds a token. So the tensors of modules that a call of the module around them uses, each once, are one part, as long
as several of its size are there together: what comes next is still on its way while one computes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from offstage.stages.empty_init.skeleton import Skeleton, upward
from offstage.stages.units import DeviceId

_AT_ONCE = 4
"""So many parts that were put together have room at once, at least."""


@dataclass(slots=True)
class _Subtree:
    """The modules in one subtree that bring something in, these ``bytes``; ``kinds`` is what has to be alike.

    ``is_mixed`` says that there is something in it that goes its own way.
    """

    modules: list[str] = field(default_factory=list)
    kinds: set[tuple[DeviceId, bool]] = field(default_factory=set)
    bytes: int = 0
    is_mixed: bool = False


def brought_together(
    skeleton: Skeleton, brought: Mapping[str, DeviceId | None], sizes: Mapping[str, int], rooms: Mapping[DeviceId, int]
) -> dict[str, str]:
    """Return for each module whose tensors are brought with others' the module whose call uses them all.

    ``brought`` are the modules that have something brought in: to which device; null for one that goes its own way, as
    experts do. ``sizes`` is what each brings, in bytes, and ``rooms`` what each device has for what streams.
    Only what a rehearsal has seen is put together: modules that are called once, inside one call of what is around.
    """
    if skeleton.unrehearsed is not None:
        return {}
    calls, once = Counter(skeleton.calls), {*skeleton.once}
    trees: dict[str, _Subtree] = {}
    for module, device in brought.items():
        alone = device is None or calls[module] != 1 or any(
            module not in upward(name) for name in skeleton.borrowers.get(module, ())
        )  # fmt: skip
        for above in upward(module):
            tree = trees.setdefault(above, _Subtree())
            tree.modules.append(module)
            tree.bytes += sizes[module]
            tree.is_mixed |= alone
            if device is not None:
                tree.kinds.add((device, module in once))
    found: dict[str, str] = {}
    for name in filter(None, skeleton.order):  # what is around comes first
        tree = trees.get(name, _Subtree())
        if tree.is_mixed or len(tree.kinds) != 1 or len(tree.modules) < 2:
            continue
        ((device, _),) = tree.kinds
        if _AT_ONCE * tree.bytes <= rooms.get(device, 0):
            found |= {module: found.get(module, name) for module in tree.modules}
    return found
