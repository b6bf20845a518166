"""What packing costs by itself: how fast weights are packed and unpacked here, and what plans make of such storage."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence

import numpy as np
import torch

from offstage.stages.checkpoints.codec_rates import unpacking_speed
from offstage.stages.checkpoints.codecs import planes
from offstage.stages.shard_load.offload_store import StoredTensor
from offstage.stages.shard_load.stored_weights import bytes_of, pack
from offstage.stages.units import parse_size
from tests.benchmarks.sides import Setting, offstage_forecast

ELEMENTS = 2**27
SPREAD = 0.02
CURVE = ("250MB", "500MB", "1GB", "2GB", "4GB")
"""The storage's bytes a second that plans are made for, to see where packing stops to pay."""

Forecasts = dict[str, list[float]]
"""A rate of the storage by its name → the seconds of a token that plans predict, unpacked and packed."""


def speeds(elements: int = ELEMENTS) -> dict[str, float]:
    """Return the bytes of Gaussian bfloat16 that are packed and unpacked in a second, on all cores, and their share."""
    noise = np.random.default_rng(0).standard_normal(elements, np.float32) * np.float32(SPREAD)
    weights = torch.from_numpy(noise).bfloat16()
    began = time.perf_counter()
    tensor = StoredTensor("bfloat16", (elements,), (), run=elements)
    packed = sum(len(frame) for tile in pack(tensor, bytes_of(weights)) for frame in tile)
    packing = weights.nbytes / (time.perf_counter() - began)
    return {"packing": packing, "unpacking": float(unpacking_speed(*planes.sample())), "share": packed / weights.nbytes}


def forecasts(setting: Setting, unpacked: Sequence[str], packed: Sequence[str]) -> Forecasts:
    """Return what plans predict with the options ``unpacked`` and ``packed`` for storage of each rate of ``CURVE``.

    All else that is measured of the machine is measured once.
    """
    shutil.rmtree(setting.work / "outputs", ignore_errors=True)
    by_name: Forecasts = {}
    for rate in CURVE:
        pinned = f"hardware.rates.storage={parse_size(rate)}"
        by_name[rate] = [
            float(offstage_forecast(setting, [*options, pinned])["seconds_per_token"]) for options in (unpacked, packed)
        ]
    return by_name
