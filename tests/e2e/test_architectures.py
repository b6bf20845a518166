"""Real checkpoints of several architectures, in every format, with weights on disk: the answer never changes."""

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    OPTConfig,
    PretrainedConfig,
    Qwen2Config,
    T5Config,
    T5ForConditionalGeneration,
)

from tests.e2e.conftest import Finished
from tests.long_form import in_ci

PROMPTS = [[5, 6, 7, 8], [9, 10]]
WORDS = 96
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
CONFIGS: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2),
    "opt": OPTConfig(
        hidden_size=32, ffn_dim=48, num_hidden_layers=3, num_attention_heads=4, word_embed_proj_dim=32,
        vocab_size=WORDS, max_position_embeddings=64, **ENDS,
    ),
    "bloom": BloomConfig(hidden_size=32, n_layer=3, n_head=4, vocab_size=WORDS, **ENDS),
    "gpt2": GPT2Config(n_embd=32, n_layer=3, n_head=4, n_positions=64, vocab_size=WORDS, **ENDS),
    "qwen2": Qwen2Config(**SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2),
    "gpt_neox": GPTNeoXConfig(**SIZES, **ENDS, vocab_size=WORDS),
}  # fmt: skip
FORMATS = {
    "safetensors": {"safe": True, "sharded": False},
    "sharded": {"safe": True, "sharded": True},
    "bin": {"safe": False, "sharded": False},
    "sharded-bin": {"safe": False, "sharded": True},
}


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return one folder for all runs: each kind of model is described once, each checkpoint is another one."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture
def fresh_folder(shared_folder: Path) -> Path:
    return shared_folder


def save(folder: Path, architecture: str, dtype: torch.dtype, *, safe: bool, sharded: bool) -> None:
    """Write a checkpoint with random weights, biases included, in the format asked for."""
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(CONFIGS[architecture], dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(folder, max_shard_size="20KB" if sharded else "5GB")
    if not safe:
        as_pickles(folder)


def as_pickles(folder: Path) -> None:
    """Turn the safetensors of ``folder`` into the older .bin format, index included."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        name = file.name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")
        torch.save(load_file(file), folder / name)
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        text = index.read_text().replace("model-", "pytorch_model-").replace(".safetensors", ".bin")
        folder.joinpath("pytorch_model.bin.index.json").write_text(text)
        index.unlink()


def budget(folder: Path, dtype: torch.dtype) -> str:
    """Return a host budget that holds the reserve and about half of the weights of ``folder``, in bytes."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    return str(int(0.6 * sum(parameter.nbytes for parameter in model.parameters())))


def reference_tokens(folder: Path, dtype: torch.dtype) -> list[list[int]]:
    """Return the greedy tokens of each prompt from a plain in-memory model, up to its end token."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    rows = []
    for prompt in PROMPTS:
        tokens = torch.tensor([prompt])
        out = model.generate(tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=8, do_sample=False)
        rows.append(out[0, len(prompt) :].tolist())
    return rows


@pytest.mark.parametrize(
    ("architecture", "form", "dtype"),
    in_ci(
        ("llama", "safetensors", "float32"), ("opt", "sharded", "bfloat16"),
        ("gpt2", "sharded-bin", "bfloat16"), of=product(CONFIGS, FORMATS, ["float32", "bfloat16"]),
    ),
)  # fmt: skip
def test_tokens_equal_those_of_the_model_in_memory(
    architecture: str, form: str, dtype: str, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, architecture, getattr(torch, dtype), **FORMATS[form])
    done = offstage_here(
        f"model.path={folder}", f"dtype={dtype}", f"max_memory.cpu={budget(folder, getattr(torch, dtype))}",
        "device_map=sequential",
        f"generate.prompts={PROMPTS}", "generate.max_new_tokens=8", "generate.batch_size=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert not done.cached["generate"]
    assert done.record["metrics"]["streamed_bytes_per_token"] > 0, "nothing lay on disk: the test proves nothing"
    assert done.tokens == reference_tokens(folder, getattr(torch, dtype))


@pytest.mark.parametrize("dtype", in_ci(torch.float32, of=[torch.float32, torch.bfloat16]), ids=str)
@pytest.mark.parametrize("architecture", in_ci("gpt_neox", of=CONFIGS))
def test_the_logits_of_one_forward_are_bitwise_equal(
    architecture: str, dtype: torch.dtype, tmp_path: Path, shared_folder: Path
) -> None:
    from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
    from tests.e2e.pipelines import dispatched_model

    folder = tmp_path / "checkpoint"
    save(folder, architecture, dtype, safe=True, sharded=True)
    model = dispatched_model(
        folder, shared_folder / "outputs", max_memory={"cpu": budget(folder, dtype)}, storage={"io": "direct"}
    )
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    assert any(isinstance(parameter, WaitingTensor) for parameter in model.parameters()), "nothing is streamed"
    tokens = torch.tensor([PROMPTS[0]])
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)


@pytest.mark.parametrize(
    ("stored", "asked"),
    [
        ("float32", "bfloat16"),
        ("bfloat16", "float32"),
        pytest.param("float32", "float16", marks=pytest.mark.long_form),
    ],
)
def test_a_cast_gives_what_from_pretrained_gives(
    stored: str, asked: str, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    save(folder, "llama", getattr(torch, stored), safe=True, sharded=True)
    done = offstage_here(
        f"model.path={folder}", f"dtype={asked}",
        f"max_memory.cpu={budget(folder, getattr(torch, asked))}",
        f"generate.prompts={PROMPTS}", "generate.max_new_tokens=8", "generate.batch_size=1",
    )  # fmt: skip
    assert done.code == 0, done.err
    assert done.tokens == reference_tokens(folder, getattr(torch, asked))


def test_an_encoder_decoder_generates_what_it_does_in_memory(
    tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    folder = tmp_path / "checkpoint"
    torch.manual_seed(1)
    config = T5Config(
        d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=WORDS, decoder_start_token_id=0
    )
    T5ForConditionalGeneration(config).save_pretrained(folder)
    done = offstage_here(
        f"model.path={folder}", "max_memory.cpu=60KB", "generate.prompts=[[5,6,7]]", "generate.max_new_tokens=8"
    )
    assert done.code == 0, done.err
    model = T5ForConditionalGeneration.from_pretrained(folder)
    expected = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=8, do_sample=False)
    assert done.tokens == [expected[0, 1:].tolist()]
    assert done.record["metrics"]["streamed_bytes_per_token"] > 0
