"""The plan's promise: long prompts take what was predicted, not only short ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    LlamaConfig,
    MarianConfig,
    MistralConfig,
    MixtralConfig,
    OPTConfig,
    PegasusConfig,
    PretrainedConfig,
    T5Config,
)

from offstage.stages.units import format_bytes
from tests.benchmarks.caps import can_cap
from tests.benchmarks.checkpoints import make_mixture_like
from tests.benchmarks.predictions import figures
from tests.e2e.conftest import HOST_RATES, Finished
from tests.e2e.media_checkpoints import llava, picture, recording, save, whisper
from tests.long_form import in_ci

CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(hidden_size=512, intermediate_size=2048, num_hidden_layers=3, num_attention_heads=8,
                         num_key_value_heads=2, vocab_size=16000),
    "opt": OPTConfig(hidden_size=512, ffn_dim=2048, num_hidden_layers=3, num_attention_heads=8, vocab_size=16000,
                     word_embed_proj_dim=512, max_position_embeddings=4096),
    "mistral": MistralConfig(hidden_size=512, intermediate_size=1024, num_hidden_layers=12, num_attention_heads=4,
                             num_key_value_heads=4, vocab_size=1000, sliding_window=256),
}  # fmt: skip
MIXTURE = MixtralConfig(hidden_size=128, intermediate_size=256, num_hidden_layers=6, num_attention_heads=4,
                        num_key_value_heads=2, vocab_size=512, num_local_experts=8)  # fmt: skip
PAIRS: dict[str, PretrainedConfig] = {
    "bart": BartConfig(d_model=64, encoder_ffn_dim=96, decoder_ffn_dim=96, encoder_layers=2, decoder_layers=2,
                       encoder_attention_heads=4, decoder_attention_heads=4, vocab_size=96, max_position_embeddings=64),
    "t5": T5Config(d_model=64, d_ff=96, num_layers=2, num_heads=4, d_kv=16, vocab_size=96, decoder_start_token_id=0),
}  # fmt: skip
OF_THE_PROCESS = pytest.mark.of_the_process("what it holds is measured, and a fork shares memory with its server")


def bytes_as_predicted(done: Finished) -> tuple[int, int]:
    """Return what the plan predicted beside weights for the request, and in all, once the host's peak proved it."""
    request, predicted = planned(done)
    assert predicted == pytest.approx(done.record["memory"]["measured"]["cpu"], rel=0.1)
    return request, predicted


def planned(done: Finished) -> tuple[int, int]:
    """Return what the plan predicted beside weights for the request, and in all."""
    assert done.code == 0, done.err
    plan = json.loads(Path(done.record["stages"][1]["artifact"], "plan.json").read_text())
    parts = plan["devices"]["cpu"]["ledger"]
    return sum(parts[name] for name in ("cache", "activations", "scratch")), done.record["memory"]["predicted"]["cpu"]


@OF_THE_PROCESS
@pytest.mark.parametrize("name", in_ci("llama", of=["llama", "mistral", "opt"]))
def test_a_long_prompts_peak_is_predicted_within_a_tenth(
    name: str, tmp_path: Path, offstage: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.bfloat16).save_pretrained(folder)
    prompts = [[7] * 1800, [9] * 1500, [3] * 900, [5] * 10]
    done = offstage(
        f"model.path={folder}", HOST_RATES, "max_memory.cpu=500MB", "storage.io=direct", f"generate.prompts={prompts}",
        "generate.max_new_tokens=2", "generate.min_new_tokens=2", "generate.batch_size=4",
    )  # fmt: skip
    request, predicted = bytes_as_predicted(done)
    assert request > 0.2 * predicted, "the prompts take too little for the test to prove anything"


BEAMS = 6
SEVERAL: dict[str, type[PretrainedConfig]] = {"bart": BartConfig, "pegasus": PegasusConfig, "marian": MarianConfig}


@pytest.mark.long_form
@OF_THE_PROCESS
@pytest.mark.parametrize(
    "name", ["bart", *(pytest.param(name, marks=pytest.mark.long_form) for name in ("pegasus", "marian"))]
)
def test_the_beams_that_a_checkpoint_asks_for_are_planned_for(
    name: str, tmp_path: Path, offstage: Callable[..., Finished], offstage_here: Callable[..., Finished]
) -> None:
    sizes = {"d_model": 256, "vocab_size": 2000, "max_position_embeddings": 1024}
    halves = {"layers": 3, "attention_heads": 4, "ffn_dim": 512}
    sizes |= {f"{half}_{what}": count for half in ("encoder", "decoder") for what, count in halves.items()}
    folder = tmp_path / "checkpoint"
    tokens = {"pad_token_id": 0, "eos_token_id": 1, "decoder_start_token_id": 0, "forced_eos_token_id": 1}
    AutoModelForSeq2SeqLM.from_config(SEVERAL[name](**sizes, **tokens), dtype=torch.float32).save_pretrained(folder)
    said = json.loads((folder / "generation_config.json").read_text())
    given = (
        f"model.path={folder}", "max_memory.cpu=8MB", "storage.io=direct", f"generate.prompts=[{[7] * 900}]",
        "generate.max_new_tokens=16", "generate.min_new_tokens=16",
    )  # fmt: skip
    one = offstage_here(*given, "stop_after=plan")
    folder.joinpath("generation_config.json").write_text(json.dumps({**said, "num_beams": BEAMS}))
    several, asked = offstage(*given), offstage_here(*given, f"generate.num_beams={BEAMS}", "stop_after=plan")
    (alone, _), (request, predicted) = planned(one), bytes_as_predicted(several)
    assert request > 4 * alone, "each beam is a sequence"
    assert request > 0.07 * predicted, "the beams take too little for the test to prove anything"
    plan = several.record["stages"][1]["key"]
    assert plan != one.record["stages"][1]["key"]
    assert plan == asked.record["stages"][1]["key"], "it is the same whoever asks for them"


