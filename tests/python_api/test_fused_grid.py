"""Architectures times formats: products with weights as they rest have the same bits wherever these lie, in one thread
and in two, alone and in lockstep.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BloomConfig,
    FalconConfig,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GPTNeoXConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    OPTConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
    T5Config,
)

import offstage
from offstage.pipeline.errors import BudgetError, ConfigError
from offstage.stages.empty_init.packed_modules import packed_modules

pytest.importorskip("gguf")

from tests.long_form import in_ci
from tests.operator_threads import in_threads
from tests.python_api.rates import RATES
from tests.python_api.test_fused import Pack, pack_matrices, packed_groups, packed_nf4
from tests.stages.checkpoints import test_gguf_entries
from tests.stages.checkpoints.codecs import test_bitsandbytes, test_compressed_tensors, test_grouped
from tests.stages.checkpoints.ggufs import make_gguf
from tests.stages.dispatch.experts.packed_mixture import save_packed_mixture

TOKENS = torch.tensor([[5, 66, 90, 33, 20, 7, 8], [9, 3, 33, 50, 4, 4, 61]])
WORDS = {"vocab_size": 320, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {**WORDS, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "max_position_embeddings": 64}
GROUPED = {**SIZES, "intermediate_size": 192, "num_key_value_heads": 2}
GEMMA = {**GROUPED, "head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 5}
CONFIGS: Mapping[str, PretrainedConfig] = {
    "llama": LlamaConfig(**GROUPED),
    "qwen2": Qwen2Config(**GROUPED, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**GROUPED, head_dim=32),
    "mistral": MistralConfig(**GROUPED, sliding_window=5),
    "gemma2": Gemma2Config(**GEMMA),
    "gemma3": Gemma3TextConfig(**GEMMA),
    "phi3": Phi3Config(**GROUPED),
    "olmo2": Olmo2Config(**GROUPED),
    "granite": GraniteConfig(**GROUPED),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
    "qwen3_moe": Qwen3MoeConfig(
        **GROUPED, head_dim=32, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64
    ),
    "gpt_neox": GPTNeoXConfig(**SIZES, intermediate_size=192),
    "opt": OPTConfig(**SIZES, ffn_dim=192, word_embed_proj_dim=128),
    "bloom": BloomConfig(**WORDS, hidden_size=128, n_layer=2, n_head=4),
    "t5": T5Config(**WORDS, d_model=128, d_ff=192, d_kv=32, num_layers=2, num_heads=4, decoder_start_token_id=0),
    "gpt2": GPT2Config(**WORDS, n_embd=128, n_layer=2, n_head=4, n_positions=64),
    "falcon": FalconConfig(**SIZES),
}  # fmt: skip
OF_THEIR_OWN = ("gpt2", "falcon")
"""Their layers are of classes of their own: torch multiplies these, to other bits in another number of threads."""
MATRIX = r"\.(layers|h|block)\.\d+\.(?!.*(norm|relative_attention_bias|(mlp|moe)\.gate\.)).*weight"
"""What of layers makers quantise, where it has two dimensions."""


def save(folder: Path, name: str, dtype: torch.dtype = torch.bfloat16) -> Path:
    torch.manual_seed(11)
    auto = AutoModelForSeq2SeqLM if name == "t5" else AutoModelForCausalLM
    model = auto.from_config(CONFIGS[name], dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.15 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder)
    return folder


def save_packed(
    folder: Path, name: str, pack: Pack, declared: Mapping[str, Any], dtype: torch.dtype = torch.bfloat16
) -> Path:
    """Write the model ``name``, its layers' matrices as the parts that ``pack`` makes."""
    return pack_matrices(save(folder, name, dtype), declared, pack, named=MATRIX)


