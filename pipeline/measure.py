"""How often a run's metrics are measured: the keys ``measure``, by which stages that can be measured again go."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from offstage.pipeline.errors import Fault
from offstage.pipeline.typed_config import LEAST, read


@dataclass(frozen=True, slots=True)
class MeasureConfig:
    """As many ``repeats`` are wanted, each after at least ``warmup`` passes that don't count.

    ``fresh`` ones are wanted where this run itself is to take them.
    """

    repeats: int = field(default=1, metadata={LEAST: 1})
    warmup: int = field(default=0, metadata={LEAST: 0})
    fresh: bool = False


def read_measure(config: Mapping[str, Any]) -> MeasureConfig:
    """Return the keys ``measure`` of ``config``; a record from before there were any has the defaults."""
    return read(MeasureConfig, config.get("measure") or {})


def refuse_unmeasured(config: Mapping[str, Any], stages: Iterable[str]) -> Iterable[Fault]:
    """Yield the keys ``measure`` that ask for repeats which none of ``stages``, all of the run, can take."""
    given, plain = read_measure(config), MeasureConfig()
    for entry in fields(MeasureConfig):
        value = getattr(given, entry.name)
        if value != getattr(plain, entry.name):
            yield Fault(
                f"measure.{entry.name}",
                f"{value!r} asks for repeats, and none of {', '.join(stages)} can be repeated; leave it out",
            )