@pytest.mark.long_form
@OF_THE_PROCESS
@pytest.mark.parametrize("name", ["llava", pytest.param("whisper", marks=pytest.mark.long_form)])
def test_what_encoders_of_images_and_audio_hold_is_predicted(
    name: str, tmp_path: Path, offstage: Callable[..., Finished]
) -> None:
    pytest.importorskip("PIL.Image")
    if name == "llava":
        wide = {"hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "num_hidden_layers": 3}
        folder = save(tmp_path / "checkpoint", llava(side=560, **wide))
        prompt = f"{{prompt: '<image>', images: [{picture(tmp_path / 'a.png', (900, 700))}]}}"
    else:
        wide = {"d_model": 512, "encoder_ffn_dim": 2048, "decoder_ffn_dim": 2048, "encoder_layers": 3}
        folder = save(tmp_path / "checkpoint", whisper(**wide))
        prompt = f"{{audio: [{recording(tmp_path / 'a.wav', seconds=20)}]}}"
    done = offstage(
        f"model.path={folder}", "max_memory.cpu=30MB", "storage.io=direct", f"generate.prompts=[{prompt}]",
        "generate.max_new_tokens=3", "generate.chat=false",
    )  # fmt: skip
    request, _ = bytes_as_predicted(done)
    assert request > 30_000_000, "the media take too little for the test to prove anything"


@pytest.mark.long_form
@OF_THE_PROCESS
def test_the_peak_of_a_mixture_and_what_a_token_streams_are_predicted_within_a_tenth(
    tmp_path: Path, offstage: Callable[..., Finished]
) -> None:
    folder = make_mixture_like("qwen3-moe", tmp_path / "checkpoint")
    done = offstage(
        f"model.path={folder}", HOST_RATES, "max_memory.cpu=60MB", "storage.io=direct", "generate.prompts=[[5,6,7,8]]",
        "generate.max_new_tokens=33", "generate.min_new_tokens=33", f"enforce_memory={str(can_cap()).lower()}",
    )  # fmt: skip
    assert done.code == 0, done.err
    if can_cap():
        assert done.record["enforcement"]["bytes"] < 1.1 * done.record["memory"]["predicted"]["cpu"]
    for predicted, measured in figures(done.record)[:2]:  # seconds are for a quiet machine
        assert predicted == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("name", ["bart", "whisper", pytest.param("t5", marks=pytest.mark.long_form)])
def test_what_a_token_of_an_encoder_decoder_streams_is_its_decoders(
    name: str, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    """The encoder, and the keys and values that the decoder makes of what it says, are for the first token alone."""
    folder, prompt = tmp_path / "checkpoint", "[5,6,7,8]"
    if name == "whisper":
        save(folder, name)
        prompt = f"{{audio: [{recording(tmp_path / 'a.wav')}]}}"
    else:
        AutoModelForSeq2SeqLM.from_config(PAIRS[name], dtype=torch.float32).save_pretrained(folder)
    done = offstage_here(
        f"model.path={folder}", "device_map=disk", "storage.io=direct", f"generate.prompts=[{prompt}]",
        "generate.max_new_tokens=5", "generate.min_new_tokens=5",
    )  # fmt: skip
    assert done.code == 0, done.err
    metrics = done.record["metrics"]
    assert metrics["predicted_streamed_bytes_per_token"] == metrics["streamed_bytes_per_token"] > 0


@pytest.mark.parametrize("together", in_ci("lockstep=2", of=["lockstep=1", "lockstep=2", "batch_size=2"]))
def test_with_guidance_a_token_streams_the_weights_of_both_forwards(
    together: str, offstage_here: Callable[..., Finished]
) -> None:
    asked = (
        "max_memory.cpu=1500kB", "storage.io=direct", "generate.prompts=[[5,6,7,8],[9,10]]", f"generate.{together}",
        "generate.max_new_tokens=6", "generate.min_new_tokens=6",
    )  # fmt: skip
    plain, guided = offstage_here(*asked), offstage_here(*asked, "generate.guidance_scale=1.5")
    for done in (plain, guided):
        assert done.code == 0, done.err
        metrics = done.record["metrics"]
        assert metrics["predicted_streamed_bytes_per_token"] == metrics["streamed_bytes_per_token"] > 0
    one, two = (done.record["metrics"]["predicted_streamed_bytes_per_token"] for done in (plain, guided))
    assert two == 2 * one


@pytest.mark.parametrize("io", ["direct", "mmap"])
def test_a_host_that_is_too_small_is_told_the_bytes_that_the_record_predicts_and_a_budget_that_works(
    io: str, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    AutoModelForCausalLM.from_config(MIXTURE, dtype=torch.float32).save_pretrained(folder)

    def plan(budget: int, host: int) -> Finished:
        hardware = f"+hardware.host.memory={host}"
        given = (f"storage.io={io}", f"max_memory.cpu={budget}", hardware, "generate.prompts=[[5,6,7]]")
        return offstage_here(f"model.path={folder}", "stop_after=plan", *given)

    fits = plan(8_000_000, 10**9)
    predicted = fits.record["memory"]["predicted"]["cpu"]
    refused = plan(8_000_000, predicted - 1_000_000)
    assert refused.code == 4
    assert f"the plan takes {format_bytes(predicted)} on the host" in refused.err
    most = re.search(r"the most that works is (\d+) bytes", refused.err)
    assert most is not None
    smaller = plan(int(most[1]), predicted - 1_000_000)
    assert smaller.code == 0, smaller.err
    assert smaller.record["memory"]["predicted"]["cpu"] <= predicted - 1_000_000
