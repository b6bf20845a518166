"""Float32 to the blocks that ggml packs weights in, by torch's operators: what ``ggml_blocks`` unpacks again.

A block stands for its values by codes of few bits, a scale and, in some formats, a least value. Which scale is best
hangs on the codes, and they on it: so, as llama.cpp does, some steps near the one by which the codes just span the
values are tried. Each gives codes, these the scale and least value of the least squares, and the step with the fewest
is taken. Blocks of k-quants have several runs, whose scales are packed as well; their codes are those of what was
packed. Sums are in one order on any processor, so that the bytes are the same everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import inf

import torch
from torch import Tensor

from offstage.stages.checkpoints.codecs.loops import loops

_SMALLEST = torch.finfo(torch.float32).tiny
"""What is less has no inverse, and is zero as float16."""
_RUNS_TOGETHER = 2**13
"""How many runs operators fit at a time."""
_STEPS, _STEP = 5, 0.25
"""How many scales are tried to either side, and how far one is from the next: the largest code is as much more."""
_VARIED = 2**-17
"""Codes that vary by less of their mean square say nothing of a scale and a least value."""

Pack = Callable[[Tensor], Tensor]


def _pack_q8_0(blocks: Tensor) -> Tensor:
    scales = largest_magnitudes(blocks, (1,), keepdim=True).div_(127)
    blocks *= _inverse(scales)
    whole = blocks.to(torch.int8)
    codes = whole + blocks.sub_(whole).mul_(2).to(torch.int8)  # halves away from zero
    return torch.cat([_halves(scales), codes.view(torch.uint8)], 1)


def _pack_with_least(bits: int) -> Pack:
    """Return what packs blocks of one run: a float16 each for the scale and the least value, and codes of ``bits``."""

    def pack(blocks: Tensor) -> Tensor:
        halves = [_halves(part[:, None]) for part in _fitted_with_least(blocks, 2**bits - 1, least_at_most=inf)]
        scales, least = map(_from_halves, halves)
        codes = _codes(blocks - least, scales, 0, 2**bits - 1)
        return torch.cat([*halves, *_fifth_bits(codes, bits), codes[:, :16] & 15 | codes[:, 16:] << 4], 1)

    return pack


def _pack_k_with_least(bits: int) -> Pack:
    """Return what packs blocks of eight runs: six bits for a run's scale and least value, under a float16 each."""

    def pack(blocks: Tensor) -> Tensor:
        runs = blocks.view(-1, 8, 32)
        scales, least = _fitted_with_least(runs.view(-1, 32), 2**bits - 1, least_at_most=0)
        halves, packed, back = [], [], []
        for each in (scales.view(-1, 8), 0 - least.view(-1, 8)):
            largest = each.amax(1, keepdim=True)
            halves.append(_halves(largest / 63))
            packed.append((each * _inverse(largest)).mul_(63).round_().to(torch.uint8))
            back.append((_from_halves(halves[-1]) * packed[-1])[:, :, None])
        codes = _codes(runs + back[1], back[0], 0, 2**bits - 1)
        pairs = codes.view(-1, 4, 2, 32)
        lower = (pairs[:, :, 0] & 15 | pairs[:, :, 1] << 4).view(-1, 128)
        return torch.cat([*halves, _six_bits(*packed), *_fifth_bits(codes, bits), lower], 1)

    return pack


def _pack_q6_k(blocks: Tensor) -> Tensor:
    runs = blocks.view(-1, 16, 16)
    each = _fitted_around_zero(runs.view(-1, 16), 32).view(-1, 16)
    largest = each.gather(1, each.abs().argmax(1, keepdim=True))
    half = _halves(largest / -128)
    packed = (each * _inverse(largest)).mul_(-128).round_().clamp_(-128, 127).to(torch.int8)
    codes = (_codes(runs, (_from_halves(half) * packed)[:, :, None], -32, 31) + 32).view(torch.uint8)
    quarters = codes.view(-1, 2, 2, 2, 32)  # half of the block, pair of runs of 32, which of these
    lower = quarters[:, :, 0] & 15 | quarters[:, :, 1] << 4
    above = quarters.view(-1, 2, 4, 32) >> 4 << torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    upper = above[:, :, 0] | above[:, :, 1] | above[:, :, 2] | above[:, :, 3]
    return torch.cat([lower.view(-1, 128), upper.view(-1, 64), packed.view(torch.uint8), half], 1)


def _fifth_bits(codes: Tensor, bits: int) -> Iterator[Tensor]:
    """Yield the fifth bits of codes that have such, eight in a byte: those of places side by side of one run (n, 32),
    those of a place in all of eight runs (n, 8, 32).
    """
    if bits == 5:
        eights = codes.view(-1, 4, 8, 1) if codes.ndim == 2 else codes.view(-1, 1, 8, 32)
        shifts = torch.arange(8, dtype=torch.uint8)[:, None]
        yield (eights >> 4 << shifts).sum(2, dtype=torch.uint8).flatten(1)


def _six_bits(scales: Tensor, least: Tensor) -> Tensor:
    """Return two times eight numbers of six bits (n, 8) as twelve bytes (n, 12)."""
    first = [part[:, :4] | part[:, 4:] >> 4 << 6 for part in (scales, least)]
    return torch.cat([*first, scales[:, 4:] & 15 | (least[:, 4:] & 15) << 4], 1)


