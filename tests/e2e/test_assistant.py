"""An assistant guesses tokens ahead: the words stay the model's own, prompt by prompt, and the plan has room for it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tests.e2e.conftest import Finished

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

Run = Callable[..., Finished]
TINY = Path(str(resources.files("offstage.conf") / "checkpoints" / "tiny"))
ASKED = ("generate.prompts=[The weights,[5,6,7,8],One day in]", "generate.max_new_tokens=12", "max_memory.cpu=4MB")


@pytest.fixture(scope="module")
def assistant(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint of the embedded model's first layers: often of its opinion, and not always."""
    folder = tmp_path_factory.mktemp("assistant") / "small"
    config = AutoConfig.from_pretrained(TINY)
    config.num_hidden_layers = 3
    small = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: tensor for file in TINY.glob("*.safetensors") for name, tensor in load_file(file).items()}
    small.load_state_dict(weights, strict=False)
    small.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY).save_pretrained(folder)
    return folder


def test_the_tokens_are_the_models_own_one_prompt_at_a_time(offstage_here: Run, assistant: Path) -> None:
    plain = offstage_here(*ASKED, "generate.exact=true")
    asked = (*ASKED, f"generate.assistant_model={assistant}", "generate.output_logprobs=true")
    helped = offstage_here(*asked)
    assert helped.code == 0, helped.err
    assert helped.tokens == plain.tokens
    assert len({output["batch"] for output in helped.record["outputs"]}) == 3
    assert [len(output["logprobs"]) for output in helped.record["outputs"]] == [len(row) for row in plain.tokens]
    more = {name: run.record["memory"]["predicted"]["cpu"] for name, run in (("plain", plain), ("helped", helped))}
    weights = sum(file.stat().st_size for file in assistant.glob("*.safetensors"))
    assert weights <= more["helped"] - more["plain"] <= 2 * weights + 10**6
    assert offstage_here(*asked).cached["generate"]
    file = next(assistant.glob("*.safetensors"))
    changed = assistant.parent / "changed"
    shutil.copytree(assistant, changed)
    tensors = {name: tensor.neg() if "norm" in name else tensor for name, tensor in load_file(file).items()}
    save_file(tensors, changed / file.name, metadata={"format": "pt"})
    other = offstage_here(*ASKED, f"generate.assistant_model={changed}")
    assert not other.cached["generate"]
    assert other.tokens == plain.tokens, "a bad adviser costs time and no word"


@pytest.mark.long_form
def test_it_lies_on_a_simulated_accelerator_too(offstage_here: Run, assistant: Path) -> None:
    asked = (*ASKED, "max_memory.0=3MB", "hardware.devices=[{memory: 1GB}]")
    plain = offstage_here(*asked, "generate.exact=true")
    helped = offstage_here(*asked, f"generate.assistant_model={assistant}")
    assert (helped.code, helped.tokens) == (0, plain.tokens), helped.err


def edited(assistant: Path, folder: Path, **changes: Any) -> Path:
    """Return a copy of the assistant whose config says ``changes`` too."""
    made = Path(shutil.copytree(assistant, folder / "edited"))
    config = json.loads(made.joinpath("config.json").read_text())
    made.joinpath("config.json").write_text(json.dumps({**config, **changes}))
    return made


def harms(assistant: Path, folder: Path) -> dict[str, tuple[tuple[str, ...], str]]:
    """Return what is asked for and how it is refused, by what is wrong."""
    named = f"generate.assistant_model={assistant}"
    bare = folder / "bare"
    bare.mkdir()
    (folder / "small.gguf").write_bytes(b"GGUF")
    other = Path(shutil.copytree(assistant, folder / "other"))
    tokenizer = json.loads(other.joinpath("tokenizer.json").read_text())
    words = tokenizer["model"]["vocab"]
    first, second = list(words)[300:302]
    words[first], words[second] = words[second], words[first]
    other.joinpath("tokenizer.json").write_text(json.dumps(tokenizer))
    words_less = edited(assistant, folder, vocab_size=3000)
    return {
        "no folder": (("generate.assistant_model=gone",), "gone' is no folder; give that of a small checkpoint"),
        "no path": (("generate.assistant_model=5",), "5 is no text or null"),
        "an empty folder": ((f"generate.assistant_model={bare}",), "generate.assistant_model: "),
        "a GGUF file": ((f"generate.assistant_model={folder / 'small.gguf'}",), "is in GGUF"),
        "fewer words": ((f"generate.assistant_model={words_less}",), "has 3000 words and the model 3072"),
        "another tokenizer": ((f"generate.assistant_model={other}",), "has a tokenizer with other tokens"),
        "beams": ((named, "generate.num_beams=2"), "generate.num_beams: 2 can't go with generate.assistant_model"),
        "several": ((named, "generate.do_sample=true", "generate.num_return_sequences=2"), "num_return_sequences: 2"),
        "a static cache": ((named, "generate.cache_implementation=static"), "cache_implementation: 'static' can't go"),
        "both": ((named, "generate.prompt_lookup_num_tokens=2"), "generate.prompt_lookup_num_tokens: 2 can't go"),
        "lookup and beams": (
            ("generate.prompt_lookup_num_tokens=2", "generate.num_beams=2"),
            "generate.num_beams: 2 can't go with generate.prompt_lookup_num_tokens",
        ),
    }  # fmt: skip


@pytest.mark.long_form
def test_what_can_not_help_is_refused_before_a_weight_is_read(
    offstage_here: Run, assistant: Path, tmp_path: Path
) -> None:
    for wrong, (arguments, words) in harms(assistant, tmp_path).items():
        done = offstage_here(*ASKED, *arguments)
        assert (done.code, done.err.count("\n")) == (2, 1), (wrong, done.err)
        assert words in done.err, wrong
        assert not tmp_path.joinpath("outputs/cache/shard_load").exists(), wrong


def test_too_little_memory_for_both_is_refused_before_a_weight_is_read(
    offstage_here: Run, assistant: Path, tmp_path: Path
) -> None:
    asked = ("generate.prompts=[[5,6]]", "max_memory.cpu=4MB", "generate.max_new_tokens=2")
    alone = offstage_here(*asked, "hardware.host.memory=8GB", "stop_after=plan")
    tight = f"hardware.host.memory={alone.record['memory']['predicted']['cpu'] + 3_000_000}"
    assert offstage_here(*asked, tight, "stop_after=plan").code == 0
    both = offstage_here(*asked, tight, f"generate.assistant_model={assistant}")
    assert (both.code, both.err.count("\n")) == (4, 1), both.err
    assert "assistant" in both.err
    assert not tmp_path.joinpath("outputs/cache/shard_load").exists()
