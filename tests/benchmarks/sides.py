"""The sides of a benchmark: each generates the same tokens from the same checkpoint in a process of its own.

A side that dies or takes too long is a result too: ``seconds`` is null then, and ``failed`` says why.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from offstage.pipeline.cache import user_cache
from offstage.pipeline.stage import MEASURED
from offstage.stages.machine.rates import DECODING_NAME
from tests.benchmarks import airllm
from tests.benchmarks.caps import run_capped
from tests.benchmarks.throttle import throttled
from tests.e2e.conftest import COMMAND

_NO_ACCELERATOR = 2
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]

ACCELERATE = """
import json, os, sys, time, torch
from transformers import AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
folder, placed, tokens, offload = sys.argv[1], json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
given = {"dtype": "auto"}
if folder.endswith(".gguf"):
    folder, file = os.path.split(folder)
    given = {"gguf_file": file, "dtype": torch.bfloat16}
model = AutoModelForCausalLM.from_pretrained(
    folder, **placed, offload_folder=offload, **given)
times = []
class Clock(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
ids = torch.tensor(json.loads(sys.argv[5]), device=sys.argv[6])
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                     do_sample=False, stopping_criteria=StoppingCriteriaList([Clock()]))
answers = out[:, ids.shape[1]:].tolist()
print(json.dumps({"seconds": (times[-1] - times[0]) / (len(times) - 1), "tokens": answers[0], "answers": answers}))
"""

FROM_PYTHON = """
import json, sys, time, torch
from transformers import AutoConfig, AutoModelForCausalLM, StoppingCriteria, StoppingCriteriaList
door, folder, budget, tokens, work = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
prompt = json.loads(sys.argv[6])
options = {"max_memory": {"cpu": budget}} if budget else {}
if door == "offstage.load":
    import offstage
    loaded = offstage.load(folder, cache=work, **options)
    model = loaded.model
else:
    if door.startswith("accelerate"):
        from accelerate import init_empty_weights, load_checkpoint_and_dispatch
    else:
        from offstage import init_empty_weights, load_checkpoint_and_dispatch
    config = AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=config.dtype).eval()
    options["device_map"] = "auto" if door.startswith("accelerate") else "optimal"
    options["no_split_module_classes"] = model._no_split_modules
    model = load_checkpoint_and_dispatch(model, folder, offload_folder=work, dtype=config.dtype, **options)
times = []
class Clock(StoppingCriteria):
    def __call__(self, ids, scores, **kwargs):
        times.append(time.perf_counter())
        return torch.zeros(len(ids), dtype=torch.bool)
ids = torch.tensor([prompt])
out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, min_new_tokens=tokens,
                     do_sample=False, stopping_criteria=StoppingCriteriaList([Clock()]))
said = {"seconds": (times[-1] - times[0]) / (len(times) - 1), "tokens": out[0, ids.shape[1]:].tolist()}
if door == "offstage.load":
    stall = loaded.traffic.stall_seconds
    said |= {"budget": loaded.plan.budgets["cpu"], "stall": stall, "forecast": dict(loaded.plan.forecast)}
