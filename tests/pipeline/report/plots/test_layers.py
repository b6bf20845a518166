"""Layer by layer: on which device each lies, and what the report has of a mixture's experts that wait."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offstage.pipeline.record import RecordError, read_run
from offstage.pipeline.report.command import run
from offstage.pipeline.report.plots.layers import placement_picture
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.pages import entries, markup, traces
from tests.pipeline.report.sample_runs import LAYERS, write_failure, write_run

USES = {
    f"model.layers.{index}.mlp.experts": {"hits": hits, "misses": 10 - hits, "streamed_bytes": 7, "evictions": 1}
    for index, hits in enumerate((0, 5, 10))
}


def test_every_count_of_a_layer_is_in_the_json(tmp_path: Path) -> None:
    write_run(tmp_path / "0", experts=USES, metrics={"expert_hit_rate": 0.5})
    write_run(tmp_path / "1")
    run([str(tmp_path)])
    page, report = markup(tmp_path / "report.html"), json.loads((tmp_path / "report.json").read_text())
    assert [job["experts"] for job in report["jobs"]] == [USES, {}]
    assert "expert cache hit rate" in page


def test_a_model_without_such_experts_has_no_plot_of_them(tmp_path: Path) -> None:
    write_run(tmp_path / "0")
    run([str(tmp_path)])
    assert "xperts" not in markup(tmp_path / "report.html")


def test_experts_that_are_no_mapping_make_no_record(tmp_path: Path) -> None:
    path = write_run(tmp_path / "0") / "run.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"experts": {"layer": [1]}}))
    with pytest.raises(RecordError, match=r"experts\.layer: \[1\] isn't an object"):
        read_run(path)


def test_a_row_has_each_run_of_layers_on_one_device(tmp_path: Path) -> None:
    write_run(tmp_path / "0", budget=10**9)
    write_run(tmp_path / "1", budget=2 * 10**9)
    jobs = find([tmp_path]).jobs
    picture = placement_picture(jobs, {job.name: job.name for job in jobs}, most=40)
    assert picture
    assert entries(picture) == ["cpu", "disk"]
    (cpu,), (disk,) = traces(picture, "cpu"), traces(picture, "disk")
    assert [(cpu.base, cpu.x), (disk.base, disk.x)] == [((0, 0), (2, 4)), ((2, 4), (4, 2))]
    assert disk.hovertext[0].startswith(f"4 layers, {LAYERS[2]} to {LAYERS[-1]}")


def test_jobs_whose_layers_lie_alike_share_a_row_and_plans_that_are_left_out_are_counted(tmp_path: Path) -> None:
    for number in range(3):
        write_run(tmp_path / str(number), budget=(number // 2 + 1) * 10**9)
    write_failure(tmp_path / "3")
    jobs = find([tmp_path]).jobs
    whole, cut = (placement_picture(jobs, {job.name: job.name for job in jobs}, most=most) for most in (5, 1))
    assert whole
    assert cut
    assert list(whole.figure.layout.yaxis.ticktext) == ["#0, #1", "#2"]
    assert whole.figure.layout.xaxis.range == (0, len(LAYERS))
    assert "not drawn" not in whole.caption
    assert "1 further plans are not drawn." in cut.caption
