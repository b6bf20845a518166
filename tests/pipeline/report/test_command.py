from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from offstage.pipeline.command_exit import last_resort
from offstage.pipeline.record import read_run
from offstage.pipeline.report.command import run
from offstage.pipeline.report.comparison import compare_runs
from offstage.pipeline.report.run_folders import find
from offstage.pipeline.report.summary import summarise
from offstage.pipeline.report.terminal import show_summary
from tests.pipeline.report.pages import markup, scripts
from tests.pipeline.report.sample_runs import write_many, write_run, write_sweep

EVIL = "<script>alert(1)</script>&\"'$x_1$ {{ 7*7 }}"
WITHOUT = "import sys; sys.modules['plotly'] = None; from offstage.pipeline.report.command import main; main()"
MEASURE = """
import re, sys, time
from pathlib import Path
began = time.process_time()
from offstage.pipeline.report.command import run
run(sys.argv[1:])
peak = re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())  # rusage's begins at the parent's
print("SECONDS", time.process_time() - began, "BYTES", int(peak[1]) * 1024)
"""


def test_a_sweep_leaves_four_files_and_prints_its_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run([str(write_sweep(tmp_path / "sweep"))])
    out = capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "sweep").glob("report.*")) == [
        "report.csv",
        "report.html",
        "report.json",
        "report.tex",
    ]
    assert "#6 failed: plan: max_memory: too small" in out
    assert "#7 interrupted: generate: KeyboardInterrupt" in out
    assert "1.56" in out  # seconds a token of job #0: 2.5 GB at 1.6 GB/s


def test_a_table_wider_than_the_screen_is_printed_in_blocks_that_fit(tmp_path: Path) -> None:
    screen = Console(file=io.StringIO(), width=60)
    show_summary(screen, summarise(find([write_many(tmp_path, 70)])))
    lines = screen.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert sum(line.startswith("job ") for line in lines) > 1, "each block begins with the job's name"
    assert sum(line.startswith("#59 ") for line in lines) == sum(line.startswith("job ") for line in lines)
    assert not any(line.startswith("#60 ") for line in lines)
    assert "The first 60 of 70 jobs" in screen.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, lines)) <= 60


def test_the_output_folder_is_made_and_the_sweep_left_alone(tmp_path: Path) -> None:
    run([str(write_sweep(tmp_path / "sweep")), "--output", str(tmp_path / "new" / "er")])
    assert (tmp_path / "new" / "er" / "report.html").exists()
    assert not list((tmp_path / "sweep").glob("report.*"))


def test_the_page_has_the_title_author_and_caption_that_are_asked_for(tmp_path: Path) -> None:
    options = {"--title": "Budgets & bits", "--author": "A. <Reader>", "--caption": "What {{ 6*7 }} budgets cost."}
    run([str(write_run(tmp_path / "0")), *(word for pair in options.items() for word in pair)])
    page = (tmp_path / "0" / "report.html").read_text()
    assert "<title>Budgets &amp; bits · offstage</title>" in page
    for words in ("<h1>Budgets &amp; bits</h1>", ">A. &lt;Reader&gt;</p>", ">What {{ 6*7 }} budgets cost.</p>"):
        assert words in page


def test_the_same_records_give_the_same_bytes(tmp_path: Path) -> None:
    write_sweep(tmp_path / "sweep")
    for name in ("a", "b"):
        run([str(tmp_path / "sweep"), "--output", str(tmp_path / name)])
    for kind in ("html", "csv", "json", "tex"):
        assert (tmp_path / "a" / f"report.{kind}").read_bytes() == (tmp_path / "b" / f"report.{kind}").read_bytes()


def test_the_page_needs_nothing_from_elsewhere(tmp_path: Path) -> None:
    run([str(write_sweep(tmp_path))])
    page = markup(tmp_path / "report.html")
    page_scripts = scripts(tmp_path / "report.html")
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in page_scripts]
    (policy,) = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', page)
    assert policy == (
        "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; script-src 'sha256-{}' 'sha256-{}'".format(
            *digests
        )
    ), "two scripts may run, by their digests alone, and nothing may be asked for anywhere"
    for fetching in ("<link", "<img", "<iframe", "@import", "src=", "url(http", 'href="http'):
        assert fetching not in page


