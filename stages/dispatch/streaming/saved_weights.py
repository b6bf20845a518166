"""Weights that autograd saves for the backward pass, and that are brought again for it instead of being kept.

The gradient of a module's input is computed from its weight. A streamed weight lies in the staging memory for its
module's call; kept until the backward pass it would hold that memory, and in the end all weights would be in memory.
So while such a module is called with gradients, a pair of hooks sees what autograd saves (as
``torch.autograd.graph.saved_tensors_hooks`` does), and in the place of a weight that can be brought again it leaves a
note of which it was. The pair is there for the module's call alone: it is the innermost one then, also inside
checkpoints and offloaders that the model itself uses. torch asks the innermost pair only, so this one hands everything
else on to the pair around it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import call
from typing import Any

import torch

from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor

Bring = Callable[[], torch.Tensor]
"""Brings a tensor again: of the same bits and layout, for as long as anything views it."""

Pair = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""A pair of hooks: what packs a tensor that is saved, and what unpacks what the first returned."""

_innermost = torch._C._autograd._top_saved_tensors_default_hooks
_push = torch._C._autograd._push_saved_tensors_default_hooks
_pop = torch._C._autograd._pop_saved_tensors_default_hooks
_disabled = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message


@dataclass(frozen=True, slots=True)
class _Lent:
    """Memory in use now that can be brought again; ``save`` is told that it was saved, and returns what brings it."""

    begin: int
    end: int
    alive: weakref.ref[torch.UntypedStorage]
    save: Callable[[], Bring]


@dataclass(slots=True)
class _Call:
    """A call under way: whose it is, whether a pair was pushed for it, and what is lent to it."""

    owner: object
    pushed: bool
    lent: Sequence[_Lent] = ()


class ReferencedTensor:
    """What autograd holds in place of a tensor that is none of ours to move: itself, cut off from the graph.

    Of one that no hook saw torch itself checks that nothing was written to it since it was saved; of these nobody does,
    so it is checked here, with torch's own kind of error.
    """

    __slots__ = ("_tensor", "_version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor, self._version = tensor.detach(), tensor._version

    def unpack(self) -> torch.Tensor:
        """Return the tensor."""
        if self._tensor._version != self._version:
            raise changed(self._version, self._tensor._version)
        return self._tensor


def changed(saved: int, version: int) -> RuntimeError:
    """Return the error of a tensor that was written to after it was saved, as autograd's own checks raise it."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: it is at"
        f" version {version}, and was saved at version {saved}; write to a clone, or after the backward pass"
    )


class SavedWeights:
    """The pair of hooks of one model, and what is lent to the calls under way."""

    def __init__(self) -> None:
        self._calls: list[_Call] = []
        self._around: list[Pair | None] = []  # what was innermost as each of ours was pushed

    @property
    def in_calls(self) -> bool:
        """Whether calls are under way, or were interrupted."""
        return bool(self._calls)

    def enter(self, owner: object) -> bool:
        """Begin a call of ``owner``; return whether what is lent to it may be saved."""
        if not torch.is_grad_enabled() or _disabled() is not None:
            self._calls.append(_Call(owner, pushed=False))
            return False
        around: Pair | None = _innermost(True)
        pushes = around is None or around[0] != self._pack
        if pushes:
            _push(self._pack, call)
            self._around.append(around)
        self._calls.append(_Call(owner, pushes))
        return True

    def leave(self, owner: object) -> None:
        """End the call of ``owner`` that began last."""
        place = len(self._calls) - 1
        while self._calls[place].owner is not owner:
            place -= 1
        if self._calls.pop(place).pushed:
            _pop()
            self._around.pop()

    def lend(self, tensor: torch.Tensor, save: Callable[[], Bring]) -> None:
        """Say that ``tensor``, contiguous and used by the call that began last, can be brought again.

        ``save`` is called where it is saved, and returns what brings it.
        """
        begin, alive = tensor.data_ptr(), weakref.ref(tensor.untyped_storage())
        latest = self._calls[-1]
        latest.lent = [*latest.lent, _Lent(begin, begin + tensor.nbytes, alive, save)]

    def recover(self) -> None:
        """Take back what calls left that an interrupt ended.

        Contexts around such a call took one pair each as they were left, the innermost ones. So what is left may be
        theirs instead of ours, below pairs that were pushed since.
        """
        since: list[Pair] = []
        while self._around and (pair := _innermost(True)) is not None:
            _pop()
            if pair[0] == self._pack or pair in self._around:
                self._around.pop()
            else:
                since.append(pair)
        for pack, unpack in reversed(since):
            _push(pack, unpack)
        self._around.clear()
        self._calls.clear()

    def _pack(self, tensor: torch.Tensor) -> Bring:
        lent = self._lent(tensor)
        if lent is not None:
            offset = tensor.data_ptr() - lent.begin
            return partial(_view, lent.save(), offset, tensor.shape, tensor.stride(), tensor.dtype)
        around = self._around[-1] if self._around else None
        if around is None or isinstance(tensor, WaitingTensor):  # which holds no data
            return ReferencedTensor(tensor).unpack
        pack, unpack = around
        return partial(unpack, pack(tensor))

    def _lent(self, tensor: torch.Tensor) -> _Lent | None:
        """Return what was lent that ``tensor`` is a view of."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.layout is not torch.strided:
            return None
        begin = tensor.data_ptr()
        for under_way in reversed(self._calls):
            for lent in under_way.lent:
                if lent.begin <= begin < lent.end and lent.alive() is not None:
                    return None if tensor.is_conj() or tensor.is_neg() else lent
        return None


def _view(bring: Bring, offset: int, shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Return the view that begins ``offset`` bytes into what ``bring`` brings: what was saved in its place says so."""
    whole = bring()
    begin = (whole.storage_offset() * whole.itemsize + offset) // dtype.itemsize
    view = torch.empty(0, dtype=dtype, device=whole.device)
    return view.set_(whole.untyped_storage(), begin, shape, stride)
