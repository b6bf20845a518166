"""What is asked of an offload of activations, checked before anything is done, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from offstage.pipeline.errors import ConfigError, closest

TARGETS = ("host", "disk")


@dataclass(frozen=True, slots=True)
class ActivationTraffic:
    """What was saved for the backward pass in one iteration, in bytes: what stayed where it was, what went, and the
    most that was on the device at once.
    """

    kept_bytes: int = 0
    offloaded_bytes: int = 0
    peak_bytes: int = 0

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


def check_target(target: object, folder: str | Path | None) -> str:
    """Return ``target``; a ``ConfigError`` unless it is one of ``TARGETS``, and ``folder`` is for disk alone."""
    if target not in TARGETS:
        raise ConfigError(f"target: {target!r} is neither 'host' nor 'disk'{closest(str(target), TARGETS)}")
    if folder is not None and target != "disk":
        raise ConfigError(f"folder: {str(folder)!r} is for target='disk' alone, and the target is {target!r}")
    return str(target)


def check_tag(tag: object) -> str:
    """Return ``tag``; a ``ConfigError`` unless it is text that isn't empty."""
    if not isinstance(tag, str) or not tag:
        raise ConfigError(f"tag: {tag!r} names nothing; give the text under which sizes are remembered, e.g. 'block'")
    return tag
