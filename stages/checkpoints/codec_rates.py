"""How fast what rested packed is unpacked, measured once for each codec, or multiplied as it rests, once for each kind
of matrix; and kept beside the cache and for the user.

Both are measured with more than caches hold, as a model's weights are read one after the other, and unpacked to memory
that was used for others meanwhile: from cache to cache it is up to twice as fast. A product takes a while to begin,
beside what it reads, and a small one reads at half the speed of a large one: so those that a model has are measured.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from offstage.pipeline.environment import allowed_cores
from offstage.stages.machine import kernels, product_probe
from offstage.stages.machine.kept_figures import kept_speeds
from offstage.stages.machine.own_process import measure_apart
from offstage.stages.machine.probes import READERS, READING_THREADS
from offstage.stages.machine.product_probe import steady_seconds
from offstage.stages.machine.rates import DECODING_NAME, coarse_rate
from offstage.stages.units import tensor_bytes

if TYPE_CHECKING:
    import torch

    from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor
    from offstage.stages.machine.aligned_memory import Bytes

    Sample = tuple[PackedTensor, PackedBlock, list[Bytes]]

Work = Literal["unpacking", "multiplying"]
Parts = Sequence[tuple[str, Sequence[int]]]
"""What a matrix rests in: a dtype and a shape each."""
FAMILIES = ("scaled_codes", "grouped_integers", "gguf", "planes")
"""The modules with codecs that have samples."""
BYTES = 192 * 2**20
"""What is unpacked to takes at most."""
_ROUNDS = 5
"""How often it is measured how fast that is."""
_MOST_BYTES, _CODES = 2 * BYTES, 0x62
"""How large a matrix may be that is multiplied to be measured; and all bytes of one: numbers of a common size, whatever
they are codes or scales of."""
_BETWEEN = 2**10
"""What its parts take at most to begin at whole lines of a cache."""
_KEPT_AS: Mapping[Work, str] = {"unpacking": "unpacking to memory", "multiplying": "multiplying"}


def product_name(matrix_text: str, parts: Parts, dtype: str, *, tiles: bool) -> str:
    """Return what products of rows of ``dtype`` with such a matrix are asked for by, in its ``parts``."""
    return json.dumps([matrix_text, parts, dtype, tiles])


def codec_rates(folder: Path, work: Work, names: Collection[str]) -> tuple[dict[str, int], bool]:
    """Return the rates of ``names``, coarsely: as kept in ``folder``, or measured now and kept there, in one process
    for all; and whether others disturbed that.

    Of ``unpacking`` they are those of codecs, of bytes in use, and of all reading threads together, as many as compute
    at once on this machine's cores; of ``multiplying``, those of products (``product_name``), of bytes at rest that one
    row takes. Those of which no sample can be made aren't among them.
    """
    if not names:
        return {}, False
    from offstage.stages.checkpoints.codecs import loops  # a run that has nothing packed needs no numpy to plan

    loops.build()
    machine = f"{loops.identity()}; numpy {metadata.version('numpy')}; {kernels.identity()}"
    short = {name: name if work == "unpacking" else sha256(name.encode()).hexdigest()[:16] for name in names}
    keys = {name: f"{_KEPT_AS[work]} {short[name]}; {machine}" for name in names}

    def measured(lacking: Collection[str]) -> dict[str, int]:
        beside = max(_MOST_BYTES, product_probe.memory_bytes())
        return measure_apart("checkpoints.codec_rates", work, *lacking, beside=beside) or {}

    rates, disturbed = kept_speeds(folder, DECODING_NAME, keys, measured, of_user=True)
    return {name: coarse_rate(rate) for name, rate in rates.items() if rate}, disturbed


def mean_rate(rates: Mapping[str, int], used_bytes: Mapping[str, float]) -> int | None:
    """Return the one rate at which ``used_bytes`` by name are unpacked, or multiplied by, one after the other; null
    where one is unknown or there are none.
    """
    if not used_bytes or not used_bytes.keys() <= rates.keys():
        return None
    seconds = sum(count / rates[name] for name, count in used_bytes.items())
    return round(sum(used_bytes.values()) / seconds) if seconds else None


def sample_of(name: str) -> Sample | None:
    """Return a sample of the codec ``name``; null where nothing makes one."""
    modules = (import_module(f"offstage.stages.checkpoints.codecs.{family}") for family in FAMILIES)
    return next((module.sample(name) for module in modules if name in module.NAMES), None)


def measure(work: Work, *names: str) -> dict[str, int]:
    """Return for each of ``names`` the bytes in use a second at which all threads that read unpack a codec, or those at
    rest that one row's products with a matrix read.

    Those of which there is no sample aren't among them, nor are products with matrices that are very large.
    """
    if work == "multiplying":
        return _multiplying(names)
    samples = {name: sample_of(name) for name in names}
    return {name: unpacking_speed(*sample) for name, sample in samples.items() if sample is not None}


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


def _multiplying(names: Collection[str]) -> dict[str, int]:
    import torch

    asked = {name: json.loads(name) for name in names}
    asked = {name: product for name, product in asked.items() if sum(_sizes(product[1])) <= _MOST_BYTES}
    memory = torch.empty(max(product_probe.memory_bytes(), _MOST_BYTES + _BETWEEN), dtype=torch.uint8)
    with torch.inference_mode():
        seconds = {name: steady_seconds(_products(memory, *product)) for name, product in asked.items()}
    return {name: round(sum(_sizes(asked[name][1])) / taken) for name, taken in seconds.items()}


def _products(memory: torch.Tensor, matrix_text: str, parts: Parts, dtype: str, tiles: bool) -> Iterator[float]:
    """Yield how long one product of a row of ``dtype`` after the other takes with matrices that no cache holds.

    They lie one after the other in half of ``memory``, or a large one in more, each looked at before; what follows them
    is written to before they are read again.
    """
    import torch

    from offstage.stages.checkpoints.codecs.packed_matrices import of_text
    from offstage.stages.checkpoints.codecs.products import multiply_packed
    from offstage.stages.machine.aligned_memory import TENSOR_ALIGNMENT, align_up

    given = torch.ones(1, 1, of_text(matrix_text).columns, dtype=getattr(torch, dtype))
    memory.fill_(_CODES)
    end, weights = 0, list[list[torch.Tensor]]()
    while not weights or (len(weights) < product_probe.MOST_ROUNDS and end + sum(_sizes(parts)) <= len(memory) // 2):
        weights.append([])
        for (kind, shape), size in zip(parts, _sizes(parts), strict=True):
            weights[-1].append(memory[end : end + size].view(getattr(torch, kind)).view(*shape))
            end = align_up(end + size, TENSOR_ALIGNMENT)
        if of_text(matrix_text).reordered:
            weights[-1][-1].zero_()  # all columns of the first group
        multiply_packed(given, weights[-1], matrix_text, tiles=tiles)
    while True:
        memory[end:].fill_(_CODES)
        for weight in weights:
            begun = time.perf_counter()
            multiply_packed(given, weight, matrix_text, tiles=tiles)
            yield time.perf_counter() - begun


def _sizes(parts: Parts) -> list[int]:
    return [tensor_bytes(shape, kind) for kind, shape in parts]


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
