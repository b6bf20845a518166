"""Adapters of peft on checkpoints that stream: the answers are bit for bit those of peft's own unmerged adapter."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BertConfig,
    BertForSequenceClassification,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    T5Config,
)

from offstage.stages.dispatch.loaded_model import load
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
from offstage.stages.machine.host_memory import PEFT_BYTES
from tests.e2e.conftest import Finished, Replay
from tests.e2e.pipelines import config_for, dispatched
from tests.e2e.test_architectures import CONFIGS, ENDS, SIZES, WORDS
from tests.e2e.test_same_answer import random_map

peft = pytest.importorskip("peft", reason="the extra adapter isn't installed")

Run = Callable[..., Finished]
T5 = T5Config(
    d_model=32, d_ff=48, num_layers=2, num_heads=4, d_kv=8, vocab_size=WORDS, decoder_start_token_id=0, pad_token_id=0
)
MODELS: dict[str, PretrainedConfig] = {
    **CONFIGS,
    "mixtral": MixtralConfig(**SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, **ENDS, vocab_size=WORDS, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2,
        moe_intermediate_size=16, shared_expert_intermediate_size=24,
    ),
    "t5": T5,
}  # fmt: skip
ADAPTERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"target_modules": ["q_proj", "down_proj"]}),
    "llama-all": ("llama", {"target_modules": "all-linear", "use_rslora": True, "lora_dropout": 0.5}),
    "llama-patterns": (
        "llama",
        {
            "target_modules": r".*layers\.[02]\..*(up|v)_proj",
            "rank_pattern": {"up_proj": 2},
            "alpha_pattern": {"v_proj": 3},
        },
    ),
    "llama-dora": ("llama", {"target_modules": ["o_proj", "gate_proj"], "use_dora": True}),
    "llama-words": ("llama", {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]}),
    "qwen2-biases": ("qwen2", {"target_modules": ["q_proj", "k_proj"], "bias": "all", "lora_bias": True}),
    "gpt2": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "gpt2-head": ("gpt2", {"target_modules": ["c_fc"], "modules_to_save": ["lm_head"]}),
    "gpt2-words": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["wte"]}),
    "mixtral": ("mixtral", {"target_modules": ["q_proj", "v_proj"]}),
    "qwen2_moe": ("qwen2_moe", {"target_modules": ["o_proj", "up_proj", "down_proj"]}),
    "t5": ("t5", {"target_modules": ["q", "v", "wo", "wi"]}),
}  # fmt: skip
ON_DISK: Mapping[str, Any] = {"device_map": "disk", "max_memory": {"cpu": "1GB"}, "storage": {"io": "direct"}}
PROMPTS = "generate.prompts=[[5,6,7,8]]"


def make(folder: Path, name: str, dtype: torch.dtype, *, seed: int = 3) -> tuple[Path, Path]:
    """Write a checkpoint in ``dtype`` and the adapter ``name`` for it, of random weights; return both folders."""
    architecture, settings = ADAPTERS[name]
    checkpoint, adapter = folder / "checkpoint", folder / "adapter"
    torch.manual_seed(7)
    model = auto(architecture).from_config(MODELS[architecture], dtype=dtype)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3 if parameter.dim() > 1 else 0.1)
    model.save_pretrained(checkpoint, max_shard_size="40KB")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=8, **settings))
    torch.manual_seed(seed)
    for parameter in adapted.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.6)
    adapted.save_pretrained(adapter)
    return checkpoint, adapter


def auto(architecture: str) -> Any:
    return AutoModelForSeq2SeqLM if architecture == "t5" else AutoModelForCausalLM


def plain(name: str, checkpoint: Path, adapter: Path, dtype: torch.dtype) -> Any:
    """Return the model in memory with peft's own adapter on it."""
    model = auto(ADAPTERS[name][0]).from_pretrained(checkpoint, dtype=dtype)
    return peft.PeftModel.from_pretrained(model, adapter).eval()


def streamed(checkpoint: Path, adapter: Path, outputs: Path, **changes: Any) -> Any:
    """Return the pipeline's model with the adapter on it."""
    model = {**config_for(checkpoint, outputs)["model"], "adapter": str(adapter)}
    return dispatched(checkpoint, outputs, model=model, **changes).model


def answers(model: Any, name: str) -> list[torch.Tensor]:
    """Return the logits of a prompt, and what is generated from it, greedily and sampled."""
    tokens = torch.tensor([[5, 6, 7, 8]])
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    halves = {"decoder_input_ids": tokens[:, :2]} if name == "t5" else {}
    with torch.no_grad():
        logits = model(**given, **halves).logits
        greedy = model.generate(**given, max_new_tokens=6, do_sample=False)
        torch.manual_seed(11)
        return [logits, greedy, model.generate(**given, max_new_tokens=6, do_sample=True)]


