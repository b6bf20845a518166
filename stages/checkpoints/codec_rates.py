"""How fast what rests packed is unpacked, or multiplied as it rests: measured once for each codec, and kept beside the
cache and for the user.

Both are measured with more than caches hold, as a model's weights are read one after the other, and unpacked to memory
that was used for others meanwhile: from cache to cache it is up to twice as fast.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offstage.pipeline.environment import allowed_cores
from offstage.stages.machine import kernels
from offstage.stages.machine.kept_figures import kept_speeds
from offstage.stages.machine.own_process import measure_apart
from offstage.stages.machine.probes import READERS, READING_THREADS
from offstage.stages.machine.rates import DECODING_NAME, coarse_rate

if TYPE_CHECKING:
    from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor
    from offstage.stages.machine.aligned_memory import Bytes

    Sample = tuple[PackedTensor, PackedBlock, list[Bytes]]

Work = Literal["unpacking", "multiplying"]
FAMILIES = ("scaled_codes", "grouped_integers", "gguf")
"""The modules with codecs that have products, and samples of these."""
BYTES = 192 * 2**20
"""What is unpacked to takes at most, or what is multiplied."""
_TIMES, _ROUNDS = 8, 5
"""How many times as large as others a sample to multiply is, whose call takes no time to speak of then; and how often
each is measured."""
_KEPT_AS: Mapping[Work, str] = {"unpacking": "unpacking to memory", "multiplying": "multiplying"}


def codec_rates(folder: Path, work: Work, names: Collection[str]) -> tuple[dict[str, int], bool]:
    """Return the rates of the codecs ``names``, coarsely: as kept in ``folder``, or measured now and kept there, all in
    one process of their own; and whether others disturbed that.

    Of ``unpacking`` they are of bytes in use, and of all reading threads together, as many as compute at once on this
    machine's cores; of ``multiplying``, of bytes at rest that products with one row read. Those of which no sample can
    be made, or that have no product, aren't among them.
    """
    if not names:
        return {}, False
    from offstage.stages.checkpoints.codecs import loops  # a run that has nothing packed needs no numpy to plan

    loops.build()
    machine = f"{loops.identity()}; numpy {metadata.version('numpy')}; {kernels.identity()}"
    keys = {name: f"{_KEPT_AS[work]} {name}; {machine}" for name in names}

    def measured(lacking: Collection[str]) -> dict[str, int]:
        return measure_apart("checkpoints.codec_rates", work, *lacking, beside=2 * BYTES) or {}

    rates, disturbed = kept_speeds(folder, DECODING_NAME, keys, measured, of_user=True)
    return {name: coarse_rate(rate) for name, rate in rates.items() if rate}, disturbed


def mean_rate(rates: Mapping[str, int], used_bytes: Mapping[str, int]) -> int | None:
    """Return the one rate at which ``used_bytes`` by codec are unpacked one after the other; null where one is unknown
    or there are none.
    """
    if not used_bytes or not used_bytes.keys() <= rates.keys():
        return None
    seconds = sum(count / rates[name] for name, count in used_bytes.items())
    return round(sum(used_bytes.values()) / seconds) if seconds else None


def sample_of(name: str, families: Sequence[str] = FAMILIES, **asked: int) -> Sample | None:
    """Return the sample of the codec ``name`` that one of ``families`` makes, as is ``asked``; null where none does."""
    modules = (import_module(f"offstage.stages.checkpoints.codecs.{family}") for family in families)
    return next((module.sample(name, **asked) for module in modules if name in module.NAMES), None)


def measure(work: Work, *names: str) -> dict[str, int]:
    """Return for each codec of ``names`` the bytes in use a second at which all threads that read unpack it, or those
    at rest that products with one row read.

    Those of which there is no sample, or no product, aren't among them.
    """
    speed_of = {"unpacking": _unpacking, "multiplying": _multiplying}[work]
    measured = {name: speed_of(name) for name in names}
    return {name: speed for name, speed in measured.items() if speed is not None}


def _unpacking(name: str) -> int | None:
    sample = sample_of(name, (*FAMILIES, "planes"))
    return None if sample is None else unpacking_speed(*sample)


def unpacking_speed(tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes]) -> int:
    """Return the bytes in use a second at which all threads that read unpack copies of the sample ``block`` of
    ``tensor``, which rests in ``data``.

    Where there is no loop for it they wait for each other, and as many do so at a time as there are cores.
    """
    import numpy as np

    from offstage.stages.checkpoints.packed_reads import unpack_block

    copies = max(READING_THREADS, BYTES // tensor.bytes)
    places = [([part.copy() for part in data], np.empty(tensor.bytes, np.uint8)) for _ in range(copies)]
    has_loop = tensor.codec.loop(tensor, block, data, places[0][1]) is not None
    threads = READING_THREADS if has_loop else min(READERS, len(allowed_cores()))

    def unpack(place: tuple[Sequence[Bytes], Bytes]) -> None:
        unpack_block(tensor, block, *place)

    with ThreadPoolExecutor(threads) as pool:
        return round(copies * tensor.bytes / _least(lambda: list(pool.map(unpack, places))))


def _multiplying(name: str) -> int | None:
    import torch

    from offstage.stages.checkpoints.codecs.packed_matrices import as_text, packed_matrix, parts_of
    from offstage.stages.checkpoints.codecs.products import multiply_packed

    sample = sample_of(name, times=_TIMES)
    matrix = None if sample is None else packed_matrix(sample[0])
    if sample is None or matrix is None:
        return None
    tensor, _, data = sample
    parts, text = parts_of(tensor, data), as_text(matrix)
    given = torch.ones(1, matrix.columns, dtype=torch.bfloat16)
    each = sum(part.nbytes for part in parts)
    weights = [[part.clone() for part in parts] for _ in range(max(1, BYTES // each))]
    return round(len(weights) * each / _least(lambda: [multiply_packed(given, weight, text) for weight in weights]))


def _least(act: Callable[[], object]) -> float:
    """Return the seconds that ``act`` takes, the fewest of some rounds after one that touches all: what else the
    machine does only ever makes one slower.
    """
    taken = []
    for _ in range(1 + _ROUNDS):
        begun = time.perf_counter()
        act()
        taken.append(time.perf_counter() - begun)
    return min(taken[1:])
