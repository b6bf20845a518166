"""Memory against speed: the axis of memory says where it doesn't begin at zero."""

from __future__ import annotations

from pathlib import Path

import pytest

from offstage.pipeline.report.plots.pareto import pareto_picture
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.speed import pareto
from tests.pipeline.report.sample_runs import write_run


@pytest.mark.parametrize(("peaks", "label"), [((300, 310), "measured peak, MB, not from zero"), ((100, 310), "MB<")])
def test_an_axis_that_does_not_begin_at_zero_says_so(peaks: tuple[int, int], label: str, tmp_path: Path) -> None:
    for number, peak in enumerate(peaks):
        write_run(tmp_path / str(number), peak=peak * 10**6, seconds=1 / peak)
    picture = pareto_picture(pareto(find([tmp_path]).jobs))
    assert picture
    assert label in picture.wide
