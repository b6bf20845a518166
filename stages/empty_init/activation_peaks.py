"""What a forward holds beside its weights, at any shape of the request.

A skeleton is cached and a request is not, so the rehearsal can't be at the real shape. But the sizes of all tensors of
a forward are polynomials of the number of sequences and their length. So a few forwards of small shapes, in which
every storage is counted from its birth to its death, give for each moment of a forward the polynomial of what is
alive then. Only the moments that are the peak of some shape, with some machine's kernels, are kept.

Decoding a token with what the prompt left is another forward, which two of the shapes have, too: each layer's keys and
values are copied as they grow, repeated for every head where code does that, and scored.

Blocks of one kind take the same, so a list is run up to where each kind was seen. What they leave for the next forward
is no part of a moment: a plan counts what all blocks keep, of which those that were run tell.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from offstage.stages.calls.results import kept_cache
from offstage.stages.empty_init.fake_weights import (
    REFUSALS,
    Faking,
    Found,
    RefusedError,
    answered,
    fake_weights,
    quiet,
    rehearsing,
    swapped,
)
from offstage.stages.empty_init.kept_caches import (
    Leftover,
    Probe,
    StoragesByBlock,
    cache_specs,
    encoded_positions,
    new_cache,
)
from offstage.stages.empty_init.live_storages import tensors_in
from offstage.stages.empty_init.rehearsal import call_with_next_token, call_with_tokens
from offstage.stages.empty_init.repeated_blocks import kinds_of
from offstage.stages.empty_init.skeleton import CacheSpec, Moment, monomials

_PROBES = ((2, 128), (2, 256), (2, 512), (3, 128), (3, 256), (3, 512))
"""Sequences and length: as many as a polynomial has coefficients. Multiples of what models cut prompts into.

The second shows whether a model runs other operators for longer prompts: few of the others need then be run.
"""
_DECODED = 2
"""So many probes go on to a token. They differ in length alone: what doesn't grow with that is a sequence's, weights
that are multiplied aside."""
_LOOPS = 1.5
"""A prompt twice as long that takes this many times the operators is gone through token by token."""
_SHAPES = tuple((1 << i, 1 << j) for i in range(9) for j in range(18))
"""Where a moment must be the peak to be kept: up to 256 sequences of up to 131072 tokens."""
_FACTORS = (*itertools.product((0, 1), (0, 1), (0, 1, 2, 4)), (0, 0, -1))
"""What a kernel may take, for each byte of the operands and the result, where its widest moment is to be kept.

The last is what is there before the product is computed: so much is kept where a call waits for its weight.
"""
_MOST_DECIDED = 10_000
"""The operators of one forward beyond which code that asks for values is left: it goes through token by token."""

aten = torch.ops.aten
_PRODUCTS = {
    aten.mm.default: ("mm", 0),
    aten.addmm.default: ("mm", 1),
    aten.bmm.default: ("bmm", 0),
    aten.baddbmm.default: ("bmm", 1),
    aten._grouped_mm.default: ("grouped_mm", 0),
    aten.convolution.default: ("convolution", 0),
}
"""The operators whose kernels may take memory of their own: by what name, and which argument is the left operand."""
_PACKED = "offstage.multiply_packed.default"
"""That of weights that stay packed, which takes none."""


class _Instant(NamedTuple):
    """One moment at one shape: the bytes alive; a kernel; the bytes of its left operand, right one and result."""

    live: int
    kernel: str = ""
    operands: tuple[int, int, int] = (0, 0, 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The bytes alive, and those of the operands and the result."""
        return self.live, *self.operands


class Weighed(NamedTuple):
    """The moments of a forward that can be its peak, and what it leaves for the next one, of which its one call left
    ``left_bytes`` where that was weighed. Those of ``decoding`` are of a token after so many positions.
    """

    moments: tuple[Moment, ...] = ()
    caches: tuple[CacheSpec, ...] = ()
    left_bytes: int = 0
    decoding: tuple[Moment, ...] = ()


class _Forward(NamedTuple):
    """One forward: what is alive after each operator, without what it leaves for the next one; and that.

    ``decoding`` is of that next one, of a token, where it was gone through.
    """

    moments: list[_Instant]
    left: Leftover
    decoding: Sequence[_Instant] = ()

    def probe(self, sequences: int, length: int) -> Probe:
        """Return what was left of so many ``sequences``; a decoder beside an encoder has one position of each."""
        return Probe(sequences, 1 if self.left.encoded else length, self.left)


