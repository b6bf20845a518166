from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from offstage.pipeline.cache.sealed_files import write_sealed
from offstage.stages.calls.results import kept_cache
from offstage.stages.empty_init.skeleton import Moment, TensorSpec
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.kernels import Kernels, identity
from offstage.stages.machine.rates import DECODING_NAME, Rates, coarse_rate, local_rates, read_rates
from offstage.stages.plan.expert_slots import Routing
from offstage.stages.plan.layout import lay_out
from offstage.stages.plan.memory_needs import BlockCache, MemoryNeeds, memory_needs
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.placement import Placement
from offstage.stages.plan.plan import Plan
from offstage.stages.plan.request.geometry import Geometry, Request, geometry_of, read_geometry
from offstage.stages.plan.traffic import Step, computed_bytes
from offstage.stages.units import CPU
from tests.stages.plan.mixtures import mixture, token_bytes
from tests.stages.plan.plans import make_plan, predicted
from tests.stages.plan.skeletons import outline

NOTHING = (0, 0, 0, 0, 0, 0)
FIFTY = (0, 50, 0, 0, 0, 0)
"""The coefficients of 50 bytes for each sequence."""


def write(folder: Path, **config: Any) -> dict[str, Any]:
    folder.joinpath("config.json").write_text(json.dumps(config))
    return {"path": str(folder)}


