"""A GGUF file as a checkpoint: each tensor of the model is the one that transformers unpacks, to the bit."""

import re
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offstage.pipeline.errors import CheckpointError, ConfigError
from offstage.stages.checkpoints import gguf_model
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS
from offstage.stages.checkpoints.extents import Extent
from offstage.stages.checkpoints.gguf_model import NAMES, gguf_folder
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.packed import PackedTensor, in_dtype
from offstage.stages.checkpoints.readers import gguf_entries, open_reader
from tests.packed_references import without_asking_for_accelerate
from tests.stages.checkpoints.ggufs import make_gguf, raw_gguf, settings, tensor

pytest.importorskip("gguf")
KINDS = ("q4_k", "q6_k", "q8_0", "q5_k", "q4_0", "q5_0", "f16", "q2_k", "q3_k", "iq3_s", "iq4_xs", "tq2_0")
SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 320}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
CONFIGS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "qwen2moe": ("Qwen2MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2}),
    "qwen3moe": ("Qwen3MoeConfig", {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 64}),
    "gemma2": ("Gemma2Config", {"head_dim": 64, "query_pre_attn_scalar": 224}),
    "gpt2": ("GPT2Config", {}),
    "bloom": ("BloomConfig", {}),
}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def made(folder: Path, architecture: str, **changed: Any) -> Path:
    name, own = CONFIGS[architecture]
    config = getattr(transformers, name)(**{**SMALL, **HEADS, **own, **changed})
    return Path(make_gguf(folder / "model.gguf", architecture, config, kinds=KINDS, tokens=320))


@pytest.mark.parametrize("architecture", CONFIGS)
def test_every_tensor_is_the_one_that_transformers_unpacks(tmp_path: Path, architecture: str) -> None:
    path = made(tmp_path, architecture)
    with without_asking_for_accelerate():
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name, dtype=torch.bfloat16)
    reader = open_reader(open_checkpoint(path))
    wanted = {name: value for name, value in theirs.state_dict().items() if name in reader.entries}
    missing = theirs.state_dict().keys() - wanted.keys()
    assert all(name == "lm_head.weight" and theirs.config.tie_word_embeddings for name in missing)
    assert reader.entries.keys() == wanted.keys()
    for name, value in wanted.items():
        ours = reader.read(name, torch.bfloat16)
        assert torch.equal(ours.view(torch.int16), value.contiguous().view(torch.int16)), name


def test_plain_values_are_brought_as_they_are_in_their_own_dtype_and_unpacked_to_others(tmp_path: Path) -> None:
    entries = open_reader(open_checkpoint(made(tmp_path, "llama"))).entries
    plain = next(name for name, entry in entries.items() if entry.codec.name == "f16" and "attn" not in name)
    assert isinstance(in_dtype(entries[plain], "float16"), Extent)
    assert isinstance(in_dtype(entries["model.norm.weight"], "float32"), Extent)
    for name, dtype in ((plain, "float32"), ("model.norm.weight", "bfloat16"), ("lm_head.weight", "float32")):
        assert isinstance(in_dtype(entries[name], dtype), PackedTensor)


def test_its_folder_has_the_config_and_the_tokenizer_that_transformers_reads(tmp_path: Path) -> None:
    path = made(tmp_path, "qwen2")
    folder = gguf_folder(path)
    ours, theirs = (
        transformers.AutoConfig.from_pretrained(folder).to_dict(),
        transformers.AutoConfig.from_pretrained(tmp_path, gguf_file=path.name).to_dict(),
    )
    added = dict.fromkeys(("architectures", "dtype", "_name_or_path"))
    assert ours | added == theirs | added
    assert (ours["architectures"], ours["dtype"]) == (["Qwen2ForCausalLM"], "float32")
    text = "On the stern, ein Segel: 帆<|end|> and on"
    tokenizers = [
        transformers.AutoTokenizer.from_pretrained(folder),
        transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name),
    ]
    assert tokenizers[0](text).input_ids == tokenizers[1](text).input_ids
    assert tokenizers[0].eos_token_id == tokenizers[1].eos_token_id is not None
    assert ours["eos_token_id"] == 0  # the tokenizer that transformers 5.17 reads of a Qwen2 says another


