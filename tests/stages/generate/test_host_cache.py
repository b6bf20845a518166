"""A cache that waits on the host: what attention is given is what a cache that stays gives, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import GraniteSpeechConfig, GraniteSpeechForConditionalGeneration
from transformers.cache_utils import DynamicLayer

from offstage.pipeline.errors import ConfigError
from offstage.stages.dispatch.transfer.arena import HostMemory
from offstage.stages.dispatch.transfer.link import Event, Piece
from offstage.stages.dispatch.transfer.links import SynchronousLink
from offstage.stages.generate.host_cache import HostLayer, HostRoom, LayerOrder, host_cache, why_not_on_host
from offstage.stages.inputs.generate_options import KEPT_POSITIONS
from offstage.stages.machine.aligned_memory import Bytes, private_bytes
from tests.e2e.media_checkpoints import whisper
from tests.stages.plan.cache_models import build, inputs_of


class CountingLink(SynchronousLink):
    """A link that counts its copies."""

    def __init__(self) -> None:
        super().__init__(HostMemory)
        self.copies = 0

    def copy(self, pieces: Sequence[Piece], *, after: Event, urgent: bool = False) -> Event:
        self.copies += urgent
        return super().copy(pieces, after=after, urgent=urgent)


def layers(room: int = 1, sizes: list[int] | None = None) -> tuple[DynamicLayer, HostLayer]:
    def allocate(size: int) -> Bytes:
        if sizes is not None:
            sizes.append(size)
        return private_bytes(size)

    return DynamicLayer(), HostLayer(HostRoom(room, allocate, lambda _: CountingLink()), LayerOrder())


def states(positions: int, *, rows: int = 2, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (rows, 3, positions, 8)
    return torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)


def same(one: DynamicLayer, other: HostLayer, positions: int, *, rows: int = 2) -> None:
    given = states(positions, rows=rows)
    for expected, updated in zip(one.update(*given), other.update(*given), strict=True):
        assert torch.equal(updated, expected)
        assert updated.stride() == expected.stride(), "kernels are chosen by that too"
    assert other.get_seq_length() == one.get_seq_length()
    assert other.get_mask_sizes(1) == one.get_mask_sizes(1)


def test_it_gives_what_a_layer_that_stays_gives_as_it_grows_beyond_its_room() -> None:
    torch.manual_seed(0)
    one, other = layers()
    for positions in (5, 1, 1, KEPT_POSITIONS, 1, 3 * KEPT_POSITIONS, 1):
        same(one, other, positions)


def test_sequences_are_reordered_repeated_and_selected_and_positions_taken_back() -> None:
    torch.manual_seed(0)
    one, other = layers()
    same(one, other, 9)
    changes: list[tuple[Callable[[Any], object], int]] = [
        (lambda layer: layer.reorder_cache(torch.tensor([1, 0])), 2),
        (lambda layer: layer.batch_repeat_interleave(2), 4),
        (lambda layer: layer.batch_select_indices(torch.tensor([3, 0])), 2),
        (lambda layer: layer.crop(-4), 2),
    ]
    for change, rows in changes:
        for layer in (one, other):
            change(layer)
        same(one, other, 1, rows=rows)


def test_what_is_on_its_way_is_what_is_kept_when_it_is_used() -> None:
    torch.manual_seed(0)
    one, other = layers()
    for positions, forgotten in ((9, 0), (1, 4), (2, 8), (3, 0), (1, 0)):
        same(one, other, positions)
        other.ask()
        for layer in (one, other):
            layer.crop(-forgotten)


def test_memory_is_taken_once_for_what_was_foretold() -> None:
    sizes: list[int] = []
    _, other = layers(100, sizes)
    for positions in (80, *[1] * 20):
        other.update(*states(positions))
    assert sizes == [2 * KEPT_POSITIONS * 2 * 3 * 8 * 2] * 2
    other.update(*states(29))
    assert len(sizes) == 4


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "qwen3_next", "t5", "bart"])
@pytest.mark.parametrize("beams", [1, 3])
def test_models_with_all_kinds_of_layers_decode_the_same(name: str, beams: int) -> None:
    torch.manual_seed(0)
    model: Any = build(name)
    given = inputs_of(name, sequences=2, length=90)
    options = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "num_beams": beams, "pad_token_id": 0}
    expected = model.generate(**given, **options)
    link = CountingLink()
    with host_cache(model, HostRoom(96, private_bytes, lambda _: link)) as cache:
        whole = next(iter(cache.values()))
        two = model.config.is_encoder_decoder
        halves = (whole.self_attention_cache, whole.cross_attention_cache) if two else (whole,)
        assert all(any(isinstance(layer, HostLayer) for layer in half.layers) == (name != "mistral") for half in halves)
        assert torch.equal(model.generate(**given, **options, **cache), expected)
    assert (link.copies > 0) == (name != "mistral"), "layers come ahead of their use"


def test_a_generate_that_decodes_each_part_of_a_recording_begins_with_an_empty_cache_in_the_same_memory() -> None:
    torch.manual_seed(0)
    model, processor = whisper()
    sound = torch.randn(65 * 16000).numpy()
    given = processor(
        sound, sampling_rate=16000, return_tensors="pt", truncation=False, padding="longest", return_attention_mask=True
    )
    model.generation_config.no_timestamps_token_id = len(processor.tokenizer) - 1
    options = {"max_new_tokens": 9, "do_sample": False, "return_timestamps": True}
    expected, sizes = model.generate(**given, **options), list[int]()

    def allocate(size: int) -> Bytes:
        sizes.append(size)
        return private_bytes(size)

    with host_cache(model, HostRoom(9, allocate)) as cache:
        assert torch.equal(model.generate(**given, **options, **cache), expected)
    assert expected.shape[1] > 2 * 9, "of more parts than one"
    layer = 2 * KEPT_POSITIONS * 32 * 4, 2 * (1500 // KEPT_POSITIONS + 1) * KEPT_POSITIONS * 32 * 4
    assert sum(sizes) == 2 * sum(layer)
    assert not model.get_encoder()._forward_pre_hooks


def test_a_call_that_has_its_encoder_called_leaves_the_caches_of_others_as_they_are() -> None:
    model: Any = build("t5")
    given = inputs_of("t5", sequences=1, length=5)
    with host_cache(model, HostRoom(9, private_bytes)) as one:
        model.generate(**given, max_new_tokens=3, min_new_tokens=3, **one)
        with host_cache(model, HostRoom(9, private_bytes)):
            model.get_encoder()(**given)
        kept = next(iter(one.values()))
        assert kept.get_seq_length() == 3
        model.get_encoder()(**given)
        assert kept.get_seq_length() == 0


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("LlamaForCausalLM", None),
        ("T5ForConditionalGeneration", None),
        ("WhisperForConditionalGeneration", None),
        ("GraniteSpeechForConditionalGeneration", None),
        ("KyutaiSpeechToTextForConditionalGeneration", "has a generate of its own, and no encoder"),
        ("RwkvForCausalLM", "has a cache of a kind of its own"),
        ("BlipForConditionalGeneration", "takes no cache from whoever calls it"),
        ("MoshiForConditionalGeneration", "has a generate of its own, and no encoder"),
        ("OfSomebodysCode", None),
    ],
)
def test_what_stands_in_the_way_is_told_by_how_a_model_decodes(
    architecture: str, words: str | None, tmp_path: Path
) -> None:
    config = {"architectures": [architecture], "is_encoder_decoder": architecture.startswith(("T5", "Whisper"))}
    tmp_path.joinpath("config.json").write_text(json.dumps(config))
    assert (words or "") in (why_not_on_host(architecture, tmp_path) or "")
    assert (words is None) == (why_not_on_host(architecture, tmp_path) is None)


def test_a_generate_that_hands_over_to_that_of_all_decodes_the_same() -> None:
    decoder = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = {"hidden_dim": 32, "num_layers": 1, "num_heads": 2, "dim_head": 16, "input_dim": 16, "output_dim": 16}
    projector = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "encoder_hidden_size": 32}
    config = GraniteSpeechConfig(
        text_config={"model_type": "granite", **decoder, "num_key_value_heads": 2, "vocab_size": 99, "eos_token_id": 2},
        encoder_config={"model_type": "granite_speech_encoder", **encoder, "context_size": 8, "max_pos_emb": 8},
        projector_config={"model_type": "blip_2_qformer", **projector, "intermediate_size": 64, "vocab_size": 99},
        audio_token_index=98,
    )
    torch.manual_seed(0)
    model = GraniteSpeechForConditionalGeneration(config).eval()
    asked: dict[str, Any] = {"input_ids": torch.tensor([[1, 5, 6, 7]]), "max_new_tokens": 6, "do_sample": False}
    with host_cache(model, HostRoom(10, private_bytes)) as cache:
        tokens = model.generate(**asked, **cache)
        (kept,) = cache.values()
        assert kept.get_seq_length() == 9
    assert torch.equal(tokens, model.generate(**asked))


def test_a_model_that_takes_no_cache_is_refused_when_it_would_decode() -> None:
    with (
        pytest.raises(ConfigError, match="Linear takes no cache"),
        host_cache(nn.Linear(1, 1), HostRoom(1, private_bytes)),
    ):
        pass
