"""Which figures of the machine a plan goes by: a light model's by what its calls take, and by little else."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.pipeline.stage import MEASURED
from offstage.stages.checkpoints.codec_rates import product_name
from offstage.stages.empty_init.skeleton import PackedProducts, PackedSpec
from offstage.stages.machine.decoding_probe import OF_FILES, HostWeights
from offstage.stages.machine.hardware import Accelerator, Hardware, hardware
from offstage.stages.machine.host_memory import Host
from offstage.stages.machine.kernels import identity
from offstage.stages.machine.process_memory import FILE_NAME, ProcessMemory, identity as process_identity
from offstage.stages.machine.rates import DECODING_NAME, Rates, coarse_rate
from offstage.stages.plan import figures
from offstage.stages.plan.figures import _CACHED_BYTES, declared_weights, is_light, known_machine, machine_rates
from offstage.stages.plan.outline import Outline
from tests.stages.plan.skeletons import outline
from tests.stages.plan.test_stage import config, two_accelerators

NOMINAL = Rates()


def model(*, seconds: float, calls: int) -> Outline:
    """Return a model that is read in so many ``seconds`` at the nominal rate, with so many modules to call."""
    base = outline({"l.0.w": round(seconds * NOMINAL.host)})
    return replace(base, skeleton=replace(base.skeleton, calls=("l.0",) * calls))


def light(*, seconds: float = 0.001, calls: int = 75, **given: Any) -> bool:
    return is_light(model(seconds=seconds, calls=calls), config(**given))


def test_a_model_is_light_whose_calls_take_far_longer_than_reading_its_weights() -> None:
    assert light()
    assert not light(seconds=0.002)
    assert light(seconds=0.002, calls=150)
    assert not light(calls=0), "nothing is known of its calls"


@pytest.mark.parametrize(
    "given", [{"stages": ["finetune"], "finetune": {}}, {"hardware": two_accelerators()}], ids=["trained", "elsewhere"]
)
def test_none_is_light_that_is_trained_or_that_an_accelerator_computes(given: dict[str, Any]) -> None:
    assert not light(**given)


@pytest.mark.parametrize("can", [True, False])
def test_segments_of_an_accelerator_are_taken_to_expand_where_it_was_found_that_they_can(
    can: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Hardware((Accelerator("an H100", 10**10, 10**10, simulated=False),), Host(10**10, 10**10))
    monkeypatch.setattr(figures, "hardware", lambda config, **_: real)
    memory = asdict(ProcessMemory(4 * 10**8, 10**7, 10**8, expands=can))
    (tmp_path / MEASURED).mkdir()
    write_sealed(tmp_path / MEASURED / FILE_NAME, {f"{process_identity()} on an H100": memory})
    assert [one.expands for one in known_machine(config(), tmp_path).accelerators] == [can]


def test_of_a_host_calls_alone_are_measured_for_a_model_that_caches_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user"))
    small, heavy = (outline({"l.0.w": count}) for count in (_CACHED_BYTES - 1, _CACHED_BYTES))
    given = {"hardware": {}, "model": {"kind": "pretrained", "path": str(tmp_path)}, "stages": ["finetune"]}
    known = {f"decoder of bfloat16; {identity()}": {"host": 3 * 10**9, "calls": 5, "loops": 7}}
    (tmp_path / MEASURED).mkdir()
    write_sealed(tmp_path / MEASURED / DECODING_NAME, known)
    assert machine_rates(given, hardware(given), tmp_path, small).host == NOMINAL.host
    assert machine_rates(given, hardware(given), tmp_path, heavy).host == coarse_rate(3 * 10**9)


def test_of_a_codec_that_has_next_to_nothing_of_the_bytes_no_rate_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def rates(_cache: Path, _work: str, names: Collection[str]) -> tuple[dict[str, int], bool]:
        asked.append([*names])
        return {"q8_0": 3 * 10**9}, True

    monkeypatch.setattr(figures, "codec_rates", rates)
    base = outline({"l.0.w": 1000, "l.1.w": 9})
    tensors = [
        replace(spec, packed=PackedSpec(codec, spec.bytes // 2, 1))
        for spec, codec in zip(base.skeleton.tensors, ("q8_0", "f32"), strict=True)
    ]
    packed = replace(base, skeleton=replace(base.skeleton, tensors=tuple(tensors)))
    given = {"hardware": {}, "model": {"kind": "pretrained", "path": str(tmp_path)}, "stages": ["finetune"]}
    found = machine_rates(given, hardware(given), tmp_path, packed, light=True)
    assert (asked, found.dequantising, found.disturbed) == ([["q8_0"], []], coarse_rate(3 * 10**9), True)


def test_products_with_what_stays_packed_are_asked_for_by_what_a_token_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, float] = {}

    def rates(_cache: Path, work: str, names: Mapping[str, float]) -> tuple[dict[str, int], bool]:
        asked.update(names if work == "multiplying" else {})
        return {next(iter(names)): 3 * 10**9} if names else {}, False

    monkeypatch.setattr(figures, "codec_rates", rates)
    base = outline({"l.0.w": 1000, "l.1.w": 900, "l.2.w": 9, "l.3.w": 10})
    parts = (("uint8", (2, 5)),)
    found = [
        PackedProducts(text, parts, compute, tiles=False, tensors=names)
        for text, compute, *names in (("a", None, "l.0.w"), ("b", "bfloat16", "l.1.w", "l.3.w"), ("c", None, "l.2.w"))
    ]
    fused = replace(base, skeleton=replace(base.skeleton, products=tuple(found)))
    given = {"hardware": {}, "model": {"kind": "pretrained", "path": str(tmp_path)}, "stages": ["finetune"]}
    rate = machine_rates(given, hardware(given), tmp_path, fused, light=True).multiplying
    sizes = {product_name(text, parts, "bfloat16", tiles=False): fused.sizes for text in ("a", "b")}
    assert asked == dict(zip(sizes, (fused.sizes["l.0.w"], fused.sizes["l.1.w"] + fused.sizes["l.3.w"]), strict=True))
    assert rate == coarse_rate(3 * 10**9), "of those that have none, what the others have"


def test_before_a_sweep_the_host_is_measured_by_weights_as_the_model_has_them(tmp_path: Path) -> None:
    def declared(**given: Any) -> HostWeights:
        return declared_weights({"dtype": "auto", "model": {"kind": "pretrained", "path": str(tmp_path)}, **given})

    assert declared() == OF_FILES, "nothing is there to say it"
    tmp_path.joinpath("config.json").write_text(json.dumps({"torch_dtype": "float32"}))
    assert declared() == HostWeights("float32")
    assert declared(dtype="float16") == HostWeights("float16")
    quantised = {"dtype": "float16", "quantization_config": {"quant_method": "gptq"}}
    tmp_path.joinpath("config.json").write_text(json.dumps(quantised))
    assert declared() == HostWeights("float16", aligned=True)
