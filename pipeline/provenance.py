"""Where the figures of a run come from: whether this run measured them, or an earlier one whose artifact was served.

Whoever shows a figure says so, and asks here: the screen, a sweep's closing table, reports, trackers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Provenance:
    """``samples`` make the figures, ``earlier`` of them measured by runs before, ``busy`` while others computed."""

    samples: int
    earlier: int
    busy: int = 0

    @property
    def is_cached(self) -> bool:
        """Whether this run measured nothing itself."""
        return self.earlier == self.samples > 0

    def told(self) -> str:
        """Return in words when it was measured, and how often: ``measured, median of 5, 3 earlier``."""
        words = ["measured earlier" if self.is_cached else "measured"]
        words += [f"median of {self.samples}"] * (self.samples > 1)
        words += [f"{self.earlier} earlier"] * (0 < self.earlier < self.samples)
        return ", ".join(words)


def provenance(record: Mapping[str, Any]) -> Provenance:
    """Return where the figures of a run come from. A stage that takes no samples has one by another name: its artifact.

    Of ``record`` a section may be missing, as in those of before there were samples.
    """
    stages = record.get("stages") or []
    counting = [sample for sample in record.get("samples") or () if sample.get("counts")]
    if not counting:
        return Provenance(int(bool(stages)), int(bool(stages) and stages[-1].get("cached") is True))
    busy = sum((sample.get("processor") or {}).get("busy") is True for sample in counting)
    return Provenance(len(counting), sum(sample.get("earlier") is True for sample in counting), busy)
