"""What a forward holds beside its weights, at any shape of the request.

A skeleton is cached and a request is not, so the rehearsal can't be at the real shape. But the sizes of all tensors of
a forward are polynomials of the number of sequences and their length. So a few forwards of small shapes, in which
every storage is counted from its birth to its death, give for each moment of a forward the polynomial of what is
alive then. Only the moments that are the peak of some shape are kept.

Blocks of one kind take the same, so two of each kind are run, and what they leave in the cache is taken off: a plan
counts the cache of all layers.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from stages.empty_init.fake_weights import REFUSALS, Faking, fake_weights, quiet, swapped
from stages.empty_init.rehearsal import call_with_tokens
from stages.empty_init.skeleton import Moment, monomials

_PROBES = ((2, 128), (3, 128), (2, 256), (3, 256), (2, 512), (3, 512))
"""Sequences and length: as many as a polynomial has coefficients. Multiples of what models cut prompts into."""
_SHAPES = tuple((1 << i, 1 << j) for i in range(9) for j in range(18))
"""Where a moment must be the peak to be kept: up to 256 sequences of up to 131072 tokens."""
_BLOCKS = 2

aten = torch.ops.aten


@dataclass(slots=True)
class _Tally:
    """The bytes alive in one forward: now, and after each operator, with what its kernel takes beside (scratch)."""

    live: int = 0
    moments: list[tuple[int, int]] = field(default_factory=list)
    known: dict[int, int] = field(default_factory=dict)

    def meet(self, tensor: torch.Tensor, *, counts: bool = True) -> None:
        """Count the storage of ``tensor`` from now to its death, if it is new; or never."""
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self.known:
            self.known[key] = storage.nbytes() if counts else 0
            self.live += self.known[key]
            weakref.finalize(storage, self._gone, key).atexit = False

    def _gone(self, key: int) -> None:
        self.live -= self.known.pop(key)


class _Weighing(Faking):  # type: ignore[no-untyped-call]
    """Fake tensors that are counted.

    What an operator does inside itself isn't: torch takes an operator apart only the first time it meets it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.tally: _Tally | None = None
        self._depth = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._depth += 1
        try:
            result = super().__torch_dispatch__(func, types, args, kwargs)
        finally:
            self._depth -= 1
        if self.tally is not None and not self._depth:
            for leaf in result if isinstance(result, (list, tuple)) else (result,):
                if isinstance(leaf, torch.Tensor):
                    self.tally.meet(leaf)
            self.tally.moments.append((self.tally.live, scratch_bytes(func, args, result)))
        return result


def weigh(model: nn.Module, blocks: Iterable[str]) -> tuple[Moment, ...]:
    """Return the moments of a forward of ``model`` that can be its peak; none where its code refuses fake tensors.

    ``blocks`` names the classes of the repeated blocks. A model that runs other operators at another shape has no
    moments either.
    """
    training = model.training
    try:
        with _shortened(model.eval(), set(blocks)):
            runs = [_run(model, sequences, length) for sequences, length in _PROBES]
    except REFUSALS:
        return ()
    finally:
        model.train(training)
    if len({len(run) for run in runs}) != 1:
        return ()
    sizes = np.array(runs, dtype=np.float64)  # (probes, moments, 2)
    solved = np.linalg.solve(np.array([monomials(*probe) for probe in _PROBES], np.float64), sizes.reshape(6, -1))
    return _peaks(np.round(solved, 2).reshape(sizes.shape) + 0.0)  # no negative zeros


def _run(model: nn.Module, sequences: int, length: int) -> list[tuple[int, int]]:
    """Return what is alive after each operator of one forward, without the cache that it leaves, and the scratch."""
    with torch.no_grad(), quiet(), _Weighing() as mode:
        fakes = fake_weights(model)
        tally = _Tally()
        held = [*fakes.values(), *(mode.from_tensor(buffer) for buffer in model.buffers())]
        for tensor in held:
            tally.meet(tensor, counts=False)
        mode.tally = tally
        with swapped(model, fakes):
            output = call_with_tokens(model, sequences=sequences, length=length)
        cache = getattr(output, "past_key_values", None)
        del output
        left = tally.live if cache is not None else 0
        mode.tally = None
        return [(live - left, scratch) for live, scratch in tally.moments]


@contextmanager
def _shortened(model: nn.Module, blocks: set[str]) -> Iterator[None]:
    """Leave two blocks of each kind in the model's lists of ``blocks``; they are all back afterwards."""
    with ExitStack() as undo:
        for module in list(model.modules()):
            if not isinstance(module, nn.ModuleList) or not {type(child).__name__ for child in module} & blocks:
                continue
            whole = dict(module._modules)
            seen: Counter[object] = Counter()
            kept = []
            for child in module:
                kind = (type(child), tuple((p.shape, p.dtype) for p in child.parameters()))
                seen[kind] += 1
                kept += [child] if seen[kind] <= _BLOCKS else []
            module._modules = {str(index): child for index, child in enumerate(kept)}
            undo.callback(setattr, module, "_modules", whole)
        yield


def scratch_bytes(func: Any, args: Sequence[Any], result: Any) -> int:
    """Return what the host's kernel for ``func`` takes beside its operands and result, in bytes.

    Measured on an AVX-512 host with torch 2.13. A product in bfloat16 sums in float32, in as large a matrix as the
    result. A batched one copies an operand that is neither contiguous nor plainly transposed: such is the weight of
    a head that gets the last position of each sequence, once for each of them. Other dtypes take next to nothing.
    """
    if not isinstance(result, torch.Tensor) or result.dtype != torch.bfloat16 or result.device.type != "cpu":
        return 0
    if func in (aten.mm.default, aten.addmm.default):
        return 2 * result.nbytes
    if func is aten._grouped_mm.default:
        return int(result.nbytes)  # one group at a time: half the rows is a lot for one
    if func is aten.bmm.default and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return sum(operand.nbytes for operand in args[:2] if not _is_plain(operand))
    return 0


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a batch of matrices is contiguous, or each of them is when transposed."""
    _, rows, columns = tensor.shape
    return tensor.is_contiguous() or tensor.stride() == (rows * columns, 1, rows)


def _peaks(polynomials: npt.NDArray[np.float64]) -> tuple[Moment, ...]:
    """Return the moments that are the peak at some shape, with their scratch or without.

    ``polynomials`` has shape (coefficients, moments, 2): the bytes alive, and the scratch.
    """
    values = np.einsum("sc,cmk->smk", np.array([monomials(*shape) for shape in _SHAPES], np.float64), polynomials)
    peaks = {int(index) for index in values[:, :, 0].argmax(axis=1)} | {
        int(index) for index in values.sum(axis=2).argmax(axis=1)
    }
    return tuple(
        Moment(tuple(polynomials[:, index, 0].tolist()), tuple(polynomials[:, index, 1].tolist()))
        for index in sorted(peaks)
    )
