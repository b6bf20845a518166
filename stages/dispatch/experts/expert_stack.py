"""A stack of experts that waits, and computes as if it were there: what an operator asks of it is brought then.

The model's own code runs as it is, whichever of its implementations that is, and what it does to activations it does
to all of them at once. Only four things it does to the weights: it multiplies each expert by its tokens (a grouped
product) or by a row for every token, zero where it isn't routed there (a batched product), it takes the experts of all
tokens out of the stack (indices), or one by one. Both kinds of product are taken of each expert apart anyhow, so which
others are there, and where, changes nothing of what is added. On the host no bit is another. A GPU's kernels may divide
a grouped or a batched product by how much there is of it: whether their bits are the same is for a test there to show
(``tests/cuda/test_experts.py``). What else is done to a stack reads all of it, as with any tensor that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Any

import torch

from offstage.stages.dispatch.experts.routed_experts import RoutedExperts
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor

_GROUPED = ("grouped_mm", "_grouped_mm", "grouped_mm_fallback")
"""The names of the grouped products: torch's in its versions, and what transformers has for where there is none."""


@dataclass(frozen=True, slots=True)
class StackUse:
    """Who brings the rows of a stack: the ``experts`` of its module, by its ``attribute`` there; whether the last two
    dimensions are swapped.
    """

    experts: RoutedExperts
    attribute: str
    swapped: bool = False

    def oriented(self, stack: torch.Tensor) -> torch.Tensor:
        """Return ``stack`` with its last two dimensions as they are asked for."""
        return stack.transpose(-2, -1) if self.swapped else stack


class ExpertStack(WaitingTensor):
    """The stacked tensors of a module's experts while they wait: read by ``use``, or whole."""

    use: StackUse

    def moved(self, value: torch.Tensor, device: torch.device | None) -> torch.Tensor:
        """Return all of the stack, which was read whole; what a call of its module reads so is beyond all budgets."""
        if self.use.experts.under_way:
            self.use.experts.note_read_whole(self.nbytes)
        return self.use.oriented(super().moved(value, device))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operation = _OPERATIONS.get(getattr(func, "__name__", ""))
        stack = next((arg for arg in args[:2] if isinstance(arg, ExpertStack)), None)
        if operation is not None and stack is not None and stack.use.experts.under_way:
            with torch._C.DisableTorchFunctionSubclass():
                result = operation(stack, func, args, kwargs or {})
            if result is not None:
                return result
        return super().__torch_function__(func, types, args, kwargs)


