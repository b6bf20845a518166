"""``model.quantize`` of the command: what it costs, what it saves, and a plan of it that needs no quantised byte."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Finished
from tests.e2e.quantised_twins import save_plain

Run = Callable[..., Finished]
TEXTS = "score.texts=['If the memory is not enough, the weights wait on disk.','A plan says what lies where.']"
RATES = ("hardware.rates={storage: 1GB, host: 10GB, dequantising: 1GB}",)
KINDS = (None, "q8_0", "fp8")


def artifact(record: Mapping[str, Any], stage: str, file: str) -> Any:
    (folder,) = (Path(each["artifact"]) for each in record["stages"] if each["name"] == stage)
    return json.loads((folder / file).read_text())


def by_kind(finished: Finished) -> dict[str | None, dict[str, Any]]:
    return {record["config"]["model"]["quantize"]: record for record in finished.records}


def stored(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("outputs/cache/offload/*/*.dat")}


@pytest.mark.long_form
@pytest.mark.usefixtures("jobs_fork")
def test_a_sweep_says_what_each_format_costs_and_quantises_once(offstage_here: Run, tmp_path: Path) -> None:
    sweep = ("-m", "stages=score", TEXTS, *RATES, "model.quantize=null,q8_0,fp8")
    first = offstage_here(*sweep, "max_memory.cpu=1.9MB")
    assert first.code == 0, first.err
    records, files = by_kind(first), stored(tmp_path)
    assert tuple(records) == KINDS
    losses = {kind: math.log(record["metrics"]["perplexity"]) for kind, record in records.items()}
    assert all(0 < abs(losses[kind] - losses[None]) < 0.05 for kind in ("q8_0", "fp8")), losses
    read = {kind: record["metrics"]["streamed_bytes_per_forward"] for kind, record in records.items()}
    assert read["fp8"] < read["q8_0"] < 0.7 * read[None]
    again = offstage_here(*sweep, "max_memory.cpu=2.5MB")
    assert again.code == 0, again.err
    assert stored(tmp_path) == files
    assert len(files) == 2 * len(list((Path(__file__).parents[2] / "conf/checkpoints/tiny").glob("*.safetensors")))
    for kind, record in by_kind(again).items():
        assert record["metrics"]["perplexity"] == records[kind]["metrics"]["perplexity"], "in any budget"


@pytest.mark.parametrize("kind", ["q8_0", "fp8"])
def test_a_plan_of_headers_or_of_the_config_alone_is_the_runs(kind: str, offstage_here: Run, tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", "qwen3moe")
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(source / "config.json", alone)
    asked = (f"model.quantize={kind}", "model=pretrained", *RATES, "hardware.devices=[]", "max_memory.cpu=1.2MB")
    asked = (*asked, "generate.prompts=[[5,66,7]]", "generate.max_new_tokens=3", "storage.io=direct")
    plans = {}
    for name, path, more in (
        ("headers", source, ("stages=plan_only",)),
        ("config", alone, ("stages=plan_only",)),
        ("run", source, ()),
    ):
        done = offstage_here(*asked, f"model.path={path}", *more)
        assert done.code == 0, done.err
        plans[name] = {
            "plan": artifact(done.record, "plan", "plan.json"),
            "skeleton": artifact(done.record, "empty_init", "skeleton.json"),
        }
        assert bool(stored(tmp_path)) == (name == "run"), "a plan quantises nothing"
    assert plans["headers"]["skeleton"] == plans["run"]["skeleton"] == plans["config"]["skeleton"]
    assert plans["headers"]["plan"] == plans["run"]["plan"] == plans["config"]["plan"]
    counted = sum(
        tensor["packed"]["bytes"] for tensor in plans["run"]["skeleton"]["tensors"] if tensor["packed"] is not None
    )
    padded = sum(path.stat().st_size for path in tmp_path.glob("outputs/cache/offload/*/*.dat"))
    assert 0 <= padded - counted < 0.01 * counted, "files begin each tensor at a multiple of 64 bytes"


REFUSED = (
    (("model.quantize=q3_k",), "model.quantize: 'q3_k' is none of q8_0, q6_k, q5_k, q4_k, fp8 (did you mean 'q6_k'?)"),
    (("model.quantize=8",), "model.quantize: 8 is no text; give q8_0, q6_k, q5_k, q4_k, fp8, or null"),
)


@pytest.mark.parametrize(("options", "words"), REFUSED)
def test_what_can_not_be_followed_is_one_line(options: tuple[str, ...], words: str, offstage_here: Run) -> None:
    done = offstage_here(*options)
    assert done.code == 2
    assert words in done.err
    assert len(done.err.strip().splitlines()) == 1


def test_an_adapter_learns_beside_weights_that_are_quantised(offstage_here: Run, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    (tmp_path / "text.txt").write_text("The weights wait on disk until they are used. " * 40)
    options = ("stages=finetune", "finetune.text_file=text.txt", "finetune.steps=2", "finetune.window=32", *RATES)
    done = offstage_here(*options, "model.quantize=q8_0", "finetune.lora={r: 2}", "max_memory.cpu=2.5MB")
    assert done.code == 0, done.err
    fused = offstage_here(*options, "model.quantize=q8_0", "finetune.lora={r: 2}", "quantized.products=fused")
    assert fused.code == 2
    assert "'fused' has no gradients, and the run trains; take 'exact'" in fused.err