def _codes(values: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    """Return the codes of ``values``, the nearest by ``scales``: int8 where the lowest is negative, else uint8."""
    codes = (values * _inverse(scales)).round_().clamp_(lowest, highest)
    return codes.to(torch.int8 if lowest < 0 else torch.uint8)


def _fitted_with_least(runs: Tensor, largest: int, *, least_at_most: float) -> tuple[Tensor, Tensor]:
    """Return the scales and the least values (n) of ``runs`` (n, 32) in codes from zero to ``largest``."""
    compiled = loops()
    if compiled is None:
        found = [_fit_with_least(some, largest, least_at_most) for some in torch.split(runs, _RUNS_TOGETHER)]
        scales, least = map(torch.cat, zip(*found, strict=True))
    else:
        scales, least = map(torch.from_numpy, compiled.fit_with_least(runs.numpy(), largest, least_at_most))
    return scales.add_(0), least.add_(0)  # a zero has no sign


def _fit_with_least(runs: Tensor, largest: int, least_at_most: float) -> tuple[Tensor, Tensor]:
    """Do by operators what the loop ``fit_with_least`` does."""
    values = runs.T.contiguous()  # a run is a column: what is said of all runs lies side by side
    low = values.amin(0).clamp_max_(least_at_most)
    over = values - low
    span, of_over = over.amax(0), _sum(over)
    to_codes, count, most = _inverse(span), len(over), least_at_most - low
    scales, least, squares = span / largest, low.clone(), torch.full_like(low, inf)
    for step in range(-_STEPS, _STEPS + 1):
        codes = (over * (to_codes * (largest + _STEP * step))).round_().clamp_max_(largest)
        of_codes, of_both, of_squares = _sum(codes), _sum(over * codes), _sum(codes.square_())
        apart = count * of_squares - of_codes * of_codes
        scale = (count * of_both - of_over * of_codes) / apart
        more = (of_over - scale * of_codes) / count
        if least_at_most < inf:
            through = more > most
            more = torch.where(through, most, more)
            scale = torch.where(through, (of_both - most * of_codes) / of_squares, scale)
        left = scale * (scale * of_squares + 2 * (more * of_codes - of_both)) + more * (more * count - 2 * of_over)
        better = (apart > _VARIED * count * of_squares) & (left < squares)
        for kept, tried in ((scales, scale), (least, low + more), (squares, left)):
            torch.where(better, tried, kept, out=kept)
    return scales, least


def _fitted_around_zero(runs: Tensor, largest: int) -> Tensor:
    """Return the scales (n) of ``runs`` (n, 16) in codes from ``-largest`` to below ``largest``: the value furthest
    from zero has a negative code.
    """
    compiled = loops()
    if compiled is None:
        scales = torch.cat([_fit_around_zero(some, largest) for some in torch.split(runs, _RUNS_TOGETHER)])
    else:
        scales = torch.from_numpy(compiled.fit_around_zero(runs.numpy(), largest))
    return scales.add_(0)


def _fit_around_zero(runs: Tensor, largest: int) -> Tensor:
    """Do by operators what the loop ``fit_around_zero`` does."""
    values = runs.T.contiguous()
    low, high = values.amin(0), values.amax(0)
    furthest = torch.where(high > -low, high, low)
    to_codes = _inverse(furthest)
    scales, gained = furthest / -largest, torch.full_like(furthest, -1)
    for step in range(-_STEPS, _STEPS + 1):
        codes = (values * (to_codes * -(largest + _STEP * step))).round_().clamp_(-largest, largest - 1)
        of_both, of_squares = _sum(values * codes), _sum(codes.square_())
        gain = of_both * of_both / of_squares
        better = gain > gained
        for kept, tried in ((scales, of_both / of_squares), (gained, gain)):
            torch.where(better, tried, kept, out=kept)
    return scales


def _sum(columns: Tensor) -> Tensor:
    """Return the sums of ``columns`` (a power of two, n), one half added to the other until one is left."""
    while len(columns) > 1:
        half = len(columns) // 2
        columns = columns[:half] + columns[half:]
    return columns[0]


def largest_magnitudes(values: Tensor, dims: tuple[int, ...], *, keepdim: bool = False) -> Tensor:
    """Return the largest magnitudes along ``dims``, without a copy of all."""
    low, high = (reduced(values, dims, keepdim) for reduced in (torch.amin, torch.amax))
    return torch.maximum(high, -low).abs_()  # of zeros it may be a negative one


def _inverse(numbers: Tensor) -> Tensor:
    """Return one over each, and zero for what is too small."""
    return torch.where(numbers.abs() < _SMALLEST, 0, 1 / numbers)


def _halves(numbers: Tensor) -> Tensor:
    """Return ``numbers`` (n, 1) as the bytes of float16 (n, 2). An ``OverflowError`` where these are no numbers."""
    halves = numbers.half()
    if not bool(torch.isfinite(halves).all()):
        raise OverflowError("a scale is no number in float16")
    return halves.view(torch.uint8)


def _from_halves(halves: Tensor) -> Tensor:
    return halves.view(torch.float16).float()


PACK: Mapping[str, Pack] = {
    "q8_0": _pack_q8_0,
    "q4_1": _pack_with_least(4),
    "q5_1": _pack_with_least(5),
    "q4_k": _pack_k_with_least(4),
    "q5_k": _pack_k_with_least(5),
    "q6_k": _pack_q6_k,
}
"""What makes blocks (n, bytes) of each of these types of values (n, elements), float32, which are used up."""
