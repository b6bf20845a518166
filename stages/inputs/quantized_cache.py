"""A quantised KV cache: the options that say how many bits its numbers have, and what these come to in bytes.

A layer's prompt is quantised as it comes. What follows is kept as it is until there are ``residual_length`` positions
of it; then all of the layer is dequantised and quantised anew. For each token the whole layer is dequantised.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from offstage.pipeline.errors import Fault
from offstage.pipeline.typed_config import LEAST, read, type_faults, unknown_keys

CACHE_CONFIG = "cache_config"
"""The option that says how a cache is quantised."""

_GROWN = 2.05
"""What a layer takes for a token, in multiples of its keys and values at full width: both dequantised, and both with
the new position beside them."""
_BROUGHT = 1.0
"""What of that is left for its attention, until its block's last product is made."""
_QUANTISING = {"quanto": (3.4, 3.5), "hqq": (6.4, 11.6)}
"""What a layer takes while it is quantised, alike, at four bytes a number and at fewer; as measured with groups of 16
to 64. Quanto works in the dtype of the numbers, HQQ in float32, on several copies."""
_DEQUANTISED = {"quanto": (5.5, 2.5), "hqq": (6.5, 6.0)}
"""How much longer a token takes with a layer's keys and values than where these are whole, at four bytes a number and
at fewer: for these, a whole cache takes 0.2 s for each GB on the host that this was measured on. Nominal elsewhere."""
_QUANTISED_ANEW = {"quanto": (8.0, 8.0), "hqq": (450.0, 670.0)}
"""The same of quantising them. HQQ searches for the zero points."""


@dataclass(frozen=True, slots=True)
class QuantizedCache:
    """The keys of ``cache_config``: groups of ``q_group_size`` numbers of ``nbits`` each have a scale and a zero point.

    Of the positions that are decoded fewer than ``residual_length`` stay as they are.
    """

    backend: Literal["quanto", "hqq"] = "quanto"
    nbits: Literal[1, 2, 4, 8] = 4
    axis_key: Literal[0, 1, -1] = 0
    axis_value: Literal[0, 1, -1] = 0
    q_group_size: int = field(default=64, metadata={LEAST: 8})
    residual_length: int = field(default=128, metadata={LEAST: 0})

    def finished(self, length: int, *, decoded: int, width: int) -> float:
        """Return how many positions at full ``width``, in bytes a number, take as much as a layer does at most.

        There are ``length`` of them in the end, of which so many were ``decoded``.
        """
        step = max(1, self.residual_length)
        kept = decoded % step
        most = self._with(length, kept=kept, width=width)
        if decoded >= step - 1:  # just before it was quantised for the last time
            earlier = length - (decoded + 1) % step
            most = max(most, self._with(earlier, kept=step - 1, width=width))
        return most

    def prompted(self, positions: int, *, width: int) -> float:
        """Return the same of a prompt of so many ``positions``, once its forward is over."""
        return self._with(positions, kept=0, width=width)

    def _with(self, positions: int, *, kept: int, width: int) -> float:
        share = (self.nbits / 8 + 2 * width / self.q_group_size) / width
        return share * max(0, positions - kept) + kept

    def in_hand(self, *, width: int, calls: int) -> float:
        """Return what a layer's keys and values, of one of so many ``calls`` in lockstep, are multiplied by for what
        is held beside the cache: one call is at its layer, the others may wait for a weight in the midst of theirs.
        """
        quantising = _QUANTISING[self.backend][width < 4]
        return max(_GROWN, quantising) + (calls - 1) * _BROUGHT

    def slowness(self, *, width: int) -> float:
        """Return how many times as long as with whole keys and values a token takes with these: each is dequantised,
        and some are quantised anew.
        """
        anew = _QUANTISED_ANEW[self.backend][width < 4] / max(1, self.residual_length)
        return _DEQUANTISED[self.backend][width < 4] + anew


def config_faults(config: object) -> Iterator[Fault]:
    """Yield what isn't right of the ``config`` that is given as ``cache_config``, by its keys."""
    key = f"generate.{CACHE_CONFIG}"
    if not isinstance(config, Mapping):
        names = ", ".join(QuantizedCache.__dataclass_fields__)
        yield Fault(key, f"{config!r} is no mapping; give some of {names}, or leave it out")
        return
    yield from unknown_keys(config, list(QuantizedCache.__dataclass_fields__), above=f"{key}.")
    yield from type_faults(QuantizedCache, config, above=f"{key}.")


def read_cache_config(options: Mapping[str, Any]) -> QuantizedCache:
    """Return what ``options`` say of the cache's numbers; the defaults where they say nothing, or what is refused."""
    config = options.get(CACHE_CONFIG)
    return QuantizedCache() if config is None or any(config_faults(config)) else read(QuantizedCache, config)
