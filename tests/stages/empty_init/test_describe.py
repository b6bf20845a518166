import json
from functools import cache

import pytest
import torch
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MixtralConfig,
    OPTConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from offstage.pipeline.decoding import decode
from offstage.stages.empty_init import init_empty_weights
from offstage.stages.empty_init.activation_peaks import weigh
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import FILE_NAME, Skeleton
from tests.long_form import in_ci

LLAMA_LIKE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
CONFIGS = {
    "Llama": LlamaConfig(**LLAMA_LIKE, vocab_size=64, num_key_value_heads=2),
    "OPT": OPTConfig(hidden_size=32, ffn_dim=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=64,
                     word_embed_proj_dim=32),
    "BLOOM": BloomConfig(hidden_size=32, n_layer=2, n_head=4, vocab_size=64),
    "GPT-2": GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, bos_token_id=1, eos_token_id=2),
    "GPT-NeoX": GPTNeoXConfig(**LLAMA_LIKE, vocab_size=64),
    "Qwen2": Qwen2Config(**LLAMA_LIKE, vocab_size=64, num_key_value_heads=2),
    "Mixtral": MixtralConfig(**LLAMA_LIKE, vocab_size=64, num_key_value_heads=2, num_local_experts=4),
    "Mamba": MambaConfig(hidden_size=32, num_hidden_layers=2, vocab_size=64),
}  # fmt: skip


def on_meta(config: object) -> nn.Module:
    with init_empty_weights():
        return AutoModelForCausalLM.from_config(config)


@cache
def described(name: str) -> Skeleton:
    """Return what is known of a model: Mamba rehearses token by token, for seconds."""
    return describe(on_meta(CONFIGS[name]))


@pytest.mark.parametrize("name", in_ci("Llama", "OPT", "BLOOM", "Mixtral", of=CONFIGS))
def test_the_rehearsal_gives_the_order_in_which_modules_really_run(name: str) -> None:
    skeleton = described(name)
    real = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    called: list[str] = []
    for module_name, module in real.named_modules():
        module.register_forward_pre_hook(lambda _m, _a, n=module_name: called.append(n))
    with torch.no_grad():
        real(input_ids=torch.ones((1, 8), dtype=torch.long))
    assert skeleton.unrehearsed is None
    assert list(skeleton.order) == list(dict.fromkeys(called))


def test_an_encoder_decoder_is_rehearsed() -> None:
    config = T5Config(d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=64)
    with init_empty_weights():
        model = T5ForConditionalGeneration(config)
    skeleton = describe(model)
    assert skeleton.unrehearsed is None
    assert skeleton.order.index("encoder.block.1") < skeleton.order.index("decoder.block.0")


def test_norms_run_before_the_layers_that_they_are_registered_after() -> None:
    order = described("Llama").order
    assert order.index("model.layers.0.input_layernorm") < order.index("model.layers.0.self_attn.q_proj")


def test_every_tensor_is_listed_with_shape_dtype_and_kind() -> None:
    model = nn.BatchNorm1d(3).to(torch.bfloat16)
    model.register_buffer("hidden", torch.zeros(2, dtype=torch.bool), persistent=False)
    tensors = {t.name: t for t in describe(model).tensors}
    assert (tensors["weight"].shape, tensors["weight"].dtype, tensors["weight"].kind) == ((3,), "bfloat16", "parameter")
    assert tensors["num_batches_tracked"].dtype == "int64"
    assert tensors["hidden"].kind == "buffer"
    assert not tensors["hidden"].persistent
    assert tensors["hidden"].bytes == 2


def test_tied_tensors_are_counted_once() -> None:
    skeleton = described("OPT")
    assert skeleton.tied == (("lm_head.weight", "model.decoder.embed_tokens.weight"),)
    model = AutoModelForCausalLM.from_config(CONFIGS["OPT"])
    assert skeleton.bytes == sum(p.nbytes for p in model.parameters())


def test_a_module_whose_weight_its_parent_reads_is_borrowed() -> None:
    borrowers = described("Mamba").borrowers
    assert borrowers["backbone.layers.0.mixer.conv1d"] == ("backbone.layers.0.mixer",)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2)
        self.last = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(x) if x.sum().item() > 0 else x


def test_a_model_that_cannot_be_rehearsed_says_so_and_falls_back_to_registration() -> None:
    skeleton = describe(Branching())
    assert skeleton.unrehearsed
    assert skeleton.order == ("", "attention", "attention.out_proj", "last")
    assert skeleton.borrowers == {"attention.out_proj": ("attention",)}


def test_a_model_is_afterwards_as_it_was_part_by_part() -> None:
    class Counts(nn.Module):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            self.last = x * torch.rand(1)
            return x

    config = LlamaConfig(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=8)
    model = LlamaForCausalLM(config).train()
    model.model.layers[0].eval()
    model.model.layers[1].input_layernorm = Counts()
    hook = model.register_forward_hook(lambda *_: None)
    modes = {name: module.training for name, module in model.named_modules()}
    random = torch.get_rng_state()
    assert not describe(model).unrehearsed
    assert weigh(model, ("LlamaDecoderLayer",)).moments
    assert {name: module.training for name, module in model.named_modules()} == modes
    assert vars(model.model.layers[1].input_layernorm).keys().isdisjoint({"calls", "last"})
    assert [*model._forward_hooks] == [hook.id]
    assert torch.equal(torch.get_rng_state(), random)


def test_the_model_is_as_it_was_after_its_rehearsal() -> None:
    model = on_meta(CONFIGS["Llama"]).train()
    before = {name: id(p) for name, p in model.named_parameters()}
    describe(model)
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert model.training
    assert all(not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_a_skeleton_survives_its_file(tmp_path) -> None:
    skeleton = described("Mamba")
    skeleton.save(tmp_path)
    assert decode(Skeleton, json.loads((tmp_path / FILE_NAME).read_text())) == skeleton


def test_a_buffer_that_a_forward_counts_in_keeps_its_value() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Embedding(8, 4)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            self.steps += 1
            return self.layer(tokens)

    model = Counting()
    describe(model)
    assert float(model.steps) == 0


class Hooking(torch.nn.Module):
    """Puts a hook on its layer when it first runs, as transformers does to collect hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(16, 4)
        self.layer = torch.nn.Linear(4, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "hooked"):
            self.layer.register_forward_hook(lambda *_: None)
            self.hooked = True
        return self.layer(self.embed(tokens))


def test_hooks_that_a_models_code_installs_are_gone_after_a_rehearsal() -> None:
    model = Hooking()
    assert describe(model).unrehearsed is None
    assert not model.layer._forward_hooks
    assert not hasattr(model, "hooked")