def save_fp8(folder: Path, name: str) -> Path:
    def pack(shape: tuple[int, int], _seed: int) -> Mapping[str, torch.Tensor]:
        scales = torch.rand(*(-(-size // 32) for size in shape)) * 0.1
        return {"weight": torch.randn(shape).to(torch.float8_e4m3fn), "weight_scale_inv": scales}

    return save_packed(folder, name, pack, {"quant_method": "fp8", "weight_block_size": [32, 32]})


def save_compressed(folder: Path, name: str, *, scheme: str) -> Path:
    form, weights = test_compressed_tensors.SCHEMES[scheme]

    def pack(shape: tuple[int, int], _seed: int) -> Mapping[str, torch.Tensor]:
        return test_compressed_tensors.packed(form, weights, torch.bfloat16, shape)

    return save_packed(folder, name, pack, test_compressed_tensors.declared(form, weights))


def save_nf4(folder: Path, name: str, *, nested: bool) -> Path:
    return save_packed(folder, name, partial(packed_nf4, nested=nested), test_bitsandbytes.QUANTIZATION)


def save_grouped(folder: Path, name: str, *, kind: str) -> Path:
    return save_packed(folder, name, partial(packed_groups, kind=kind), test_grouped.KINDS[kind], torch.float16)


def save_gguf(folder: Path, name: str, *, kinds: Sequence[str]) -> Path:
    folder.mkdir()
    kind, own = test_gguf_entries.CONFIGS[name]
    config = getattr(transformers, kind)(**{**test_gguf_entries.SMALL, **test_gguf_entries.HEADS, **own})
    return Path(make_gguf(folder / "model.gguf", name, config, kinds=kinds, tokens=320))


def save_stacks(folder: Path, _name: str) -> Path:
    return save_packed_mixture(folder)


Save = Callable[[Path, str], Path]
FORMATS: Mapping[str, tuple[Save, str]] = {
    "q8_0": (save, "bfloat16"),  # these two are quantised by the run that loads them
    "fp8": (save, "float32"),
    "FP8 by blocks": (save_fp8, "bfloat16"),
    "FP8 by channels": (partial(save_compressed, scheme="FP8 by channels"), "float32"),
    "INT8": (partial(save_compressed, scheme="INT8 by channels"), "bfloat16"),
    "INT4": (partial(save_compressed, scheme="INT4 by groups"), "float32"),
    "NVFP4": (partial(save_compressed, scheme="NVFP4"), "bfloat16"),
    "MXFP4": (partial(save_compressed, scheme="MXFP4"), "bfloat16"),
    "NF4": (partial(save_nf4, nested=False), "float32"),
    "NF4, nested": (partial(save_nf4, nested=True), "bfloat16"),
    "GPTQ": (partial(save_grouped, kind="GPTQ, zeros less one"), "float16"),
    "GPTQ of 3 bits, reordered": (partial(save_grouped, kind="GPTQ of 3 bits, reordered"), "bfloat16"),
    "AWQ": (partial(save_grouped, kind="AWQ"), "bfloat16"),
}
GGUFS: Mapping[str, tuple[Save, str]] = {
    "GGUF, K": (partial(save_gguf, kinds=("q4_k", "q6_k", "q8_0", "q5_k")), "float32"),
    "GGUF, blocks of 32": (partial(save_gguf, kinds=("q4_0", "q4_1", "q5_0", "q5_1")), "bfloat16"),
    "GGUF, all kinds": (partial(save_gguf, kinds=test_gguf_entries.KINDS), "bfloat16"),
}
STACKS = ("gpt_oss", "MXFP4 stacks")
CASES = [*product(CONFIGS, FORMATS), *product(test_gguf_entries.CONFIGS, GGUFS), STACKS]
SAVES: Mapping[str, tuple[Save, str]] = {**FORMATS, **GGUFS, STACKS[1]: (save_stacks, "bfloat16")}


def answers(model: Any) -> list[torch.Tensor]:
    """Return logits and next tokens of two prompts together, and of some one by one, which lockstep has too."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        decoder = {"decoder_input_ids": ids.flip(-1)} if model.config.is_encoder_decoder else {}
        found: torch.Tensor = model(input_ids=ids, **decoder).logits
        return found

    def tokens(ids: torch.Tensor, new: int) -> torch.Tensor:
        how = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "pad_token_id": 0}
        found: torch.Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
        return found

    rows = [TOKENS[:1], TOKENS[1:], TOKENS[:1, :3]]
    calls = [partial(logits, row) for row in rows]
    calls += [partial(tokens, row, new) for row, new in zip(rows, (4, 2, 5), strict=True)]
    alone = [call() for call in calls]
    assert all(map(torch.equal, offstage.lockstep(model, calls, size=4), alone))
    return [logits(TOKENS), tokens(TOKENS, 4), *alone]


def drawn_map(model: Any, chance: random.Random, *, by_layers: bool) -> dict[str, str]:
    """Return a place for each module, or each layer, of ``model``, one for those that share a weight."""
    places, shared = dict[str, str](), dict[int, str]()
    for name, module in model.named_modules(remove_duplicate=False):
        own = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
        if own:
            layer = re.match(r".*?\.(layers|h|block)\.\d+(?=\.)", name) if by_layers else None
            place = shared.get(id(own[0])) or places.get(layer[0] if layer else name) or chance.choice(["cpu", "disk"])
            places[layer[0] if layer else name] = shared[id(own[0])] = place
    return places


def least_budget(load: Callable[..., Any], device_map: str) -> int:
    """Return the bytes that a refusal names as the least that work."""
    with pytest.raises(BudgetError) as refusal:
        load(device_map=device_map, max_memory={"cpu": 1})
    (least,) = re.findall(r"the least that works is (\d+) bytes", str(refusal.value))
    return int(least)


def placed(load: Callable[..., Any], name: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield options of ``load`` that have weights lie in the host's memory, on disk, or on both, by what they are."""
    yield "in memory", {"device_map": {"": "cpu"}}
    yield "on disk", {"device_map": {"": "disk"}, "storage": {"io": "direct"}}
    yield "in a map", {"device_map": {"": "disk"}, "storage": {"io": "mmap"}}
    yield "beside an accelerator", {"device_map": {"": "cpu"}, "devices": [{"name": "idle", "memory": "40MB"}]}
    with load(device_map={"": "cpu"}) as loaded:
        whole, chance = loaded.plan.devices["cpu"].weights, random.Random(name)
        yield "by layers", {"device_map": drawn_map(loaded.model, chance, by_layers=True)}
        yield "by modules", {"device_map": drawn_map(loaded.model, chance, by_layers=False)}
    for policy, shares in (("sequential", (0.7, 0.8, 0.9)), ("optimal", (0, 0.2, 0.4, 0.6))):
        budget = least_budget(load, policy) + int(chance.choice(shares) * whole)
        yield policy, {"device_map": policy, "max_memory": {"cpu": budget}}


@pytest.mark.parametrize(("architecture", "form"), in_ci(("phi3", "INT8"), ("falcon", "NF4"), of=CASES))
def test_bits_are_the_same_wherever_weights_lie_in_any_threads_alone_and_in_lockstep(
    tmp_path: Path, architecture: str, form: str
) -> None:
    saves, dtype = SAVES[form]
    path = saves(tmp_path / "model", architecture)

    def load(devices: Sequence[Mapping[str, Any]] = (), **options: Any) -> Any:
        how: dict[str, Any] = {"dtype": dtype, "max_length": 32, "quantized": {"products": "fused"}, **options}
        how |= {"quantize": form} if saves is save else {}
        return offstage.load(path, hardware={"rates": RATES, "devices": [*devices]}, **how)

    if architecture in OF_THEIR_OWN and form in FORMATS:
        with pytest.raises(ConfigError, match=r"^[^\n]*no linear layer[^\n]*$"):
            load()
        return
    by_case, first = {}, dict[int, list[torch.Tensor]]()
    for place, options in placed(load, f"{architecture} {form}"):
        with load(**options) as loaded, torch.no_grad():
            assert packed_modules(loaded.model)
            for threads in (1, 2):
                with in_threads(threads):
                    found = answers(loaded.model)
                wanted = first.setdefault(threads if architecture in OF_THEIR_OWN else 0, found)
                by_case[place, threads] = [*map(torch.equal, found, wanted)]
    assert by_case == dict.fromkeys(by_case, [True] * len(found))
    with pytest.raises(ConfigError, match="multiplies on the host alone, and by this plan accelerator 0 computes"):
        load(device_map={"": 0}, devices=[{"name": "small", "memory": "400MB"}])
