"""Measuring how fast products read weights that they multiply quantised, as these rest: one row at a time, from memory.

What no cache holds is read as a model's weights are, one after the other; it is so large that a call takes no time to
speak of.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from importlib import import_module
from typing import TYPE_CHECKING

from offstage.stages.machine.own_process import measure_apart

if TYPE_CHECKING:
    from offstage.stages.checkpoints.packed import PackedBlock, PackedTensor
    from offstage.stages.machine.aligned_memory import Bytes

    Sample = tuple[PackedTensor, PackedBlock, list[Bytes]]

FAMILIES = ("scaled_codes", "grouped_integers", "gguf")
"""The modules with codecs that have products, and samples of these."""
BYTES = 192 * 2**20
"""What weights take, at most."""
_TIMES, _ROUNDS = 8, 5


def sample_of(name: str, families: Sequence[str] = FAMILIES, **asked: int) -> Sample | None:
    """Return the sample of the codec ``name`` that one of ``families`` makes, as is ``asked``; null where none does."""
    modules = (import_module(f"offstage.stages.checkpoints.codecs.{family}") for family in families)
    return next((module.sample(name, **asked) for module in modules if name in module.NAMES), None)


def multiplying_speeds(names: Collection[str]) -> dict[str, int]:
    """Return what ``measure`` does in a process of its own: what it takes of memory is no part of a run's peak.

    Nothing where that fails.
    """
    speeds: dict[str, int] | None = measure_apart("checkpoints.multiplying_probe", *names, beside=BYTES)
    return speeds or {}


def measure(*names: str) -> dict[str, int]:
    """Return the bytes at rest a second that products with one row read of weights in each of the codecs ``names``.

    Those that have no products aren't among them.
    """
    speeds = {name: _measured(name) for name in names}
    return {name: speed for name, speed in speeds.items() if speed is not None}


def _measured(name: str) -> int | None:
    """Return the best of some rounds: what else the machine does only ever makes one slower."""
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
    taken = []
    for _ in range(_ROUNDS):
        begun = time.perf_counter()
        for weight in weights:
            multiply_packed(given, weight, text)
        taken.append(time.perf_counter() - begun)
    return round(len(weights) * each / min(taken))