class _Weighing(Faking):  # type: ignore[no-untyped-call]
    """Fake tensors that are counted: ``moments`` has the bytes alive after each operator, with its kernel."""

    def __init__(self, *, decides: bool) -> None:
        super().__init__(decides=decides)
        self.tally: StoragesByBlock | None = None
        self.moments: list[_Instant] = []

    def operated(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """Count what ``func`` made."""
        if self.tally is None:
            return
        for leaf in tensors_in(result):
            self.tally.meet(leaf)
        self.moments.append(_Instant(self.tally.live, *kernel_of(func, args, result)))
        if self._decides and len(self.moments) > _MOST_DECIDED:
            raise RuntimeError("the forward asks for values, token by token")


def weigh(model: nn.Module, blocks: Iterable[str]) -> Weighed:
    """Return what a forward of ``model`` holds and leaves; nothing where its code refuses fake tensors.

    ``blocks`` names the classes of the repeated blocks. A model that runs other operators at another length (a loop
    over the tokens, or over pieces of the prompt) has no moments that can be followed from shape to shape: what it
    holds is taken to grow with the tokens from the widest moments of two shapes.
    """
    classes = set(blocks)
    rehearsed = _rehearsed(model, classes, lambda: _runs(model, classes))
    if rehearsed is None:
        return Weighed()
    (runs, alike), stands_for = rehearsed
    caches = cache_specs([run.probe(*shape) for run, shape in zip(runs, _PROBES, strict=False)], stands_for)
    if not alike:
        return Weighed(tuple(_growing(_PROBES[: len(runs)], [run.moments for run in runs])), caches)
    rows = [[instant.sizes for instant in run.moments] for run in runs]
    sizes = np.array(rows, dtype=np.float64)  # (probes, moments, 4)
    solved = np.linalg.solve(np.array([monomials(*probe) for probe in _PROBES], np.float64), sizes.reshape(6, -1))
    polynomials = np.round(solved, 2).reshape(sizes.shape) + 0.0  # no negative zeros
    moments = _peaks(polynomials, [instant.kernel for instant in runs[0].moments])
    return Weighed(moments, caches, decoding=_decoding(*(run.decoding for run in runs[:_DECODED])))


def _decoding(shorter: Sequence[_Instant], longer: Sequence[_Instant]) -> tuple[Moment, ...]:
    """Return the moments of a token that can be its peak; none where the two probes don't compute the same."""
    kernels = [instant.kernel for instant in shorter]
    if not kernels or kernels != [instant.kernel for instant in longer]:
        return ()
    sequences, length = _PROBES[0]
    low, high = (np.array([instant.sizes for instant in run], np.float64) for run in (shorter, longer))
    slope = (high - low) / (sequences * (_PROBES[1][1] - length))
    rest = low - slope * sequences * length
    weights = np.zeros_like(rest, dtype=bool)
    weights[:, 2] = [kernel.startswith("mm ") for kernel in kernels]
    polynomials = np.zeros((len(monomials(1, 1)), *rest.shape), np.float64)
    polynomials[0], polynomials[1], polynomials[3] = np.where(weights, rest, 0), np.where(weights, 0, rest), slope
    polynomials[1] /= sequences
    return _peaks(np.round(polynomials, 2).astype(np.float64), kernels)


def weigh_call(
    model: nn.Module, blocks: Iterable[str], call: Callable[[nn.Module], object], *, positions: int = 1
) -> Weighed:
    """Return what one forward holds and leaves, at the one shape that ``call`` has, of one sequence of so many
    ``positions`` for its caches; what it returns is counted. Nothing where its code refuses fake tensors; see
    ``weigh``.
    """
    classes = set(blocks)
    rehearsed = _rehearsed(model, classes, lambda: answered(partial(_tally, model, call, classes)))
    if rehearsed is None:
        return Weighed()
    run, stands_for = rehearsed
    polynomials = np.zeros((len(monomials(1, 1)), len(run.moments), 4))
    polynomials[0] = [instant.sizes for instant in run.moments]
    moments = _peaks(polynomials, [instant.kernel for instant in run.moments])
    return Weighed(moments, cache_specs([run.probe(1, positions)], stands_for), run.left.bytes)


def _rehearsed(model: nn.Module, blocks: set[str], run: Callable[[], Found]) -> tuple[Found, Mapping[str, str]] | None:
    """Return what ``run`` does with the ``model`` shortened, and which of its blocks did for others; null where the
    model's code refuses fake tensors.
    """
    try:
        with rehearsing(model), _shortened(model, blocks) as stands_for:
            return run(), stands_for
    except RefusedError:
        return None
    finally:
        Faking.cache_clear()  # it outlives the mode: one entry for each operator met


def _runs(model: nn.Module, blocks: set[str]) -> tuple[list[_Forward], bool]:
    """Return what the forward of each probe holds, and whether all of them compute the same products in turn.

    Where the second doesn't, the third is the last; where it takes the longer, the longer the prompt, none follows it.
    """
    runs = [_run_probe(model, blocks, number) for number in (0, 1)]
    first = [instant.kernel for instant in runs[0].moments]
    if [instant.kernel for instant in runs[1].moments] != first:
        if len(runs[1].moments) < _LOOPS * len(first):
            runs.append(_run_probe(model, blocks, 2))
        return runs, False
    for number in range(2, len(_PROBES)):
        runs.append(_run_probe(model, blocks, number))
        if [instant.kernel for instant in runs[-1].moments] != first:
            return runs[:3], False
    return runs, True


def _growing(probes: Sequence[tuple[int, int]], runs: Sequence[list[_Instant]]) -> Iterator[Moment]:
    """Yield the widest moment of each kernel, and of all, on the line through the last two of ``runs``."""
    before, after = (_widest(run) for run in runs[-2:])
    fewer, more = (sequences * length for sequences, length in probes[-2:])
    for kernel in sorted(before.keys() & after.keys()):
        live, *operands = (
            _line((fewer, low), (more, high))
            for low, high in zip(before[kernel].sizes, after[kernel].sizes, strict=True)
        )
        yield Moment(live, kernel, tuple(operands) if kernel else ())


def _line(first: tuple[int, int], second: tuple[int, int]) -> tuple[float, ...]:
    """Return the coefficients of the line through two points, each of tokens and bytes; it never falls."""
    (fewer, low), (more, high) = first, second
    slope = max(0.0, (high - low) / (more - fewer))
    return high - slope * more, 0.0, 0.0, slope, 0.0, 0.0


def _widest(run: Sequence[_Instant]) -> dict[str, _Instant]:
    """Return the moment of each kernel that holds the most with its operands; without a name, the one of all."""
    kernels = {instant.kernel for instant in run} - {""}
    widest = {name: max((one for one in run if one.kernel == name), key=lambda one: sum(one.sizes)) for name in kernels}
    return {"": max(run, key=lambda instant: instant.live), **widest}


def _run_probe(model: nn.Module, blocks: set[str], number: int) -> _Forward:
    sequences, length = _PROBES[number]
    follows = partial(call_with_next_token, sequences=sequences, length=length) if number < _DECODED else None
    call = partial(call_with_tokens, sequences=sequences, length=length)
    return answered(partial(_tally, model, call, blocks, caches=True, follows=follows))


def _tally(
    model: nn.Module,
    call: Callable[..., object],
    blocks: set[str],
    decides: bool,
    *,
    caches: bool = False,
    follows: Callable[..., object] | None = None,
) -> _Forward:
    """Return what is alive after each operator of one forward, with its kernel, and what it leaves.

    One with ``caches`` is given what ``generate`` would keep keys and values in. What ``follows`` is given what the
    forward kept, where that is something. Code that asks for values is answered if it ``decides``, see ``deciding``.
    """
    with torch.no_grad(), quiet(), _Weighing(decides=decides) as mode:
        fakes, given = fake_weights(model), new_cache(model) if caches else {}
        tally = StoragesByBlock()
        tensors = [*fakes.values(), *(mode.from_tensor(buffer) for buffer in model.buffers())]
        for tensor in tensors:
            tally.meet(tensor, counts=False)
        mode.tally = tally
        with tally.watching(model, blocks), swapped(model, fakes):
            output = call(model, **given)
            cache, encoded = given | kept_cache(output), encoded_positions(output)
            del output
            left = tally.leftover(cache.values(), encoded=encoded)
            moments, mode.moments = mode.moments, []
            follows = None if encoded or not cache else follows
            decoding = [] if follows is None else _followed(mode, tally, partial(follows, model), cache, left.bytes)
        mode.tally = None
        return _Forward([instant._replace(live=instant.live - left.bytes) for instant in moments], left, decoding)


def _followed(
    mode: _Weighing, tally: StoragesByBlock, follows: Callable[..., object], cache: Mapping[str, Any], left: int
) -> list[_Instant]:
    """Return the instants of a forward that ``follows`` over a ``cache``; none where code refuses it."""
    with suppress(*REFUSALS):
        follows(**cache)
        most = max(left, tally.leftover(cache.values(), encoded=0).bytes)
        return [instant._replace(live=max(0, instant.live - most)) for instant in mode.moments]
    return []


@contextmanager
def _shortened(model: nn.Module, blocks: set[str]) -> Iterator[dict[str, str]]:
    """Cut the model's lists of ``blocks`` where each kind was seen and one more follows; they are whole afterwards.

    Which block of its kind does for each that is cut off is yielded. The others have their places: what a model says
    of its layers by number is true of them.
    """
    stands_for: dict[str, str] = {}
    with ExitStack() as undo:
        for name, module in list(model.named_modules()):
            if not isinstance(module, nn.ModuleList) or not {type(child).__name__ for child in module} & blocks:
                continue
            whole = dict(module._modules)
            kinds = kinds_of(dict(enumerate(module)))
            count = max(kind[0] for kind in kinds) + 2
            stands_for |= {f"{name}.{place}": f"{name}.{kind[0]}" for kind in kinds for place in kind if place >= count}
            module._modules = dict(list(whole.items())[:count])
            undo.callback(setattr, module, "_modules", whole)
        yield stands_for


def kernel_of(func: Any, args: Sequence[Any], result: Any) -> tuple[str, tuple[int, int, int]]:
    """Return the kernel that the host computes ``func`` with, and the bytes of its operands and result that count.

    Names and what counts are as ``offstage.stages.machine.kernels`` has them; what is no product has no name.
    """
    if not isinstance(result, torch.Tensor) or result.device.type != "cpu":
        return "", (0, 0, 0)
    if str(func) == _PACKED:
        left, parts, *_ = args
        return "packed", (left.nbytes, sum(part.nbytes for part in parts), result.nbytes)
    if func not in _PRODUCTS:
        return "", (0, 0, 0)
    operator, first = _PRODUCTS[func]
    left, right = args[first : first + 2]
    sizes = left.nbytes, right.nbytes, result.nbytes
    if operator == "bmm":
        operator, sizes = _batch(left, right, result)
    return f"{operator} {str(result.dtype).removeprefix('torch.')}", sizes


def _batch(left: torch.Tensor, right: torch.Tensor, result: torch.Tensor) -> tuple[str, tuple[int, int, int]]:
    """Return the kernel of a batch of products, and what counts: operands out of order, or else one of the batch."""
    out_of_order = [0 if _is_plain(operand) else operand.nbytes for operand in (left, right)]
    if any(out_of_order):
        return "strided bmm", (out_of_order[0], out_of_order[1], 0)
    count = max(1, len(result))
    return "bmm", (left.nbytes // count, right.nbytes // count, result.nbytes // count)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether a batch of matrices is contiguous, or each of them is when transposed."""
    _, rows, columns = tensor.shape
    return tensor.is_contiguous() or tensor.stride() == (rows * columns, 1, rows)


def _peaks(polynomials: npt.NDArray[np.float64], kernels: Sequence[str]) -> tuple[Moment, ...]:
    """Return the moments that are the peak at some shape, and those that are among the moments of their kernel.

    So whatever a machine's kernels take, the moment that is its peak is there.

    ``polynomials`` has shape (coefficients, moments, 4): the bytes alive, and those of the operands and the result of
    the moment's one of ``kernels``.
    """
    shapes = np.array([monomials(*shape) for shape in _SHAPES], np.float64)
    values = np.einsum("sc,cmk->smk", shapes, polynomials)
    peaks = set(values[:, :, 0].argmax(axis=1).tolist())
    for kernel in set(kernels) - {""}:
        here = np.flatnonzero(np.array(kernels) == kernel)
        for factors in _FACTORS:
            live = values[:, here] @ np.array([1, *factors], np.float64)
            peaks.update(here[live.argmax(axis=1)].tolist())
    return tuple(
        Moment(
            tuple(polynomials[:, index, 0].tolist()),
            kernels[index],
            tuple(tuple(operand.tolist()) for operand in polynomials[:, index, 1:].T) if kernels[index] else (),
        )
        for index in sorted(peaks)
    )
