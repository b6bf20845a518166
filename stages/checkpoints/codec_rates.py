"""How fast what rests packed is unpacked, or multiplied as it rests: measured once for each codec, and kept beside the
cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from offstage.pipeline.environment import allowed_cores
from offstage.stages.checkpoints.multiplying_probe import FAMILIES, multiplying_speeds, sample_of
from offstage.stages.machine import kernels
from offstage.stages.machine.kept_figures import KeptFigure
from offstage.stages.machine.probes import READERS, READING_THREADS
from offstage.stages.machine.rates import DECODING_NAME, FILE_NAME, coarse_rate

if TYPE_CHECKING:
    from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor
    from offstage.stages.machine.aligned_memory import Bytes

_MEASURING_SECONDS, _TURNS = 0.3, 3
"""For how long it is measured again and again, and how often a sample is unpacked each time."""


def unpacking_rates(folder: Path, names: Collection[str]) -> dict[str, int]:
    """Return the rates of the codecs ``names``, coarsely, in bytes in use a second: as kept in ``folder``, or measured
    now and kept there. Those of which no sample can be made aren't among them.

    A rate is that of all reading threads together, as many as compute at once on this machine's cores.
    """
    said, probes = f"by all threads for {_MEASURING_SECONDS} s", {name: partial(_measured, name) for name in names}
    return _rates(folder, FILE_NAME, {name: (f"unpacking {name}, {said}", probe) for name, probe in probes.items()})


def multiplying_rates(folder: Path, names: Collection[str]) -> dict[str, int]:
    """Return the rates of the codecs ``names`` likewise at which products with one row read what rests in them.

    They are of bytes at rest, measured in one process of their own, and kept for the user too.
    """
    measured = lru_cache(partial(multiplying_speeds, names))

    def probe(name: str) -> int | None:
        return measured().get(name)

    return _rates(folder, DECODING_NAME, {name: (f"multiplying {name}", partial(probe, name)) for name in names})


def _rates(folder: Path, file: str, probes: Mapping[str, tuple[str, Callable[[], int | None]]]) -> dict[str, int]:
    """Return what ``probes`` of codecs measure, by name, each with what it is called in ``file`` of ``folder``."""
    if not probes:
        return {}
    from offstage.stages.checkpoints.codecs import loops  # a run that has nothing packed needs no numpy to plan

    loops.build()
    machine = f"{loops.identity()}; numpy {metadata.version('numpy')}; {kernels.identity()}"
    speeds = {
        name: KeptFigure(file, f"{said}; {machine}", probe, of_user=file == DECODING_NAME).get(folder)
        for name, (said, probe) in probes.items()
    }
    return {name: coarse_rate(rate) for name, rate in speeds.items() if rate}


def mean_rate(rates: Mapping[str, int], used_bytes: Mapping[str, int]) -> int | None:
    """Return the one rate at which ``used_bytes`` by codec are unpacked one after the other; null where one is unknown
    or there are none.
    """
    if not used_bytes or not used_bytes.keys() <= rates.keys():
        return None
    seconds = sum(count / rates[name] for name, count in used_bytes.items())
    return round(sum(used_bytes.values()) / seconds) if seconds else None


def _measured(name: str) -> int | None:
    sample = sample_of(name, (*FAMILIES, "planes"))
    return None if sample is None else measure(*sample)


def measure(tensor: PackedTensor, block: PackedBlock, data: Sequence[Bytes]) -> int:
    """Return the bytes in use a second at which all threads that read unpack the sample ``block`` of ``tensor``.

    Where there is no loop for it they wait for each other, and as many do so at a time as there are cores.

    The best of many rounds: what else the machine does only ever makes one slower.
    """
    import numpy as np

    from offstage.stages.checkpoints.packed_reads import unpack_block

    first = np.empty(tensor.bytes, np.uint8)
    has_loop = tensor.codec.loop(tensor, block, data, first) is not None
    threads = READING_THREADS if has_loop else min(READERS, len(allowed_cores()))
    targets = [first, *(np.empty(tensor.bytes, np.uint8) for _ in range(threads - 1))]

    def unpack(target: Bytes) -> None:
        for _ in range(_TURNS):
            unpack_block(tensor, block, data, target)

    for target in targets:  # makes tables, and touches memory for the first time
        unpack_block(tensor, block, data, target)
    taken: list[float] = []
    with ThreadPoolExecutor(threads) as pool:
        while sum(taken) < _MEASURING_SECONDS:
            begin = time.perf_counter()
            list(pool.map(unpack, targets))
            taken.append(time.perf_counter() - begin)
    return round(threads * _TURNS * tensor.bytes / min(taken))
