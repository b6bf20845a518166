"""What transformers' ``generate`` can do, over models whose weights all stream: to the bit as the plain model.

Four architectures, each with a way of its own through ``generate``: a decoder, a mixture of experts, an encoder-decoder
of text and one of sound. An answer is all that ``generate`` returns: tokens, scores, logits, states and the cache.
"""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    StaticCache,
    StoppingCriteria,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

from offstage.stages.generate.quantized_cache import unpack_by_operators
from tests.clients.doors import Door, load, load_checkpoint_and_dispatch, plain
from tests.long_form import in_turn

WORDS = {"input_ids": torch.tensor([[5, 6, 7, 8, 6, 7], [9, 5, 6, 7, 9, 5]])}
PADDED = {"input_ids": torch.tensor([[0, 0, 7, 8, 6, 7], [9, 5, 6, 7, 9, 5]])}
PADDED["attention_mask"] = PADDED["input_ids"].ne(0).long()
SOUND = {"input_features": torch.linspace(-1, 1, 2 * 8 * 16).sin().view(2, 8, 16), "force_unique_generate_call": True}
TOKENS = {"vocab_size": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER: dict[str, Any] = {
    **TOKENS, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
SOUND_SIZES: dict[str, Any] = {
    **TOKENS, "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 32, "d_model": 32,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "decoder_start_token_id": 3, "begin_suppress_tokens": None,
}  # fmt: skip
TEXT_SIZES = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
MODELS: Mapping[str, tuple[Any, Any]] = {
    "Llama": (LlamaForCausalLM, LlamaConfig(**DECODER)),
    "Mixtral": (MixtralForCausalLM, MixtralConfig(**DECODER, num_local_experts=4)),
    "T5": (T5ForConditionalGeneration, T5Config(**TOKENS, **TEXT_SIZES)),
    "Whisper": (WhisperForConditionalGeneration, WhisperConfig(**SOUND_SIZES)),
}
DECODERS = ("Llama", "Mixtral")
TEXT = (*DECODERS, "T5")
ENCODED = ("T5", "Whisper")
FOUR_BITS = {"backend": "quanto", "nbits": 4, "q_group_size": 16, "residual_length": 4}
QUANTISING = DECODERS if importlib.util.find_spec("optimum") and importlib.util.find_spec("optimum.quanto") else ()
EVERYTHING: dict[str, Any] = {
    "return_dict_in_generate": True, "output_scores": True, "output_logits": True, "output_hidden_states": True,
}  # fmt: skip
Inputs = Mapping[str, Any]
Ask = Callable[[Any, Inputs], Any]


def answer(model: Any, inputs: Inputs, **options: Any) -> Any:
    torch.manual_seed(3)
    return model.generate(**{**inputs, "max_new_tokens": 5, "min_new_tokens": 3, **EVERYTHING, **options})


def one(inputs: Inputs) -> dict[str, Any]:
    return {name: value[:1] if isinstance(value, torch.Tensor) else value for name, value in inputs.items()}


def with_options(**options: Any) -> Ask:
    return lambda model, inputs: answer(model, inputs, **options)


def looked_up(model: Any, inputs: Inputs) -> Any:
    return answer(model, one(inputs), prompt_lookup_num_tokens=3)


def assisted(model: Any, inputs: Inputs, **options: Any) -> Any:
    torch.manual_seed(5)
    assistant = type(model)(model.config).eval()
    return answer(model, one(inputs), assistant_model=assistant, **options)


def assisted_by_itself(model: Any, inputs: Inputs) -> Any:
    return answer(model, one(inputs), assistant_model=model)


def left_early(model: Any, inputs: Inputs) -> Any:
    return answer(model, one(inputs), assistant_early_exit=1)


def padded(model: Any, _: Inputs) -> Any:
    return answer(model, PADDED)


def continued(model: Any, inputs: Inputs) -> Any:
    first = answer(model, inputs, max_new_tokens=3)
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    return answer(model, {**inputs, name: first.sequences, "past_key_values": first.past_key_values})


def with_a_cache(cache: Callable[[Any], Any]) -> Ask:
    return lambda model, inputs: answer(model, inputs, past_key_values=cache(model.config))


def embedded(model: Any, inputs: Inputs) -> Any:
    return answer(model, {"inputs_embeds": model.get_input_embeddings()(inputs["input_ids"])})


def encoded_before(model: Any, inputs: Inputs) -> Any:
    return answer(model, {**inputs, "encoder_outputs": model.get_encoder()(next(iter(inputs.values())))})


def with_attentions(model: Any, inputs: Inputs) -> Any:
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        return answer(model, inputs, output_attentions=True)
    finally:
        model.set_attn_implementation(before)


class AtToken(StoppingCriteria):
    """Stops a row once it has so many tokens, the first row earlier."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **_: Any) -> torch.Tensor:
        rows = torch.arange(len(input_ids), device=input_ids.device)
        return input_ids.shape[1] >= 3 + 6 * (rows > 0)


class Collector(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[torch.Tensor] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens.append(value)

    def end(self) -> None:
        self.tokens.append(torch.tensor([-1]))


def streamed_out(model: Any, inputs: Inputs) -> Any:
    collector = Collector()
    return answer(model, one(inputs), streamer=collector), collector.tokens


def greedily_by_hand(model: Any, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Decode two tokens without ``generate``'s loop."""
    inputs = {name: kwargs[name] for name in ("encoder_outputs", "attention_mask") if kwargs.get(name) is not None}
    name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
    inputs = inputs if model.config.is_encoder_decoder else {}
    for _ in range(2):
        logits = model(**{**inputs, name: input_ids}).logits
        input_ids = torch.cat([input_ids, logits[:, -1:].argmax(-1)], dim=1)
    return input_ids


def scored(model: Any, inputs: Inputs) -> Any:
    output = answer(model, inputs, num_beams=2)
    return model.compute_transition_scores(output.sequences, output.scores, output.beam_indices, normalize_logits=True)


@dataclass(frozen=True, slots=True)
class Mode:
    ask: Ask
    models: tuple[str, ...] = tuple(MODELS)


MODES: Mapping[str, Mode] = {
    "greedy": Mode(answer),
    "sampled": Mode(with_options(do_sample=True, top_k=9, temperature=0.8), TEXT),
    "sampled, several answers": Mode(with_options(do_sample=True, num_return_sequences=3), TEXT),
    "beams": Mode(with_options(num_beams=3, num_return_sequences=2, length_penalty=2.0)),
    "beams that stop early": Mode(with_options(num_beams=3, early_stopping=True, min_new_tokens=0)),
    "beams, sampled": Mode(with_options(num_beams=2, do_sample=True, top_p=0.9)),
    "processed scores": Mode(with_options(repetition_penalty=1.3, no_repeat_ngram_size=2, bad_words_ids=[[7]])),
    "guided": Mode(with_options(guidance_scale=1.5), DECODERS),
    "the prompt in chunks": Mode(with_options(prefill_chunk_size=2), DECODERS),
    "prompt lookup": Mode(looked_up, TEXT),
    "assisted": Mode(assisted),
    "assisted, sampled": Mode(lambda model, inputs: assisted(model, inputs, do_sample=True), TEXT),
    "assisted by itself": Mode(assisted_by_itself),
    "assisted by its first layer": Mode(left_early, DECODERS),
    "padded": Mode(padded, TEXT),
    "continued": Mode(continued),
    "without a cache": Mode(with_options(use_cache=False)),
    "a dynamic cache": Mode(with_options(cache_implementation="dynamic")),
    "a static cache": Mode(with_options(cache_implementation="static")),
    "a quantised cache": Mode(with_options(cache_implementation="quantized", cache_config=FOUR_BITS), QUANTISING),
    "a dynamic cache that is given": Mode(with_a_cache(lambda config: DynamicCache(config=config)), DECODERS),
    "a static cache that is given": Mode(with_a_cache(lambda config: StaticCache(config, max_cache_len=16)), DECODERS),
    "a pair of caches that is given": Mode(
        with_a_cache(lambda config: EncoderDecoderCache(DynamicCache(config=config), DynamicCache(config=config))),
        ENCODED,
    ),
    "embedded before": Mode(embedded, TEXT),
    "encoded before": Mode(encoded_before, ENCODED),
    "attentions": Mode(with_attentions),
    "attentions of beams": Mode(lambda model, inputs: with_attentions(model, {**inputs, "num_beams": 2})),
    "stopped by a criterion": Mode(with_options(stopping_criteria=[AtToken()], min_new_tokens=0, max_new_tokens=8)),
    "streamed out": Mode(streamed_out),
    "decoded by the caller's loop": Mode(with_options(custom_generate=greedily_by_hand)),
    "transition scores": Mode(scored, TEXT),
}


def tensors_of(outputs: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor in ``outputs`` with where it stands in that."""
    if isinstance(outputs, torch.Tensor):
        yield name, outputs
    elif isinstance(outputs, EncoderDecoderCache):
        yield from tensors_of([outputs.self_attention_cache, outputs.cross_attention_cache], name)
    elif hasattr(outputs, "layers"):
        yield from tensors_of([(layer.keys, layer.values) for layer in outputs.layers], name)
    elif isinstance(outputs, Mapping):
        for key, value in outputs.items():
            yield from tensors_of(value, f"{name}.{key}")
    elif isinstance(outputs, tuple | list):
        for place, value in enumerate(outputs):
            yield from tensors_of(value, f"{name}[{place}]")


@pytest.fixture(scope="module", autouse=True)
def no_compiler() -> None:
    """Have quanto's kernels be torch's operators in the plain model's answers too: its are compiled for a minute."""
    if QUANTISING:
        unpack_by_operators()


@pytest.fixture(scope="module")
def models_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Door], tuple[Any, Any]]:
    @cache
    def models_of(name: str, door: Door) -> tuple[Any, Any]:
        """Return the model ``name`` as it is, and as it streams."""
        torch.manual_seed(0)
        make, config = MODELS[name]
        folder = tmp_path_factory.mktemp("generation") / name
        make(config).save_pretrained(folder)
        dispatched = door(folder)
        assert all(weight.is_meta for weight in dispatched.parameters()), "each weight waits on disk"
        learns = any(weight.requires_grad for weight in dispatched.parameters())
        # torch chooses kernels by that, where states lie out of order as what T5's encoder made before; heads never do
        return plain(folder).requires_grad_(learns or name != "T5"), dispatched

    return models_of


ASKED = {f"{name}, {mode}": (name, mode) for mode in MODES for name in MODES[mode].models}


@pytest.mark.parametrize(("asked", "door"), in_turn(ASKED, [load, load_checkpoint_and_dispatch]))
def test_it_answers_as_the_plain_model_does(
    asked: str, door: Door, models_of: Callable[[str, Door], tuple[Any, Any]]
) -> None:
    name, mode = ASKED[asked]
    inputs = SOUND if name == "Whisper" else WORDS
    wanted, streamed = (dict(tensors_of(MODES[mode].ask(model, inputs))) for model in models_of(name, door))
    assert wanted, "the plain model answers"
    assert wanted.keys() == streamed.keys()
    assert [name for name, tensor in wanted.items() if not torch.equal(tensor, streamed[name])] == []