print(json.dumps(said))
"""

Side = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """What all sides have in common: the ``cap`` in bytes, the new ``tokens``, and the seconds that a side may take.

    ``read_rate`` is what the storage gives a second, in bytes; null: what it has.
    """

    checkpoint: Path
    work: Path
    cap: int
    tokens: int
    timeout_seconds: float
    read_rate: int | None = None


def in_turn(names: Sequence[str], number: int) -> list[str]:
    """Return ``names`` in the order of the round ``number``: each comes first once in as many rounds as there are."""
    first = number % len(names)
    return [*names[first:], *names[:first]]


def accelerate_side(setting: Setting, budget: int, prompts: Sequence[Sequence[int]] = (PROMPT,)) -> Side:
    """Run transformers + accelerate with a host budget of ``budget`` bytes; ``prompts``, all of one length, in a batch.

    Seconds are those of a step.
    """
    spill = setting.work / "accelerate-offload"
    placed = {"device_map": "auto", "max_memory": {"cpu": budget}}
    try:
        command = accelerate_command(setting.checkpoint, setting.tokens, placed, spill=spill, prompts=prompts)
        return printed_side(setting, command)
    finally:
        shutil.rmtree(spill, ignore_errors=True)


def accelerate_command(
    checkpoint: Path, tokens: int, placed: Mapping[str, Any], *, spill: Path,
    prompts: Sequence[Sequence[int]] = (PROMPT,), device: str = "cpu",
) -> list[str]:  # fmt: skip
    """Return the command that has transformers + accelerate answer ``prompts``, which come on ``device``.

    ``placed`` are ``from_pretrained``'s options of where weights go; those on disk go to files in ``spill``.
    """
    arguments = [str(checkpoint), json.dumps(placed), str(tokens), str(spill), json.dumps(prompts), device]
    return [sys.executable, "-c", ACCELERATE, *arguments]


SIMULATED: Mapping[str, Any] = {
    "devices": [{"memory": "80GB"}],
    "rates": {
        "storage": "1GB",
        "host": "10GB",
        "host_to_device": "12GB",
        "device": "800GB",
        "dequantising": "4GB",
        "calls": 15000,
    },
}
"""The machine of a benchmark that is tried where no accelerator is: its figures say nothing."""


def add_simulated(parser: argparse.ArgumentParser) -> None:
    """Give ``parser`` the option to go by a simulated accelerator."""
    parser.add_argument("--simulated", action="store_true", help="try it without an accelerator: figures say nothing")


def need_accelerator(parser: argparse.ArgumentParser, advice: str = "", *, simulated: bool = False) -> None:
    """End the command of ``parser`` with exit code 2 where there is no accelerator; it says so, and the ``advice``.

    One that is ``simulated`` does as well.
    """
    if not simulated and not torch.cuda.is_available():
        parser.exit(_NO_ACCELERATOR, f"no accelerator here{advice}\n")


def python_side(setting: Setting, door: str, budget: int = 0) -> Side:
    """Run the function ``door`` of ours or of accelerate, with a host budget of ``budget`` bytes, or one worked out."""
    work = setting.work / "from-python"
    arguments = [door, str(setting.checkpoint), str(budget), str(setting.tokens), str(work), json.dumps(PROMPT)]
    try:
        return printed_side(setting, [sys.executable, "-c", FROM_PYTHON, *arguments])
    finally:
        shutil.rmtree(work, ignore_errors=True)


def airllm_side(setting: Setting, folder: Path, python: str) -> Side:
    """Run AirLLM from its converted ``folder``."""
    return printed_side(setting, airllm.command(folder, python, tokens=setting.tokens, prompt=PROMPT))


def offstage_side(setting: Setting, options: Sequence[str]) -> Side:
    """Run offstage with budgets worked out from the cap; what its record says."""
    shutil.rmtree(setting.work / "outputs", ignore_errors=True)
    done = _run(setting, offstage_command(setting.checkpoint, setting.tokens, ["max_memory=null", *options]))
    if isinstance(done, dict):
        return done
    record = record_in(setting.work)
    metrics = record["metrics"]
    routed = {"hit_rate": metrics["expert_hit_rate"]} if "expert_hit_rate" in metrics else {}
    guessed = {name: metrics[name] for name in ("passes", "tokens_per_pass", "draft_acceptance") if name in metrics}
    return {**routed, **guessed} | {
        "seconds": metrics["decode_seconds_per_token"],
        "tokens": record["outputs"][0]["token_ids"],
        "answers": [output["token_ids"] for output in record["outputs"]],
        "predicted": metrics["predicted_seconds_per_token"],
        "predicted_peak": record["memory"]["predicted"].get("cpu"),
        "streamed": metrics["streamed_bytes_per_token"],
        "predicted_streamed": metrics["predicted_streamed_bytes_per_token"],
        "load": metrics["load_seconds"],
        "stall": metrics["stall_seconds_per_token"],
        "bottleneck": metrics["bottleneck"],
        "peak": metrics["peak_host_bytes"],
        "budget": record["memory"]["budget"].get("cpu"),
    }


def offstage_forecast(setting: Setting, options: Sequence[str]) -> dict[str, Any]:
    """Return what offstage's plan under the cap predicts; what is cached in the work folder stays."""
    shutil.rmtree(setting.work / "outputs" / "runs", ignore_errors=True)
    asked = ["max_memory=null", "stop_after=plan", *options]
    done = _run(setting, offstage_command(setting.checkpoint, setting.tokens, asked))
    if isinstance(done, dict):
        raise SystemExit(f"no plan: {done['failed']}")
    forecast: dict[str, Any] = artifact(record_in(setting.work), "plan", "plan.json")["forecast"]
    return forecast


