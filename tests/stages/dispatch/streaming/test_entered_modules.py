"""Encoders that ``generate`` calls outside of the passes are read ahead at every prompt, and so is what follows."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSeq2SeqLM, T5Config

import offstage
from offstage.stages.dispatch.streaming.streamer import streamer_of
from offstage.stages.dispatch.streaming.weight_cache import WeightCache

PROMPTS = [torch.tensor([[5, 6, 7, 1]]), torch.tensor([[9, 8, 1]]), torch.tensor([[3, 4, 5, 6, 1]])]
SIZES: dict[str, Any] = {
    "vocab_size": 96, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 4, "num_decoder_layers": 4, "num_heads": 4,
    "decoder_start_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("t5")
    AutoModelForSeq2SeqLM.from_config(T5Config(**SIZES)).save_pretrained(folder)
    return folder


def answers(model: Any) -> Sequence[torch.Tensor]:
    return [model.generate(ids, max_new_tokens=6, min_new_tokens=6) for ids in PROMPTS]


def test_an_encoder_is_read_ahead_at_every_prompt(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(AutoModelForSeq2SeqLM.from_pretrained(checkpoint))
    demanded: list[str] = []
    names: dict[int, str] = {}
    bring = WeightCache._bring

    def noting(cache: WeightCache, part: int) -> Any:
        demanded.append(names[part])
        return bring(cache, part)

    monkeypatch.setattr(WeightCache, "_bring", noting)
    with offstage.load(
        checkpoint, cache=tmp_path / "cache", max_length=64, max_memory={"cpu": "1.2MB"}, storage={"io": "direct"},
        device_map={"": "cpu", "encoder.block": "disk", "decoder.block": "disk"}, hardware={"devices": []},
    ) as loaded:  # fmt: skip
        names |= {part.number: part.name for part in streamer_of(loaded.model)._parts}
        streamed = answers(loaded.model)
    assert all(torch.equal(got, wanted) for got, wanted in zip(streamed, expected, strict=True))
    encoders = [name for name in demanded if name.startswith("encoder.")]
    assert len(encoders) <= len(PROMPTS) + 1, "the first part of each prompt, and what is read ahead is the rest"
    assert len(demanded) <= 2 * len(PROMPTS) + 1, "and the first of the decoder that only its first pass uses"
