"""What is asked of an offload of activations, checked before anything is done, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ActivationTraffic:
    """What was saved for the backward pass in one iteration, in bytes: what stayed where it was and what went."""

    kept_bytes: int = 0
    offloaded_bytes: int = 0

    @property
    def ratio(self) -> float:
        """The share of the bytes that went; 0 of nothing."""
        return self.offloaded_bytes / max(self.kept_bytes + self.offloaded_bytes, 1)


def check_ratio(ratio: object) -> float:
    """Return ``ratio``; a ``ConfigError`` unless it is a number from 0 to 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:  # nan is in no range
        raise ConfigError(
            f"offload_ratio: {ratio!r} is no share of the bytes that are saved for the backward pass; give a number"
            " from 0 (all stay) to 1 (all go)"
        )
    return float(ratio)


def check_tag(tag: object) -> str:
    """Return ``tag``; a ``ConfigError`` unless it is text that isn't empty."""
    if not isinstance(tag, str) or not tag:
        raise ConfigError(f"tag: {tag!r} names nothing; give the text under which sizes are remembered, e.g. 'block'")
    return tag
