"""``generate.cache_implementation=offloaded``: keys and values wait on the host, in the budget and in the forecast."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, BartConfig, LlamaConfig, T5Config

from tests.e2e.conftest import Finished
from tests.e2e.media_checkpoints import recording, save, tell_languages, whisper
from tests.long_form import in_ci

Run = Callable[..., Finished]
BUDGET_EXIT = 4
ON_HOST, IN_FEWER_BITS = (f"+generate.cache_implementation={kind}" for kind in ("offloaded", "quantized"))
PROMPT = f"generate.prompts=[{[place % 90 + 3 for place in range(400)]},{[place % 80 + 3 for place in range(300)]}]"
LINK = 100 * 10**6
RATES = f"+hardware.rates={{storage: 1GB, host: 10GB, host_to_device: {LINK}, device: 100GB}}"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model whose cache is far larger than a layer: 16 kB a token and layer, of twelve."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wide")
    config = LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=16, num_key_value_heads=16,
        head_dim=64, vocab_size=100, max_position_embeddings=2048,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def asked(checkpoint: Path, *, memory: str = "1GB", **budgets: str) -> tuple[str, ...]:
    given = {"0": "4MB", "cpu": "20MB", **budgets}
    return (
        f"model.path={checkpoint}",
        PROMPT,
        "generate.max_new_tokens=5",
        f"hardware.devices=[{{memory: {memory}}}]",
        f"max_memory={{{', '.join(f'{name}: {size}' for name, size in given.items())}}}",
        RATES,
    )


def planned(run: Run, *given: str) -> dict[str, Any]:
    done = run(*given, "stages=plan_only")
    assert done.code == 0, done.err
    plan: dict[str, Any] = json.loads(Path(done.record["stages"][-1]["artifact"], "plan.json").read_text())
    return plan


def test_a_device_without_room_for_the_cache_is_refused_and_has_it_on_the_host_with_the_same_tokens(
    offstage_here: Run, checkpoint: Path
) -> None:
    together = "generate.lockstep=2"
    on_device, waiting = (planned(offstage_here, *asked(checkpoint), together, *more) for more in ((), (ON_HOST,)))
    with_cache, needed = (sum(plan["devices"]["0"]["ledger"].values()) for plan in (on_device, waiting))
    memory = (with_cache + needed) // 2
    assert with_cache - needed > 10 * 10**6
    refused = offstage_here(*asked(checkpoint, memory=str(memory)), together)
    assert refused.code == BUDGET_EXIT
    assert "generate.cache_implementation=offloaded" in refused.err
    expected = offstage_here(*asked(checkpoint), together)
    offloaded = offstage_here(*asked(checkpoint, memory=str(memory)), together, ON_HOST)
    assert (offloaded.code, offloaded.tokens) == (0, expected.tokens), offloaded.err


def test_the_host_has_the_caches_bytes_the_device_those_of_two_layers_and_a_token_the_time_of_its_crossing(
    offstage_here: Run, checkpoint: Path
) -> None:
    on_device, waiting = (
        planned(offstage_here, *asked(checkpoint), "generate.lockstep=1", *more) for more in ((), (ON_HOST,))
    )
    layer = 2 * 16 * 64 * 4 * 448
    assert waiting["devices"]["cpu"]["ledger"]["cache"] == 12 * layer
    assert waiting["devices"]["0"]["ledger"]["cache"] == 2 * layer
    assert 11 * layer < on_device["devices"]["0"]["ledger"]["cache"] <= 12 * layer
    crossing = waiting["forecast"]["cache_bytes_per_token"]
    assert crossing == 12 * layer
    seconds = waiting["forecast"]["seconds_per_token"] - on_device["forecast"]["seconds_per_token"]
    assert seconds == pytest.approx(crossing / LINK, rel=0.05)


def test_the_plan_says_which_is_better_there_weights_or_the_cache(offstage_here: Run, checkpoint: Path) -> None:
    def notes(*given: str) -> str:
        return " ".join(planned(offstage_here, *asked(checkpoint), "generate.lockstep=1", *given)["notes"])

    roomy = "max_memory={0: 20MB}"
    assert "KV cache" not in notes(roomy), "all weights are there"
    assert "waits on the host; in place of as many bytes of weights" not in notes(ON_HOST), "it has none to spare"
    slow = RATES.replace("storage: 1GB", "storage: 10MB")
    streamed = ("max_memory={0: 1MB, cpu: 300kB}", slow)
    assert "generate.cache_implementation=offloaded" in notes(*streamed)
    assert "KV cache" not in notes(*streamed, ON_HOST)
    assert "KV cache" not in notes(*streamed, IN_FEWER_BITS), "it can't wait there in these"


@pytest.mark.parametrize(
    "more", in_ci(["generate.lockstep=2"], of=[[], ["generate.lockstep=2"], ["generate.num_beams=2"]]), ids=str
)
def test_streamed_weights_go_with_it(more: list[str], offstage_here: Run, checkpoint: Path) -> None:
    given = (*asked(checkpoint), *more)
    expected, offloaded = offstage_here(*given), offstage_here(*given, ON_HOST)
    assert expected.code == 0, expected.err
    assert (offloaded.code, offloaded.tokens) == (0, expected.tokens), offloaded.err
    assert offloaded.record["metrics"]["streamed_bytes_per_token"] > 0


@pytest.fixture(scope="module", params=in_ci("bart", of=["t5", "bart"]))
def halves(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an encoder-decoder that keeps 2 kB of each token and layer, its own and the encoder's, of four layers."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp(request.param)
    sizes = {"vocab_size": 100, "d_model": 64, "decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96}
    config = (
        T5Config(**sizes, d_kv=64, d_ff=96, num_layers=4, num_heads=4)
        if request.param == "t5"
        else BartConfig(**{**sizes, "d_model": 256}, **heads, encoder_layers=4, decoder_layers=4)
    )
    AutoModelForSeq2SeqLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("more", in_ci("generate.num_beams=2", of=["generate.num_beams=2", "generate.lockstep=2"]))
def test_a_decoder_keeps_on_the_host_what_it_has_of_its_encoder_too(
    more: str, offstage_here: Run, halves: Path
) -> None:
    third = (halves / "model.safetensors").stat().st_size // 3
    given = (*asked(halves, **{"0": str(third)}), "+generate.min_new_tokens=5", more)
    expected, offloaded = offstage_here(*given), offstage_here(*given, ON_HOST)
    assert expected.code == 0, expected.err
    assert (offloaded.code, offloaded.tokens) == (0, expected.tokens), offloaded.err
    assert offloaded.record["metrics"]["streamed_bytes_per_token"] > 0


def test_the_host_has_the_bytes_of_both_of_a_decoders_caches(offstage_here: Run, halves: Path) -> None:
    on_device, waiting = (
        planned(offstage_here, *asked(halves), "generate.lockstep=1", *more) for more in ((), (ON_HOST,))
    )
    layer = 2 * 4 * 64 * 4 * (64 + 448)
    assert waiting["devices"]["cpu"]["ledger"]["cache"] == 4 * layer
    assert waiting["devices"]["0"]["ledger"]["cache"] == 2 * layer
    assert 3 * layer * 400 / 512 < on_device["devices"]["0"]["ledger"]["cache"] <= 4 * layer
    assert waiting["forecast"]["cache_bytes_per_token"] == 4 * layer


@pytest.mark.long_form
def test_what_is_heard_waits_there_too(offstage_here: Run, tmp_path: Path) -> None:
    wide = {"d_model": 128, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "max_target_positions": 128}
    folder = tell_languages(save(tmp_path / "whisper", whisper(**wide)))
    given = (
        f"model.path={folder}", f"generate.prompts=[{{audio: [{recording(tmp_path / 'a.wav', seconds=9)}]}}]",
        "generate.max_new_tokens=61", "+generate.min_new_tokens=59", "hardware.devices=[{memory: 1GB}]",
        f"max_memory={{0: {(folder / 'model.safetensors').stat().st_size // 2}, cpu: 20MB}}", RATES,
    )  # fmt: skip
    expected, offloaded = offstage_here(*given), offstage_here(*given, ON_HOST)
    assert expected.code == 0, expected.err
    assert (offloaded.code, offloaded.tokens) == (0, expected.tokens), offloaded.err
    cache_bytes = planned(offstage_here, *given, ON_HOST)["devices"]["cpu"]["ledger"]["cache"]
    assert cache_bytes == 2 * (128 + 1536) * 2 * 128 * 4, "the decoder begins with tokens of its own"


@pytest.mark.long_form
def test_on_the_host_alone_it_changes_nothing(offstage_here: Run, checkpoint: Path) -> None:
    given = (f"model.path={checkpoint}", PROMPT, "generate.max_new_tokens=3", "max_memory.cpu=20MB")
    expected, offloaded = offstage_here(*given), offstage_here(*given, ON_HOST)
    assert (offloaded.code, offloaded.tokens) == (0, expected.tokens), offloaded.err