@pytest.mark.parametrize(
    ("config", "layers", "cached"),
    [
        ({"num_hidden_layers": 22, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 4}, 22, 512),
        ({"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "head_dim": 32}, 2, 256),
        ({"n_layer": 3, "n_head": 2, "n_embd": 8}, 3, 16),
        ({"num_layers": 3, "num_heads": 2, "d_model": 8, "d_kv": 16}, 3, 64),
        ({"text_config": {"num_hidden_layers": 5, "hidden_size": 8, "num_attention_heads": 2}}, 5, 16),
        ({"model_type": "deepseek_v3"}, 61, 512 + 64),
        ({"model_type": "deepseek_v3", "num_hidden_layers": 2, "hidden_size": 64}, 2, 512 + 64),
        ({"model_type": "mamba", "num_hidden_layers": 2, "hidden_size": 64, "state_size": 8}, 2, 0),
        ({"model_type": "of nobody"}, 0, 0),
        ({}, 0, 0),
    ],
)
def test_the_cache_of_keys_and_values_is_read_from_the_config(
    tmp_path: Path, config: dict[str, Any], layers: int, cached: int
) -> None:
    geometry = read_geometry(write(tmp_path, **config))
    assert (geometry.layers, geometry.cached) == (layers, cached)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention_is_planned_with_the_cache_that_it_keeps(kind: str) -> None:
    config = CONFIG_MAPPING[kind](
        hidden_size=32, intermediate_size=48, moe_intermediate_size=16, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, vocab_size=50, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        kv_lora_rank=16, q_lora_rank=None, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        (cache,) = kept_cache(model(torch.arange(5)[None])).values()
    kept = sum(part.numel() for layer in cache.layers for part in (layer.keys, layer.values))
    assert geometry_of(config.to_dict()).cached == kept // (2 * 5)


def test_a_model_without_a_config_has_no_cache(tmp_path: Path) -> None:
    assert read_geometry({"path": str(tmp_path)}) == read_geometry({}) == Geometry()


def test_the_cache_counts_layers_tokens_and_the_dtype() -> None:
    model = outline({"w": 10})
    needs = memory_needs(model, Geometry(layers=2, cached=8, hidden=4, vocabulary=10), Request(sequences=2, length=512))
    assert needs.cache_bytes == 2 * 8 * 1024 * 4, "no floating weights: float32"


def test_activations_are_the_widest_moment_at_the_shape_of_the_request() -> None:
    wide, long = Moment((0, 0, 0, 8, 0, 0), "mm bfloat16", (NOTHING, NOTHING, FIFTY)), Moment((0, 0, 0, 0, 0, 1))
    model = Outline(replace(outline({"w": 10}).skeleton, moments=(wide, long)))
    short, longer = (memory_needs(model, Geometry(), Request(2, length, length)) for length in (4, 100))
    assert (short.activation_bytes, short.scratch_bytes) == (2 * 4 * 8, 2 * 2 * 50)
    assert (longer.activation_bytes, longer.scratch_bytes) == (2 * 100**2, 0), "the host's peak is another moment"


@pytest.mark.parametrize(
    ("kernels", "expected"),
    [
        ({}, 0),
        ({"mm bfloat16": (0, 0, 1.5)}, 150),
        ({"mm bfloat16": (1, 0, 2)}, 210),
        ({"mm float16": (9, 9, 9)}, 0),
    ],
)
def test_scratch_is_in_proportion_to_a_products_operands_as_the_machines_kernels_take_it(
    kernels: Kernels, expected: int
) -> None:
    moment = Moment(NOTHING, "mm bfloat16", ((10, 0, 0, 0, 0, 0), NOTHING, FIFTY))
    model = Outline(replace(outline({"w": 10}).skeleton, moments=(moment,)))
    assert memory_needs(model, Geometry(), Request(2), kernels).scratch_bytes == expected


def test_decoding_holds_a_layer_of_the_cache_twice_and_repeated_for_every_head() -> None:
    model = Outline(replace(outline({"w": 10}).skeleton, moments=(Moment(NOTHING),)))
    needs = memory_needs(model, Geometry(layers=9, cached=8, hidden=16), Request(1, 10, 1000))
    assert needs.activation_bytes == 1000 * (8 + 2 * 16) * 4


def test_logits_of_a_whole_window_are_held_at_once_and_normalised_piece_by_piece() -> None:
    model = Outline(replace(outline({"w": 10}).skeleton, moments=(Moment(NOTHING),)))
    geometry, kernels = Geometry(layers=9, cached=8, hidden=4, vocabulary=100), {"mm float32": (1.0, 2.0, 3.0)}
    one = memory_needs(model, geometry, Request(2, 10, 0), kernels)
    assert (one.cache_bytes, one.activation_bytes, one.scratch_bytes) == (0, 2 * 100 * (4 + 8), 0)
    window = Request(2, 10, 0, positions=10, normalised=5)
    whole, pieces = (
        memory_needs(model, geometry, request, {}) for request in (replace(window, normalised=None), window)
    )
    assert whole.activation_bytes == 20 * 100 * (4 + 8)
    assert pieces.activation_bytes == 20 * 100 * 4 + 5 * 100 * 8
    head = memory_needs(model, geometry, window, kernels)
    product = 2 * 20 * 4 * 4 + 20 * 100 * 4 + 20 * 4 * 4 + 2 * 4 * 100 * 4 + 3 * 20 * 100 * 4
    assert head.activation_bytes + head.scratch_bytes == product


def planned(model: Outline, **max_memory: str) -> Plan:
    hardware = {"devices": [{"memory": "1GB"}] * 2}
    budgets = {key.lstrip("_"): size for key, size in max_memory.items()}
    config = {"max_memory": budgets, "device_map": "sequential", "device_map_overrides": {}, "hardware": hardware}
    return make_plan(model, {**config, "generate": {}, "storage": {"io": "direct"}})


def test_a_peak_is_weights_reserve_cache_activations_and_the_process() -> None:
    names = [f"l.{index}" for index in range(4)]
    model = outline({f"{name}.w": 10 for name in names}, classes=dict.fromkeys(names, "Block"), no_split=["Block"])
    caches = tuple(BlockCache(name, 100, 90) for name in names)
    plan = predicted(model, planned(model, _0="20", _1="10", cpu="100"), MemoryNeeds(7, caches=caches), Rates())
    of_budget, one = {"weights": 10, "reserve": 10, "cache": 300, "activations": 7}, 2 * 2**20
    assert plan.predicted[0] == {**of_budget, "allocator": 3 * one - 320}, "with two segments that are filled in part"
    of_budget = {"weights": 10, "reserve": 0, "cache": 100, "activations": 7}
    assert plan.predicted[1] == {**of_budget, "allocator": 3 * one - 110}
    assert plan.predicted["cpu"]["process"] == PROCESS_BYTES
    assert plan.predicted["cpu"]["weights"] == 20


def test_what_simulated_accelerators_hold_lies_on_the_host() -> None:
    names = [f"l.{index}" for index in range(4)]
    model = outline({f"{name}.w": 10 for name in names}, classes=dict.fromkeys(names, "Block"), no_split=["Block"])
    caches = tuple(BlockCache(name, 100, 90) for name in names)
    plan = predicted(model, planned(model, _0="20", _1="10", cpu="100"), MemoryNeeds(7, 3, caches=caches), Rates())
    assert plan.predicted["cpu"]["simulated"] == (10 + 10 + 300) + (10 + 100) + 7 + 3
    alone = predicted(model, plan.with_devices(simulated={}, names={}), MemoryNeeds(7, 3, caches=caches), Rates())
    assert "simulated" not in alone.predicted["cpu"], "a real accelerator's memory is its own"


def test_what_is_staged_on_the_host_is_predicted_unless_it_is_mapped() -> None:
    model = outline({f"l.{index}.w": 10 for index in range(4)})
    plan = planned(model, cpu="35")
    assert plan.devices["cpu"].weights == 20
    assert predicted(model, plan, MemoryNeeds(0), Rates()).predicted["cpu"]["reserve"] == 15
    assert predicted(model, plan, MemoryNeeds(0), Rates(), io="mmap").predicted["cpu"]["reserve"] == 0
    through = predicted(model, planned(model, _0="30", cpu="5"), MemoryNeeds(0), Rates()).predicted
    assert (through[0]["reserve"], through["cpu"]["staging"]) == (10, 10)


def test_without_a_rehearsal_kernels_may_copy_the_largest_matrix() -> None:
    specs = (
        TensorSpec("a", (3, 5), "bfloat16"),
        TensorSpec("b", (4, 3, 4), "float16"),
        TensorSpec("c", (99,), "float16"),
    )
    model = outline({"a": 1})
    halves = Outline(replace(model.skeleton, tensors=specs))
    copying = {"strided bmm bfloat16": (1, 1, 0), "mm float16": (0, 2, 0)}
    assert memory_needs(halves, Geometry(), Request(), copying).scratch_bytes == 4 * 3 * 2 * 2, (
        "one of the stacked ones"
    )
    assert memory_needs(halves, Geometry(), Request(), {"strided bmm bfloat16": (1, 1, 0)}).scratch_bytes == 0
    assert memory_needs(halves, Geometry(), Request(), {}).scratch_bytes == 0
    assert memory_needs(model, Geometry(), Request()).scratch_bytes == 0


def test_a_token_takes_as_long_as_the_slowest_of_storage_link_and_memory() -> None:
    model = outline({f"l.{index}.w": 10 for index in range(4)})
    plan = planned(model, cpu="30")
    rates = Rates(storage=10, host=1000, calls=10**9, loops=10**9)
    forecast = predicted(model, plan, MemoryNeeds(0), rates).forecast
    storage = {
        "bottleneck": "storage",
        "storage_bandwidth_bytes_per_second": 10,
        "forwards_for_free": 2.0 / (40 / 1000),
    }
    assert forecast == {
        "streamed_bytes_per_token": 20,
        "seconds_per_token": pytest.approx(2.0 + 20 / 1000 + 0.25 * 40 / 1000),  # no room beside the part that computes
        **storage,
    }
    assert predicted(model, plan, MemoryNeeds(0), Rates(storage=1000, host=10)).forecast["bottleneck"] == "host memory"
    linked = planned(model, _0="30", cpu="100")
    assert predicted(model, linked, MemoryNeeds(0), Rates(host_to_device=10)).forecast["seconds_per_token"] == 2.0


@pytest.mark.parametrize("devices", [[], [{"memory": "1GB"}]])
def test_a_pass_takes_as_long_as_its_tokens_compute_once_they_are_many(devices: list[dict[str, str]]) -> None:
    model, at_once = outline({f"l.{index}.w": 10 for index in range(4)}), 128 if devices else 16
    budgets = {"0": "100"} if devices else {"cpu": "100"}
    given = {"max_memory": budgets, "hardware": {"devices": devices}, "device_map": "sequential"}
    rates = Rates(host=1000, device=1000, calls=10**9, loops=10**9)

    def forecast(sequences: int, **generate: Any) -> Any:
        asked = {"prompts": [[1]] * sequences, "batch_size": sequences, **generate}
        return make_plan(model, {**given, "device_map_overrides": {}, "generate": asked}, rates=rates).forecast

    memory, cores = ("device memory", "device cores") if devices else ("host memory", "host cores")
    few, many = forecast(at_once), forecast(3 * at_once)
    assert (few["seconds_per_token"], few["bottleneck"]) == (pytest.approx(40 / 1000, rel=1e-4), memory)
    assert (many["seconds_per_token"], many["bottleneck"]) == (pytest.approx(3 * 40 / 1000, rel=1e-4), cores)
    guided = forecast(3 * at_once, guidance_scale=1.5)
    assert guided["seconds_per_token"] == pytest.approx(2 * many["seconds_per_token"], rel=1e-4)


def test_of_experts_a_token_computes_with_those_that_it_uses_however_many_are_read() -> None:
    model = mixture("Mixtral")
    tokens = 100
    layout = lay_out(model, Placement(dict.fromkeys(model.sizes, CPU), CPU))
    step = Step(Routing(tokens), tokens=tokens)
    (spec, *_) = model.experts.values()
    looked_up = sum(model.sizes[name] for name in model.lookups)
    assert computed_bytes(layout, step)[CPU] == pytest.approx(tokens * (token_bytes(model) - looked_up))
    assert spec.per_token < spec.count
    assert computed_bytes(layout, Step(Routing(2), tokens=2)) == {}, "they compute while it is read"


def test_guesses_that_are_judged_in_lockstep_have_a_layers_keys_and_values_each_and_no_cache() -> None:
    geometry, model = Geometry(layers=8, cached=16, hidden=4), outline({"w": 10})
    none, some = (memory_needs(model, geometry, Request(length=100, positions=5, judged=count)) for count in (0, 4))
    assert some.cache_bytes == none.cache_bytes
    assert some.activation_bytes - none.activation_bytes == 4 * 100 * 16 * 4


def keep_decoding(folder: Path, host: int = 10_200_000_000, calls: int = 10_200) -> None:
    kept = {"host": host, "calls": calls, "loops": 1_000}
    write_sealed(folder / DECODING_NAME, {f"decoder of bfloat16; {identity()}": kept})


@pytest.mark.long_form
def test_rates_come_from_the_config_or_are_measured_once(tmp_path: Path) -> None:
    assert read_rates({"rates": {"host_to_device": "25GB"}}).host_to_device == 25 * 10**9
    first = local_rates(tmp_path / "hardware", None)
    assert first.host > 0
    assert local_rates(tmp_path / "hardware", None) == first


def test_rates_are_kept_as_measured_and_used_coarsely(tmp_path: Path) -> None:
    keep_decoding(tmp_path)
    write_sealed(tmp_path / "rates.json", {"host_to_device GPU": 20_000_000_000})
    rates = local_rates(tmp_path, None, ["GPU"])
    assert rates.host == coarse_rate(10_100_000_000) == coarse_rate(10_300_000_000)
    assert rates.host_to_device == pytest.approx(20 * 10**9, rel=0.05)
    assert rates.calls == coarse_rate(10_100) == coarse_rate(10_300)
    assert rates.device == Rates().device, "no such accelerator is here: the nominal one stands"


def test_a_rate_that_is_pinned_is_taken_as_it_is_and_the_others_are_measured(tmp_path: Path) -> None:
    keep_decoding(tmp_path)
    rates = local_rates(tmp_path, None, pinned={"storage": "3.333GB"})
    assert (rates.storage, rates.host) == (3_333_000_000, coarse_rate(10_200_000_000))
    nothing = tmp_path / "nothing"
    assert local_rates(nothing, None, pinned={"host": "5GB", "calls": 5000}).host == 5 * 10**9
    assert not nothing.exists(), "nothing had to be measured"


def test_a_plan_says_with_which_rates_it_was_made() -> None:
    config = {"max_memory": {"cpu": "100"}, "device_map": "optimal", "device_map_overrides": {}, "generate": {}}
    assert make_plan(outline({"w": 10}), config, rates=Rates(host=7)).rates["host"] == 7
    given = {**config, "hardware": {"rates": {"host": "3GB"}}}
    assert make_plan(outline({"w": 10}), given).rates["host"] == 3 * 10**9
