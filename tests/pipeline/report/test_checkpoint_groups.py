"""Jobs of several checkpoints: each has a section of its own, and nothing joins them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from offstage.pipeline.report.checkpoint_groups import group_jobs
from offstage.pipeline.report.command import run
from offstage.pipeline.report.run_folders import find
from tests.pipeline.report.pages import markup
from tests.pipeline.report.sample_runs import repeat, write_run


def write(folder: Path, *, seconds: float = 0.5, budget: int = 10**9, **model: Any) -> None:
    """Write a run of the checkpoint that ``model`` gives the keys of."""
    write_run(folder, seconds=seconds, budget=budget, repeats=[repeat(seconds)] * 4)
    record = json.loads((folder / "run.json").read_text())
    record["config"]["model"] |= model
    (folder / "run.json").write_text(json.dumps(record))


def test_lines_fronts_and_comparisons_stay_within_a_checkpoint(tmp_path: Path) -> None:
    for number, (path, seconds) in enumerate([("/a/opt", 0.5), ("/b/llama", 5.0), ("/a/opt", 0.25), ("/b/llama", 4.0)]):
        write(tmp_path / str(number), path=path, seconds=seconds, budget=(number + 1) * 10**9)
    opt, llama = group_jobs(find([tmp_path]).jobs)
    assert (opt.title, llama.title) == ("opt", "llama")
    assert [[point.job for point in series.measured] for series in (*opt.series, *llama.series)] == [
        ["#0", "#2"], ["#1", "#3"],
    ]  # fmt: skip
    assert {point.job for point in llama.front.points} == {"#1", "#3"}
    assert set(opt.noise.like) == {"#0", "#2"}
    assert opt.noise.pairs == llama.noise.pairs == 1


def test_a_title_has_what_tells_its_checkpoint_from_the_others(tmp_path: Path) -> None:
    models: list[dict[str, Any]] = [
        {"path": "/a/opt"}, {"path": "/b/opt"}, {"path": "/c/t5"}, {"path": "/c/t5", "adapter": "/lora"},
        {"path": "/a/opt", "tokenizer": "/elsewhere"},
    ]  # fmt: skip
    for number, model in enumerate(models):
        write(tmp_path / str(number), **model)
    groups = group_jobs(find([tmp_path]).jobs)
    assert [group.title for group in groups] == ["/a/opt", "/b/opt", "/c/t5, adapter=not given", "/c/t5, adapter=/lora"]
    assert [len(group.jobs) for group in groups] == [2, 1, 1, 1]


def test_each_checkpoint_has_a_section_and_no_id_is_there_twice(tmp_path: Path) -> None:
    for number, path in enumerate(("/a/opt", "/b/llama", "/a/opt")):
        write(tmp_path / str(number), path=path)
    run([str(tmp_path)])
    page = markup(tmp_path / "report.html")
    assert "<h2>opt</h2>" in page
    assert "<h2>llama</h2>" in page
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert {"speed", "speed-2"} <= set(ids)
    named = re.findall(r'(?:href="#|url\(#|labelledby=")([^")]+)', page)
    assert named
    assert not set(named) - set(ids)
    groups = json.loads((tmp_path / "report.json").read_text())["checkpoints"]
    assert [(group["checkpoint"], group["jobs"]) for group in groups] == [("opt", ["#0", "#2"]), ("llama", ["#1"])]


def test_a_job_links_to_its_folder_from_where_the_page_lies(tmp_path: Path) -> None:
    write(tmp_path / "100% <new>" / "0")
    write(tmp_path / "100% <new>" / "1")
    jobs = find([tmp_path / "100% <new>"], page_folder=tmp_path / "reports").jobs
    assert jobs[1].link == "../100%25%20%3Cnew%3E/1/"
    (series,) = group_jobs(jobs)[0].series
    assert {point.link for point in series.measured} == {job.link for job in jobs}