def test_a_folder_that_holds_one_such_file_is_that_file(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    path = made(tmp_path / "in", "llama")
    alone, within = {"path": str(path)}, {"path": str(tmp_path / "in")}
    assert ModelSource.of(alone).folder == ModelSource.of(within).folder != ModelSource.of(alone).weights
    assert open_checkpoint(ModelSource.of(within).weights).files == open_checkpoint(path).files


def test_the_folder_is_made_once_for_a_content_wherever_that_lies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = made(tmp_path, "llama")
    folder = gguf_folder(path)
    monkeypatch.setattr(gguf_model, "_describe", lambda *_: pytest.fail("made again"))
    assert gguf_folder(Path(shutil.copy(path, tmp_path / "other.gguf"))) == folder
    assert [kept.name for kept in folder.parent.iterdir() if not kept.name.endswith(".lock")] == [folder.name]


@pytest.mark.parametrize("name", [NAMES, "config.json"])
@pytest.mark.parametrize("kept", [0, 0.5, 1], ids=["empty", "cut", "changed"])
def test_what_is_kept_of_it_is_made_again_where_it_is_not_as_it_was_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, kept: float
) -> None:
    path = made(tmp_path, "llama")
    entries, file = gguf_entries(path), gguf_folder(path) / name
    written = file.read_bytes()
    file.write_bytes(written[: int(kept * len(written))].replace(b"256", b"512"))
    monkeypatch.setattr(gguf_model, "_verified", set())
    assert gguf_entries(path) == entries
    assert file.read_bytes() == written


def test_options_that_lie_beside_the_file_count(tmp_path: Path) -> None:
    path = made(tmp_path, "llama")
    without = gguf_folder(path)
    (tmp_path / "generation_config.json").write_text('{"top_k": 7}')
    beside = gguf_folder(path)
    assert not (without / "generation_config.json").exists()
    assert transformers.GenerationConfig.from_pretrained(beside).top_k == 7


def test_without_the_package_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = made(tmp_path, "llama")
    monkeypatch.setattr(gguf_model, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'offstage-pipeline\[gguf\]'"):
        gguf_folder(path)


A = [tensor("token_embd.weight", [32, 8])]
REFUSED = {
    "an architecture that transformers reads in another way": ("qwen35", "'qwen35' aren't served"),
    "one that transformers doesn't know": ("nobody", "nobody is not supported"),
    "one whose tensors are computed": ("mamba", "MambaTensorProcessor"),
    "keys that say nothing of the model": ("llama", "no model can be made of it|of shape"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_served_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    architecture, words = REFUSED[case]
    path = tmp_path / "model.gguf"
    keys = {"general.architecture": architecture, "general.name": "x", f"{architecture}.block_count": 1}
    path.write_bytes(raw_gguf(A, settings(keys), bytes(1024)))
    with pytest.raises(CheckpointError, match=words) as caught:
        open_reader(open_checkpoint(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


Q4_0, Q8_0 = FORMATS["q4_0"].code, FORMATS["q8_0"].code
UNFIT: Mapping[str, tuple[str, str, list[int], list[int], int | None]] = {
    "fewer rows": ("llama", "blk.1.ffn_up.weight", [256, 512], [256, 256], None),
    "rows for columns": ("llama", "blk.1.ffn_up.weight", [256, 512], [512, 256], None),
    "a stack with rows for columns": ("qwen2moe", "blk.1.ffn_up_exps.weight", [256, 1408, 4], [1408, 256, 4], Q4_0),
    "a vector of blocks": ("bloom", "blk.1.attn_qkv.bias", [768], [768], Q8_0),
}


@pytest.mark.parametrize(("architecture", "name", "sizes", "written", "code"), UNFIT.values(), ids=UNFIT)
def test_a_tensor_of_another_shape_or_kind_is_refused_by_name(
    tmp_path: Path,
    architecture: str,
    name: str,
    sizes: list[int],
    written: list[int],
    code: int | None,
) -> None:
    path = made(tmp_path, architecture)
    content = path.read_bytes()
    head = name.encode() + struct.pack(f"<I{len(sizes)}Q", len(sizes), *sizes)
    at = content.index(head) + len(head)
    kind = content[at : at + 4] if code is None else struct.pack("<I", code)
    changed = content[: at - 8 * len(sizes)] + struct.pack(f"<{len(written)}Q", *written) + kind + content[at + 4 :]
    path.write_bytes(changed)
    words = f"'{name}' of shape {written[::-1]}"
    with pytest.raises(CheckpointError, match=re.escape(words) + ".* can't be the model's"):
        open_reader(open_checkpoint(path))
