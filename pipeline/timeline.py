"""A value over time in a bounded number of points, each the peak of its span: no peak is lost, however long the run."""

from __future__ import annotations

MOST_POINTS = 240


class Timeline:
    """Keeps at most ``MOST_POINTS`` points (seconds, peak value); spans double in length when there are more."""

    def __init__(self, span_seconds: float = 0.05) -> None:
        self._span_seconds = span_seconds
        self._points: list[tuple[int, int]] = []  # number of the span, peak in it

    def add(self, seconds: float, value: int) -> None:
        """Note ``value`` at ``seconds`` since the beginning; times never go back."""
        span = int(seconds / self._span_seconds)
        if self._points and self._points[-1][0] == span:
            self._points[-1] = (span, max(value, self._points[-1][1]))
            return
        self._points.append((span, value))
        if len(self._points) > MOST_POINTS:
            self._coarsen()

    @property
    def points(self) -> list[tuple[float, int]]:
        """The beginning of each span in seconds, and the peak in it."""
        return [(round(span * self._span_seconds, 3), value) for span, value in self._points]

    def _coarsen(self) -> None:
        merged: dict[int, int] = {}
        for span, value in self._points:
            merged[span // 2] = max(value, merged.get(span // 2, 0))
        self._points, self._span_seconds = list(merged.items()), self._span_seconds * 2