@pytest.mark.parametrize(
    ("name", "dtype"),
    [(name, torch.bfloat16) for name in ADAPTERS]
    + [(name, torch.float32) for name in ("llama", "gpt2", "mixtral", "t5")],
    ids=str,
)
def test_a_streamed_model_with_an_adapter_answers_as_pefts_own(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint, adapter = make(tmp_path, name, dtype)
    expected = answers(plain(name, checkpoint, adapter, dtype), name)
    model = streamed(checkpoint, adapter, tmp_path / "outputs", **ON_DISK)
    assert any(isinstance(parameter, WaitingTensor) for parameter in model.parameters()), "nothing is streamed"
    for got, wanted in zip(answers(model, name), expected, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("name", ["llama-words", "llama-dora"])
def test_any_placement_of_model_and_adapter_gives_the_same_answer(name: str, tmp_path: Path) -> None:
    checkpoint, adapter = make(tmp_path, name, torch.bfloat16)
    reference = plain(name, checkpoint, adapter, torch.bfloat16)
    expected, chance = answers(reference, name), random.Random(5)
    for number, (others, io) in enumerate([(("cpu",), "mmap"), ((0, 1, "cpu"), "direct")]):
        names = random_map(reference.base_model.model, chance, others=others)
        placement = {name: home for name, home in names.items() if "original_module" not in name}
        model = streamed(
            checkpoint, adapter, tmp_path / str(number), device_map=placement, storage={"io": io},
            max_memory=dict.fromkeys(others, "1GB"), hardware={"devices": [{"memory": "2GB"}] * (len(others) - 1)},
        )  # fmt: skip
        for got, wanted in zip(answers(model, name), expected, strict=True):
            assert torch.equal(got, wanted), placement


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_of_pickles_in_another_dtype_gives_what_peft_makes_of_it(dtype: torch.dtype, tmp_path: Path) -> None:
    checkpoint, adapter = make(tmp_path, "llama", torch.bfloat16)
    file = adapter / "adapter_model.safetensors"
    torch.save({name: tensor.to(dtype) for name, tensor in load_file(file).items()}, adapter / "adapter_model.bin")
    file.unlink()
    expected = answers(plain("llama", checkpoint, adapter, torch.bfloat16), "llama")
    model = streamed(checkpoint, adapter, tmp_path / "outputs", **ON_DISK)
    for got, wanted in zip(answers(model, "llama"), expected, strict=True):
        assert torch.equal(got, wanted)


def test_the_plan_counts_the_adapter_and_a_replay_names_one_that_changed(
    tmp_path: Path, offstage_here: Run, replay: Replay
) -> None:
    checkpoint, adapter = make(tmp_path, "llama", torch.bfloat16)
    expected = plain("llama", checkpoint, adapter, torch.bfloat16).generate(
        input_ids=torch.tensor([[5, 6, 7, 8]]), max_new_tokens=6, min_new_tokens=6, do_sample=False
    )
    told = ("generate.max_new_tokens=6", "generate.min_new_tokens=6")  # of random weights, any may end at once
    given = [f"model.path={checkpoint}", PROMPTS, *told, "max_memory.cpu=40KB"]
    bare, first = offstage_here(*given), offstage_here(*given, f"model.adapter={adapter}")
    assert (bare.code, first.code) == (0, 0), first.err
    assert first.tokens == [expected[0, 4:].tolist()] != bare.tokens
    assert not any(first.cached.values())
    devices = [json.loads(path.read_text())["devices"].values() for path in plans_of(bare, first)]
    lies = [sum(one["weights"] for one in each) for each in devices]
    file = adapter / "adapter_model.safetensors"
    assert lies[1] - lies[0] == sum(tensor.nbytes for tensor in load_file(file).values())

    processes = [json.loads(path.read_text())["devices"]["cpu"]["ledger"]["process"] for path in plans_of(bare, first)]
    assert processes[1] - processes[0] == PEFT_BYTES

    moved = shutil.copytree(adapter, tmp_path / "moved")
    assert all(offstage_here(*given, f"model.adapter={moved}").cached.values())

    save_file({name: -2 * tensor for name, tensor in load_file(file).items()}, file)
    again = offstage_here(*given, f"model.adapter={adapter}")
    assert again.cached["empty_init"]
    assert not again.cached["generate"]
    assert again.tokens != first.tokens
    code, out, err = replay(next(iter(sorted(tmp_path.glob("outputs/runs/*/*/run.json"))[1:])).parent)
    assert (code, out) == (2, "")
    assert f"{adapter}: adapter_model.safetensors has other bytes than in that run; restore the files" in err


def plans_of(*runs: Finished) -> list[Path]:
    """Return the plan of each run."""
    stages = [next(stage for stage in run.record["stages"] if stage["name"] == "plan") for run in runs]
    return [Path(stage["artifact"]) / "plan.json" for stage in stages]


def edit(**settings: Any) -> Callable[[Path], object]:
    """Return a function that changes what an adapter's config says."""

    def change(adapter: Path) -> None:
        file = adapter / "adapter_config.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), **settings}))

    return change


def of_another_model(adapter: Path) -> None:
    """Have the adapter's tensors be of another width."""
    file = adapter / "adapter_model.safetensors"
    save_file({name: tensor.repeat(2, 2) for name, tensor in load_file(file).items()}, file)


def truncated(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-8])


def hung(adapter: Path) -> None:
    adapter.joinpath("adapter_model.safetensors").unlink()
    os.mkfifo(adapter / "adapter_model.safetensors")


BAD: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "of another model": (of_another_model, 3, "the adapter is not that of LlamaForCausalLM: 12 of another shape"),
    "for other modules": (edit(target_modules=["q_proj", "k_proj"]), 3, "6 missing"),
    "for no module": (edit(target_modules=["fc9"]), 3, "it is no adapter of LlamaForCausalLM"),
    "no folder": (shutil.rmtree, 3, "is no folder; give a folder as peft's save_pretrained"),
    "without a config": (lambda adapter: (adapter / "adapter_config.json").unlink(), 3, "no readable adapter_config"),
    "with a broken config": (lambda adapter: (adapter / "adapter_config.json").write_text("{"), 3, "not JSON"),
    "without weights": (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), 3, "no adapter's weights"),
    "with a pattern without an end": (
        edit(target_modules=r"(.*)*(.*)*(.*)*(.*)*(.*)*(.*)*proj!"), 3, "finding its modules takes more than 2."
    ),
    "of another kind": (edit(peft_type="IA3"), 3, "peft_type 'IA3' isn't served"),
    "of a kind to come": (edit(use_newest={"a": 1}), 3, "use_newest: \"{'a': 1}\" isn't served"),
    "of experts": (edit(target_parameters=["experts.down_proj"]), 3, "target_parameters:"),
    "that changes the model": (edit(init_lora_weights="pissa"), 3, "'pissa' changes the model's own weights"),
    "of a rank beyond": (edit(r=10**12), 3, "'1000000000000' is no rank"),
    "cut short": (truncated, 3, "truncated"),
    "with a fifo": (hung, 3, "not a regular file"),
}  # fmt: skip


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return a checkpoint and an adapter that is one of it."""
    return make(tmp_path_factory.mktemp("sound"), "llama", torch.bfloat16)


@pytest.mark.parametrize("fault", BAD)
def test_a_bad_adapter_is_one_line_before_a_weight_is_read(
    fault: str, sound: tuple[Path, Path], tmp_path: Path, offstage_here: Run
) -> None:
    change, code, words = BAD[fault]
    checkpoint, adapter = sound[0], shutil.copytree(sound[1], tmp_path / "adapter")
    change(adapter)
    done = offstage_here(f"model.path={checkpoint}", PROMPTS, f"model.adapter={adapter}")
    assert done.code == code, done.err
    assert done.err.count("\n") == 1
    assert words in done.err
    assert not list(tmp_path.glob("outputs/cache/shard_load/*/manifest.json"))


def test_a_module_takes_no_adapter(tmp_path: Path, offstage_here: Run) -> None:
    refused = offstage_here(
        "model=module", "model._target_=torch.nn.Linear", "model.path=.", "model.adapter=.", PROMPTS
    )
    assert refused.code == 2
    assert "model.adapter:" in refused.err
    assert "has no place in model=module" in refused.err


def test_an_adapter_in_the_models_place_is_told_where_it_belongs(
    sound: tuple[Path, Path], tmp_path: Path, offstage_here: Run
) -> None:
    refused = offstage_here(f"model.path={sound[1]}", PROMPTS)
    assert refused.code == 3
    assert "it holds an adapter: give it as model.adapter" in refused.err
    assert refused.err.count("\n") == 1


def test_a_classifiers_adapter_answers_in_one_forward_as_pefts_own(tmp_path: Path, offstage_here: Run) -> None:
    torch.manual_seed(0)
    config = BertConfig(**SIZES, vocab_size=WORDS, max_position_embeddings=64, num_labels=3)
    model = BertForSequenceClassification(config)
    model.save_pretrained(tmp_path / "bert")
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=4, task_type="SEQ_CLS", init_lora_weights=False)).eval()
    torch.nn.init.normal_(adapted.base_model.model.classifier.modules_to_save["default"].weight)
    adapted.save_pretrained(tmp_path / "adapter")
    tokens = torch.tensor([[5, 6, 7], [8, 9, 10]])
    given = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    save_file(given, tmp_path / "inputs.safetensors")
    done = offstage_here(
        f"model.path={tmp_path}/bert", f"model.adapter={tmp_path}/adapter", "stages=forward", "device_map=disk",
        f"forward.inputs={tmp_path}/inputs.safetensors", "max_memory.cpu=1GB", "storage.io=direct",
    )  # fmt: skip
    assert done.code == 0, done.err
    (file,) = tmp_path.glob("outputs/cache/forward/*/*.safetensors")
    with torch.no_grad():
        assert torch.equal(load_file(file)["logits"], adapted(**given).logits)


def test_from_python_an_adapter_is_an_option(tmp_path: Path) -> None:
    checkpoint, adapter = make(tmp_path, "llama", torch.bfloat16)
    expected = answers(plain("llama", checkpoint, adapter, torch.bfloat16), "llama")
    with load(
        checkpoint, adapter=adapter, max_memory={"cpu": "40KB"}, max_length=16, cache=tmp_path / "cache"
    ) as loaded:
        for got, wanted in zip(answers(loaded.model, "llama"), expected, strict=True):
            assert torch.equal(got, wanted)