def test_nothing_of_a_record_is_taken_for_markup(tmp_path: Path) -> None:
    sweep = tmp_path / "<b>sweep"
    write_run(sweep / "0", policy=EVIL, prompt=EVIL, text=EVIL)
    write_run(sweep / "1", policy="balanced")
    write_run(sweep / "2", policy=EVIL + "2", tokens=[5])
    (sweep / "3").mkdir()
    (sweep / "3" / "run.json").write_text(json.dumps({"status": EVIL, "error": {"message": EVIL, "stage": EVIL}}))
    run([str(sweep)])
    page = markup(sweep / "report.html")
    assert len(scripts(sweep / "report.html")) == 2
    assert set(re.findall(r"<script[^>]*>", page)) <= {'<script type="application/json">'}
    assert "<b>" not in page
    assert "&lt;script&gt;" in page
    assert "{{ 7*7 }}" in page


@pytest.mark.parametrize("content", ["", "{", "[]", '{"status": "completed"}', '{"status": "failed", "error": {}}'])
def test_any_record_makes_a_page(tmp_path: Path, content: str, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run.json").write_text(content)
    run([str(tmp_path / "run.json")])
    assert "report.html" in capsys.readouterr().out
    assert (tmp_path / "report.html").read_text().endswith("</html>\n")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        ([], 2, "give either one PATH or more, --compare A B, or --bundle"),
        (["x", "--compare", "a", "b"], 2, "give either one PATH"),
        (["gone"], 5, "gone: there is nothing"),
        (["."], 5, "no run.json there"),
        (["--compare", "0", "gone"], 5, "gone: there is nothing"),
        (["0", "--output", "0/run.json"], 5, "0/run.json"),
    ],
)
def test_mistakes_are_told_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    if "0" in arguments:
        write_run(tmp_path / "0")
    assert last_resort(lambda: run(arguments)) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_missing_library_is_named_with_what_installs_it(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "."], cwd=tmp_path, env=_paths(), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert done.stderr.strip().endswith("pip install 'offstage-pipeline[report]'")


def test_help_needs_no_library(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, "--help"], cwd=tmp_path, env=_paths(), capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "exit codes" in done.stdout


def _paths() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}


def test_a_comparison_says_what_changed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = write_run(tmp_path / "0", seconds=0.5, tokens=[1, 2, 3])
    other = write_run(tmp_path / "1", budget=2 * 10**9, policy="balanced", seconds=0.25, tokens=[1, 9, 3])
    run(["--compare", str(one), str(other)])
    assert "sequence 0, token 1: was 2, is 9" in capsys.readouterr().out
    content = json.loads((one / "compare.json").read_text())
    config = {change["key"]: (change["before"], change["after"]) for change in content["config"]["changes"]}
    assert config == {"max_memory.cpu": ("1000MB", "2000MB"), "device_map": ("sequential", "balanced")}
    plan = [change["key"] for change in content["plan"]["changes"]]
    assert plan == ["model.layers.2", "model.layers.3"]
    assert content["model"]["notes"] == ["No change."]
    speed = {change["key"]: change["ratio"] for change in content["speed"]["changes"]}
    assert speed == {"decode_seconds_per_token": "0.50", "decode_tokens_per_second": "2.00"}


def answer(*tokens: int, prompt: str = "p") -> dict[str, Any]:
    return {"prompt": prompt, "text": "", "token_ids": list(tokens)}


@pytest.mark.parametrize(
    ("before", "after", "lines"),
    [
        ([answer(1, 2)], [answer(1, 2)], ["The same tokens."]),
        ([answer(1, 2)], [answer(1, 2, 3)], ["sequence 0, token 2: was nothing, is 3"]),
        ([answer(1), answer(2)], [answer(1)], ["A has 2 answers, B has 1.", "sequence 1, token 0: was 2, is nothing"]),
        ([answer(1)], [answer(1, prompt="q")], ["Prompt 0: the prompts differ."]),
        ([], [answer(1)], ["A has no outputs."]),
        ([], [], ["Neither A nor B has outputs."]),
    ],
)
def test_tokens_are_compared_in_words(
    before: list[dict[str, Any]], after: list[dict[str, Any]], lines: list[str], tmp_path: Path
) -> None:
    runs = []
    for name, outputs in (("a", before), ("b", after)):
        path = write_run(tmp_path / name) / "run.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"outputs": outputs}))
        runs.append(read_run(path))
    assert list(compare_runs(*runs).sections[-1].notes) == lines


@pytest.mark.long_form
def test_a_thousand_runs_take_seconds(tmp_path: Path) -> None:
    sweep = write_many(tmp_path, 1000)
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(sweep)], env=_paths(), capture_output=True, text=True, check=True
    )
    words = done.stdout.split()
    seconds, peak_bytes = float(words[-3]), int(words[-1])
    sys.stderr.write(f"1,000 runs: {seconds:.1f} s, {peak_bytes / 2**20:.0f} MiB\n")
    assert (sweep / "report.csv").read_text().count("\n") == 1001
    assert seconds < 20
    assert peak_bytes < 2**30
