"""How fast what rests packed is unpacked, or multiplied as it rests: measured once for each codec, and kept beside the
cache and for the user.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import lru_cache, partial
from importlib import metadata
from pathlib import Path

from offstage.stages.checkpoints.codec_probe import Work, speeds
from offstage.stages.machine import kernels
from offstage.stages.machine.kept_figures import KeptFigure
from offstage.stages.machine.rates import DECODING_NAME, coarse_rate

_KEPT_AS: Mapping[Work, str] = {"unpacking": "unpacking to memory", "multiplying": "multiplying"}


def codec_rates(folder: Path, work: Work, names: Collection[str]) -> dict[str, int]:
    """Return the rates of the codecs ``names``, coarsely: as kept in ``folder``, or measured now and kept there, all in
    one process of their own.

    Of ``unpacking`` they are of bytes in use, and of all reading threads together, as many as compute at once on this
    machine's cores; of ``multiplying``, of bytes at rest that products with one row read. Those of which no sample can
    be made, or that have no product, aren't among them.
    """
    if not names:
        return {}
    from offstage.stages.checkpoints.codecs import loops  # a run that has nothing packed needs no numpy to plan

    loops.build()
    machine = f"{loops.identity()}; numpy {metadata.version('numpy')}; {kernels.identity()}"
    measured = lru_cache(partial(speeds, work, names))

    def probe(name: str) -> int | None:
        return measured().get(name)

    figures = {
        name: KeptFigure(DECODING_NAME, f"{_KEPT_AS[work]} {name}; {machine}", partial(probe, name), of_user=True)
        for name in names
    }
    rates = {name: figure.get(folder) for name, figure in figures.items()}
    return {name: coarse_rate(rate) for name, rate in rates.items() if rate}


def mean_rate(rates: Mapping[str, int], used_bytes: Mapping[str, int]) -> int | None:
    """Return the one rate at which ``used_bytes`` by codec are unpacked one after the other; null where one is unknown
    or there are none.
    """
    if not used_bytes or not used_bytes.keys() <= rates.keys():
        return None
    seconds = sum(count / rates[name] for name, count in used_bytes.items())
    return round(sum(used_bytes.values()) / seconds) if seconds else None
