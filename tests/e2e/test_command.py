"""The main job on the embedded model, as a newcomer meets it."""

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from tests.deadline import seconds_of_children
from tests.e2e.conftest import COMMAND, Finished, environment, finish, records_in, start, wait_for
from tests.long_form import in_ci

Run = Callable[..., Finished]
STAGES = ["empty_init", "plan", "shard_load", "dispatch", "generate"]


@pytest.mark.from_nothing
def test_the_main_job_runs_and_a_second_run_is_served_from_the_cache(
    offstage: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    first = offstage()
    assert first.code == 0, first.err
    assert first.cached == dict.fromkeys(STAGES, False)
    assert all(name in first.out for name in STAGES)
    assert re.search(r"cpu [\d.]+ MB.*disk [\d.]+ MB", first.out), "the summary says what lies where"
    assert "22 of 76 modules streamed: 4.33 MB a pass" in first.out
    for name in ("predicted_streamed_bytes_per_token", "streamed_bytes_per_token"):
        assert first.record["metrics"][name] == 22 * 196_608
    assert first.record["outputs"][0]["prompt"] + first.record["outputs"][0]["text"] in first.out
    assert "outputs/runs/" in first.out
    assert "\x1b" not in first.out, "no colour codes where nobody looks"
    assert first.record["status"] == "completed"
    assert len(first.tokens[0]) > 0
    assert first.record["outputs"][0]["text"]
    for stage in first.record["stages"]:
        assert Path(stage["artifact"]).joinpath("manifest.json").is_file()

    for hardware in (tmp_path / "user/offstage/hardware", tmp_path / "outputs/cache/hardware"):
        measured = {path.name: [*json.loads(path.read_text())["content"]] for path in hardware.glob("*.json")}
        assert measured.keys() == {"process_memory.json", "decoding.json"}, "neither storage nor kernels"
        assert [key.split()[0] for key in measured["decoding.json"]] == ["narrow"], "its calls, and no reading"

    second = offstage()
    assert second.cached == dict.fromkeys(STAGES, True)
    assert second.tokens == first.tokens
    assert second.record["metrics"]["decode_seconds_per_token"] == first.record["metrics"]["decode_seconds_per_token"]


def test_a_served_run_imports_no_model_code_and_is_quick(offstage_here: Run, tmp_path: Path) -> None:
    assert offstage_here().code == 0
    unused = ("torch", "transformers", "safetensors", "numpy", "http.client", "optuna")
    sweeps = (
        "offstage.pipeline.sweeps.record",
        "offstage.pipeline.sweeps.results",
        "offstage.pipeline.tracking.trackers",
        "offstage.pipeline.job_process",
    )
    code = (
        "import sys\nfrom offstage.pipeline.app import main\ntry:\n    main()\nfinally:\n"
        f"    assert not {{*{unused + sweeps}}} & set(sys.modules), sorted(sys.modules)\n"
    )
    began = seconds_of_children()
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert seconds_of_children() - began < 3


def test_a_generate_option_reuses_the_plan_and_a_budget_reuses_the_skeleton(offstage_here: Run) -> None:
    offstage_here()
    option = offstage_here("generate.max_new_tokens=5")
    assert option.cached == {**dict.fromkeys(STAGES, True), "generate": False}
    assert len(option.tokens[0]) == 5
    budget = offstage_here("max_memory.cpu=2.4MB")
    assert budget.cached["empty_init"]
    assert not budget.cached["plan"]


def test_a_prefix_runs_and_reads_no_weights(offstage_here: Run) -> None:
    done = offstage_here("stop_after=plan")
    assert list(done.cached) == ["empty_init", "plan"]
    assert done.code == 0
    assert done.record["outputs"] == []
    assert list(offstage_here("stages=plan_only").cached.values()) == [True, True]


@pytest.mark.long_form
def test_sampling_with_one_seed_gives_one_text(offstage_here: Run) -> None:
    options = ("generate=sample", "generate.max_new_tokens=12")
    first, again, other = (offstage_here(*options, *more) for more in ((), ("max_memory.cpu=6MB",), ("seed=1",)))
    assert first.tokens == again.tokens
    assert first.tokens != other.tokens


def test_prompts_are_strings_or_token_ids_and_come_from_a_file_too(offstage_here: Run, tmp_path: Path) -> None:
    ids = offstage_here("generate.prompts=[[5,6,7]]", "generate.max_new_tokens=3")
    assert ids.record["outputs"][0]["prompt"] == [5, 6, 7]
    tmp_path.joinpath("prompts.txt").write_text("One prompt\nAnother, longer prompt\n")
    file = offstage_here("generate.prompts_file=prompts.txt", "generate.max_new_tokens=3")
    assert [output["prompt"] for output in file.record["outputs"]] == ["One prompt", "Another, longer prompt"]


def test_a_device_map_of_an_earlier_run_can_be_given_back(offstage_here: Run, tmp_path: Path) -> None:
    first = offstage_here("generate.max_new_tokens=4")
    plan = next(stage for stage in first.record["stages"] if stage["name"] == "plan")
    again = offstage_here(f"device_map={plan['artifact']}/device_map.json", "generate.max_new_tokens=4")
    assert again.code == 0, again.err
    assert again.tokens == first.tokens


def test_an_inline_map_with_dots_in_its_keys_works(offstage_here: Run) -> None:
    layers = ", ".join(f"model.layers.{i}: {'cpu' if i < 2 else 'disk'}" for i in range(8))
    outside = "model.embed_tokens: cpu, model.norm: cpu, model.rotary_emb: cpu, lm_head: cpu"
    done = offstage_here(f"device_map={{{layers}, {outside}}}", "generate.max_new_tokens=4")
    assert done.code == 0, done.err
    assert offstage_here("device_map=cpu", "max_memory.cpu=8MB", "generate.max_new_tokens=4").tokens == done.tokens


MODULE = """
import torch

class Tiny(torch.nn.Module):
    def __init__(self, words=32, width=16):
        super().__init__()
        self.embed = torch.nn.Embedding(words, width)
        self.hidden = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(4)))
        self.head = torch.nn.Linear(width, words)

    def forward(self, tokens):
        return self.head(torch.tanh(self.hidden(self.embed(tokens))))
"""


def test_a_module_that_is_not_of_transformers_works(
    offstage_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tmp_path.joinpath("mymodels.py").write_text(MODULE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    made: dict[str, Any] = {}
    exec(MODULE, made)
    torch.manual_seed(0)
    model, tokens = made["Tiny"](width=24), torch.tensor([[3, 4]])
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    for _ in range(5):
        tokens = torch.cat([tokens, model(tokens)[:, -1].argmax(-1, keepdim=True)], 1)
    done = offstage_here(
        "model=module", "model._target_=mymodels.Tiny", "model.width=24", "model.path=.", "max_memory.cpu=6KB",
        "generate.prompts=[[3,4]]", "generate.max_new_tokens=5",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.tokens == [tokens[0, 2:].tolist()]
    assert done.record["metrics"]["streamed_bytes_per_token"] > 0


@pytest.mark.parametrize("number", in_ci(signal.SIGINT, of=[signal.SIGINT, signal.SIGTERM]))
def test_an_interrupted_run_says_so(number: signal.Signals, fresh_folder: Path) -> None:
    process = start(fresh_folder, "generate.max_new_tokens=2000", "generate.min_new_tokens=2000")
    wait_for(
        lambda: any("generate: begins" in log.read_text() for log in fresh_folder.glob("outputs/runs/*/*/run.log")),
        process,
    )
    process.send_signal(number)
    done = finish(process, fresh_folder, {})
    assert done.code == 130
    assert done.record["status"] == "interrupted"
    assert "Traceback" not in done.err
    assert not list(fresh_folder.glob("outputs/cache/*/.tmp-*"))


def test_a_signal_is_heeded_where_the_shell_had_it_ignored(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "generate.max_new_tokens=2000", "generate.min_new_tokens=2000"], cwd=tmp_path, env=environment(),
        stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )  # fmt: skip
    wait_for(lambda: records_in(tmp_path), process)
    process.send_signal(signal.SIGINT)
    assert process.wait(300) == 130


@pytest.mark.from_nothing
def test_help_and_the_config_print_without_running_anything(offstage: Run, tmp_path: Path) -> None:
    shown = offstage("--help")
    assert shown.code == 0
    assert "offstage -m max_memory.cpu=1GB,2GB,4GB" in shown.out
    job = offstage("--cfg", "job")
    assert "max_memory:" in job.out
    assert "prompts:" in job.out
    assert not list(tmp_path.iterdir())


def test_shell_completion_knows_the_config(tmp_path: Path) -> None:
    line = {"COMP_LINE": "offstage generate=", "COMP_POINT": "18"}
    done = subprocess.run(
        [*COMMAND, "-sc", "query=bash"], cwd=tmp_path, env=environment(line), capture_output=True, text=True
    )
    assert "generate=sample" in done.stdout, done.stderr


@pytest.mark.long_form
def test_two_processes_on_an_empty_cache_share_one_artifact_a_key(tmp_path: Path) -> None:
    both = [start(tmp_path, "generate.max_new_tokens=4") for _ in range(2)]
    errors = [process.communicate(timeout=300)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], errors
    records = list(records_in(tmp_path).values())
    assert len(records) == 2
    assert records[0]["outputs"] == records[1]["outputs"]
    for stage in STAGES:
        assert len(list(tmp_path.glob(f"outputs/cache/{stage}/*/manifest.json"))) == 1


@pytest.mark.long_form
@pytest.mark.from_nothing
def test_killed_while_any_stage_is_written_the_next_run_is_right(
    offstage_here: Run, described: Path, tmp_path: Path
) -> None:
    chance = random.Random(5)
    shutil.copytree(described, tmp_path / "reference/cache")
    expected = offstage_here("generate.max_new_tokens=4", "outputs=reference")
    tokens = json.loads(next(tmp_path.glob("reference/runs/*/*/run.json")).read_text())["outputs"]
    assert expected.code == 0
    for stage in ("empty_init", "plan", "dispatch", "generate"):
        process = start(tmp_path, "generate.max_new_tokens=4")
        while process.poll() is None and not any(tmp_path.glob(f"outputs/cache/{stage}/*")):
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.communicate()
    done = offstage_here("generate.max_new_tokens=4")
    assert done.code == 0, done.err
    assert done.record["outputs"] == tokens