def _swap(stack: ExpertStack, _func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> ExpertStack | None:
    """Return the stack with its last two dimensions swapped; they aren't brought for it."""
    dimensions = sorted(dim % stack.dim() for dim in (*args[1:], *kwargs.values()))
    if dimensions != [stack.dim() - 2, stack.dim() - 1] or stack.use.swapped:
        return None
    use = StackUse(stack.use.experts, stack.use.attribute, swapped=True)
    return ExpertStack(stack.as_meta().transpose(-2, -1), stack.source, use)


def _multiply_groups(
    stack: ExpertStack, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the grouped product: rows of the left operand that follow each other are one expert's tokens.

    ``offs`` (experts) says where those of each expert end.
    """
    given = {name: value for name, value in kwargs.items() if value is not None}
    if len(args) != 2 or args[1] is not stack or given.keys() != {"offs"} or args[0].dim() != 2:
        return None
    left: torch.Tensor = args[0]
    edges = [0, *given["offs"].tolist()]
    counts = {expert: end - begin for expert, (begin, end) in enumerate(pairwise(edges)) if end > begin}
    if counts and torch.is_grad_enabled() and left.requires_grad:
        ends = torch.tensor([edges[expert + 1] for expert in counts], dtype=torch.int32, device=left.device)
        products: torch.Tensor = func(
            left, stack.use.oriented(_lent(stack, partial(_copied, stack, [*counts]))), offs=ends
        )
        return products
    product = left.new_empty((len(left), stack.shape[-1]), dtype=stack.dtype)
    for experts, slots, places in stack.use.experts.batches(stack.use.attribute, list(counts)):
        tokens, in_order = [0] * len(slots), list[int]()
        for place, expert in sorted(zip(places, experts, strict=True)):
            tokens[place] = counts[expert]
            in_order.extend(range(edges[expert], edges[expert + 1]))
        offs = torch.tensor([*accumulate(tokens)], dtype=torch.int32, device=left.device)
        rows = torch.tensor(in_order, device=left.device)
        product[rows] = func(left[rows], stack.use.oriented(slots), offs=offs)
    return product


def _multiply_batches(
    stack: ExpertStack, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Tensor | None:
    """Return the batched product (experts, tokens, columns); experts whose rows are all zero aren't brought for it."""
    if len(args) != 2 or args[1] is not stack or kwargs or args[0].shape[0] != stack.shape[0]:
        return None
    left: torch.Tensor = args[0]
    hit: list[int] = left.detach().flatten(1).any(1).nonzero().flatten().tolist()
    stack.use.experts.route(hit)
    product = left.new_zeros((*left.shape[:2], stack.shape[-1]))
    if hit and torch.is_grad_enabled() and left.requires_grad:
        copied = stack.use.oriented(_lent(stack, partial(_copied, stack, hit)))
        rows = [_multiply_one(func, left[expert], matrix) for expert, matrix in zip(hit, copied, strict=True)]
        return product.index_copy(0, torch.tensor(hit, device=left.device), torch.stack(rows))
    for experts, slots, places in stack.use.experts.batches(stack.use.attribute, hit):
        for expert, place in zip(experts, places, strict=True):
            product[expert] = _multiply_one(func, left[expert], stack.use.oriented(slots)[place])
    return product


def _multiply_one(func: Any, left: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    """Return ``left`` times ``matrix`` by the batched product ``func``, on the host to the bits that it has among many.

    For a batch of one alone other kernels run there, which sum in another order (float32): so there are two.
    """
    product: torch.Tensor = func(left.expand(2, *left.shape), matrix.expand(2, *matrix.shape))[0]
    return product


def _lent(stack: ExpertStack, copy: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return what ``copy`` makes of experts of ``stack``; what a backward pass needs of it is made again then."""
    copied = copy()
    if torch.is_grad_enabled():
        stack.use.experts.lend(copied, copy)
    return copied


def _copied(stack: ExpertStack, experts: Sequence[int]) -> torch.Tensor:
    """Return a stack of ``experts`` alone, in new memory: what a backward pass needs outlives the slots."""
    use = stack.use
    if use.experts.are_gone:
        return stack.source.read().detach()[list(experts)].to(stack.source.device)
    places_in_copy = {expert: place for place, expert in enumerate(experts)}
    copied: torch.Tensor | None = None
    for batch, slots, places in use.experts.batches(use.attribute, experts):
        copied = slots.new_empty((len(experts), *slots.shape[1:])) if copied is None else copied
        copied[[places_in_copy[expert] for expert in batch]] = slots[places]
    assert copied is not None
    return copied


def _take(stack: ExpertStack, _func: Any, args: Sequence[Any], _kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """Return one expert's tensor, or a copy of those of a list of experts, in its order."""
    index = args[1] if len(args) == 2 else None
    if isinstance(index, int) or (
        isinstance(index, torch.Tensor) and index.dim() == 0 and not index.is_floating_point()
    ):
        if not torch.is_grad_enabled():
            return stack.use.oriented(stack.use.experts.row(stack.use.attribute, int(index)))
        return stack.use.oriented(_lent(stack, partial(_copied, stack, [int(index)]))[0])
    if not isinstance(index, torch.Tensor) or index.dtype not in (torch.int32, torch.int64) or index.dim() != 1:
        return None
    return _lent(stack, partial(_taken, stack, index.tolist(), index.device))


def _taken(stack: ExpertStack, wanted: Sequence[int], device: torch.device) -> torch.Tensor:
    """Return the tensors of the experts ``wanted`` in their order, some more than once, in new memory on ``device``."""
    if stack.use.experts.are_gone:
        return stack.use.oriented(stack.source.read().detach())[list(wanted)].to(device)
    taken = torch.empty((len(wanted), *stack.shape[1:]), dtype=stack.dtype, device=device)
    for experts, slots, places in stack.use.experts.batches(stack.use.attribute, sorted(set(wanted))):
        place_of = dict(zip(experts, places, strict=True))
        rows = [row for row, expert in enumerate(wanted) if expert in place_of]
        from_slots = torch.tensor([place_of[wanted[row]] for row in rows], device=device)
        taken[torch.tensor(rows, device=device)] = stack.use.oriented(slots)[from_slots]
    return taken


_OPERATIONS: Mapping[str, Callable[..., Any]] = {
    "transpose": _swap,
    "__getitem__": _take,
    "bmm": _multiply_batches,
    **dict.fromkeys(_GROUPED, _multiply_groups),
}