def offstage_command(checkpoint: Path, tokens: int, options: Sequence[str]) -> list[str]:
    """Return the command that has offstage generate ``tokens`` tokens from ``checkpoint``."""
    fixed = [f"generate.max_new_tokens={tokens}", f"generate.min_new_tokens={tokens}"]
    return [*COMMAND, f"model.path={checkpoint}", f"generate.prompts=[{PROMPT}]", *fixed, *options]


def offstage_record(checkpoint: Path, work: Path, *, tokens: int, options: Sequence[str]) -> dict[str, Any]:
    """Run offstage without a cap, nothing of it cached, in the folder ``work``; return its record."""
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    command = offstage_command(checkpoint, tokens, options)
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"offstage failed: {done.stderr.strip()[-2000:]}")
    return record_in(work)


def offstage_plan(checkpoint: Path, work: Path, options: Sequence[str]) -> dict[str, Any]:
    """Return the plan that offstage makes with ``options``."""
    record = offstage_record(checkpoint, work, tokens=1, options=[*options, "stop_after=plan"])
    return artifact(record, "plan", "plan.json")


def measure_machine(planned: Mapping[Path, Sequence[str]], work: Path) -> None:
    """Have plans for checkpoints, each ``planned`` with options, go from now on by what this machine does in this hour,
    kept in the folder ``work``.

    What is kept for the user may be of an hour when others had more of a shared machine.
    """
    os.environ["XDG_CACHE_HOME"] = str(work / "user")
    (user_cache() / MEASURED / DECODING_NAME).unlink(missing_ok=True)
    for checkpoint, options in planned.items():
        offstage_plan(checkpoint, work / "measuring", options)


def artifact(record: dict[str, Any], stage: str, name: str) -> dict[str, Any]:
    """Return what the JSON file ``name`` of the ``stage`` of a run holds."""
    folder = next(Path(one["artifact"]) for one in record["stages"] if one["name"] == stage)
    content: dict[str, Any] = json.loads(folder.joinpath(name).read_text())
    return content


def record_in(work: Path) -> dict[str, Any]:
    """Return the one run record below ``work``."""
    record: dict[str, Any] = json.loads(next(work.glob("outputs/runs/*/*/run.json")).read_text())
    return record


def printed_side(setting: Setting, command: Sequence[str]) -> Side:
    """Run ``command`` and return the JSON that it printed last."""
    done = _run(setting, command)
    return done if isinstance(done, dict) else dict(json.loads(done.stdout.splitlines()[-1]))


def _run(setting: Setting, command: Sequence[str]) -> subprocess.CompletedProcess[str] | Side:
    """Run ``command`` under the cap; return it finished, or why it isn't."""
    try:
        with throttled(setting.work, setting.read_rate) as enter:
            done = run_capped(enter(command), setting.cap, cwd=setting.work, timeout_seconds=setting.timeout_seconds)
    except subprocess.TimeoutExpired:
        return {"seconds": None, "failed": f"not done after {setting.timeout_seconds:.0f} s"}
    if not done.returncode:
        return done
    said = done.stderr.strip().splitlines()[-1:] or ["nothing said"]
    return {"seconds": None, "failed": f"exit {done.returncode}: {said[0][-120:]}"}
