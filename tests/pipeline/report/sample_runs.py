"""Run records of the real schema, written by the real recorder, with numbers that are known."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from offstage.pipeline.record import RunRecord
from offstage.pipeline.run_schema import StageRun
from offstage.pipeline.stage import Report

STAGES = ("empty_init", "plan", "shard_load", "dispatch", "generate")
ENVIRONMENT = {"offstage": "0.1.0", "torch": "2.13.0", "memory_bytes": 8 * 10**9, "accelerators": []}
MODEL = {"class": "LlamaForCausalLM", "parameters": {"bfloat16": 1_100_000_000}, "bytes": 2_200_000_000}
LAYERS = [f"model.layers.{index}" for index in range(6)]


def config(*, budget: str = "1GB", policy: str = "sequential", prompt: str = "Hello") -> dict[str, Any]:
    return {
        "model": {"kind": "pretrained", "path": "/ckpt", "class": None},
        "dtype": "auto",
        "max_memory": {"cpu": budget},
        "device_map": policy,
        "device_map_overrides": {},
        "hardware": {"devices": None},
        "generate": {"prompts": [prompt], "max_new_tokens": 4},
        "seed": 0,
    }


def write_run(
    folder: Path,
    *,
    budget: int = 1_000_000_000,
    policy: str = "sequential",
    seconds: float | None = 0.5,
    streamed: int | None = 2_000_000_000,
    peak: int = 1_400_000_000,
    metrics: Mapping[str, float | str] | None = None,
    tokens: list[int] | None = None,
    prompt: str = "Hello",
    text: str = " world",
    cached: bool = False,
    experts: Mapping[str, Mapping[str, int]] | None = None,
    repeats: Sequence[Mapping[str, Any]] = (),
    steps: Sequence[Mapping[str, Any]] = (),
    series: Sequence[tuple[float, int]] = (),
    generate: Mapping[str, Any] | None = None,
) -> Path:
    """Write the record of a completed run, and return its folder."""
    asked = config(budget=f"{budget // 10**6}MB", policy=policy, prompt=prompt)
    asked["generate"] |= generate or {}
    record = RunRecord.start(folder, overrides=[f"device_map={policy}"], config=asked, environment=ENVIRONMENT)
    for index, name in enumerate(STAGES):
        record.add_stage(StageRun(name, f"{index}" * 64, cached, 0.25 * (index + 1), str(folder), peak - 10**6))
    figures: dict[str, float | int | str | None] = {
        "decode_seconds_per_token": seconds,
        "decode_tokens_per_second": 1 / seconds if seconds else None,
        "streamed_bytes_per_token": streamed,
        **(metrics or {}),
    }
    bandwidth = figures.get("storage_bandwidth_bytes_per_second")
    if isinstance(bandwidth, float) and streamed is not None:
        figures.setdefault("lower_bound_seconds_per_token", streamed / bandwidth)
    memory: dict[str, dict[str, int | None]] = {
        "budget": {"cpu": budget, "disk": None},
        "predicted": {"cpu": peak + 5 * 10**6, "disk": 7},
        "measured": {"cpu": peak},
    }
    outputs = ({"prompt": prompt, "prompt_tokens": 1, "text": text, "token_ids": tokens or [1, 2, 3, 4]},)
    sections = {"memory": memory, "metrics": figures, "outputs": outputs, "experts": experts or {}}
    rows = {"repeats": tuple(repeats), "steps": tuple(steps), "layers": placed(budget)}
    record.merge(Report("", **sections, **rows, model=MODEL))
    count = cpu_layers(budget)
    record.note(device_map={**dict.fromkeys(LAYERS[:count], "cpu"), **dict.fromkeys(LAYERS[count:], "disk")})
    if series:
        record.note_series("cpu", series)
    record.finish("completed")
    return folder


def repeat(seconds: float, *, earlier: bool = False, contended: bool = False, counts: bool = True) -> dict[str, Any]:
    """Return one repeat as a record has it."""
    metrics = {"decode_seconds_per_token": seconds, "time_to_first_token_seconds": 3 * seconds}
    return {"metrics": metrics, "earlier": earlier, "counts": counts, "processor": {"contended": contended}}


def cpu_layers(budget: int) -> int:
    """Return how many layers the plan puts on the cpu: as many as ``budget`` has units of 0.5 GB."""
    return min(len(LAYERS), -(-budget // 500_000_000))


def placed(budget: int) -> tuple[dict[str, Any], ...]:
    """Return the layers under ``budget`` as a record has them."""
    count = cpu_layers(budget)
    groups = {"cpu": LAYERS[:count], "disk": LAYERS[count:]}
    return tuple(
        {"devices": [device], "count": len(names), "first": names[0], "last": names[-1]}
        for device, names in groups.items()
        if names
    )


def write_failure(folder: Path, *, message: str = "max_memory: too small", stage: str = "plan") -> Path:
    """Write the record of a run that was refused."""
    record = RunRecord.start(folder, overrides=[], config=config(budget="1MB"), environment=ENVIRONMENT)
    record.finish("failed", error=ValueError(message), stage=stage)
    return folder


def write_sweep(folder: Path, *, metrics: Mapping[str, float] | None = None) -> Path:
    """Write a sweep of 3 budgets and 2 policies, a job that was refused and one that was interrupted."""
    number = 0
    for policy, factor in (("sequential", 1.0), ("balanced", 1.25)):
        for budget in (1_000_000_000, 2_000_000_000, 3_000_000_000):
            streamed = 3_500_000_000 - budget
            write_run(
                folder / str(number), budget=budget, policy=policy, seconds=factor * streamed / 1.6e9,
                streamed=streamed, peak=budget + number * 10**6, metrics=metrics, cached=number == 3,
            )  # fmt: skip
            number += 1
    write_failure(folder / str(number))
    interrupted = RunRecord.start(folder / str(number + 1), overrides=[], config=config(), environment=ENVIRONMENT)
    interrupted.finish("interrupted", error=KeyboardInterrupt(), stage="generate")
    return folder


def write_many(folder: Path, count: int) -> Path:
    """Write ``count`` copies of one record, each with its own numbers and with its own plan."""
    pattern = json.loads((write_run(folder / "pattern" / "0") / "run.json").read_text())
    for number in range(count):
        record = copy.deepcopy(pattern)
        record["layers"] = placed(change_record(record, number))
        target = folder / "sweep" / str(number) / "run.json"
        target.parent.mkdir(parents=True)
        target.write_text(json.dumps(record))
    return folder / "sweep"


def change_record(record: dict[str, Any], number: int) -> int:
    """Give ``record`` the settings and figures of the job ``number`` of many, and return its budget in bytes."""
    budget = 5 * 10**8 + number * 3 * 10**6
    record["config"] |= {"max_memory": {"cpu": f"{budget}"}, "device_map": ("sequential", "balanced")[number % 2]}
    record["config"]["seed"] = number % 5
    record["memory"]["budget"]["cpu"] = budget
    record["memory"]["measured"]["cpu"] = budget + (number * 7919) % 10**8
    record["metrics"]["decode_seconds_per_token"] = 1e9 / budget + (number * 31 % 17) / 100
    record["outputs"][0]["token_ids"] = [(number + place) % 32_000 for place in range(256)]
    return budget
