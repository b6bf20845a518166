"""``offstage.from_pretrained``: a script of transformers' users, with one line of imports changed."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PreTrainedModel

import offstage
from offstage.pipeline.errors import ConfigError
from tests.python_api.rates import RATES

TINY = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny"
TOKENS = torch.tensor([[5, 66, 100, 33, 20, 7, 8]])
STREAMED: Mapping[str, Any] = {"max_memory": {"cpu": "3MB"}, "storage": {"io": "direct"}}
SCRIPT: Mapping[str, Any] = {
    "device_map": "auto",
    "torch_dtype": torch.float32,
    "attn_implementation": "eager",
    "offload_folder": None,
    "offload_state_dict": True,
    "low_cpu_mem_usage": True,
    "use_safetensors": True,
    "trust_remote_code": False,
    "revision": "main",
    "quantization_config": None,
    "token": None,
}


def from_pretrained(**options: Any) -> Any:
    return offstage.from_pretrained(TINY, hardware={"rates": RATES}, max_length=64, **options)


def test_a_script_s_call_gives_the_model_itself_which_computes_what_transformers_own_does() -> None:
    theirs: Any = AutoModelForCausalLM.from_pretrained(TINY, dtype=torch.float32, attn_implementation="eager")
    with closing(from_pretrained(**SCRIPT, **STREAMED)) as model:
        assert isinstance(model, PreTrainedModel)
        assert type(model).__name__ == "LlamaForCausalLM"
        assert model.config._attn_implementation == "eager"
        assert model.dtype == torch.float32
        assert "disk" in model.hf_device_map.values()
        asked = AutoTokenizer.from_pretrained(TINY)("If the memory", return_tensors="pt").to(model.device)
        assert torch.equal(model.generate(**asked, max_new_tokens=6), theirs.generate(**asked, max_new_tokens=6))
        assert torch.equal(model(TOKENS).logits, theirs(TOKENS).logits)
    with pytest.raises(RuntimeError, match="this model was closed"):
        model(TOKENS)
    model.close()


@pytest.mark.parametrize("options", [STREAMED, {"device_map": None}], ids=["streamed", "in memory"])
def test_closing_a_copy_closes_nothing(options: Mapping[str, Any]) -> None:
    with closing(from_pretrained(**options)) as model:
        twin = copy.deepcopy(model)
        twin.close()
        assert torch.equal(twin(TOKENS).logits, model(TOKENS).logits)
    assert pickle.loads(pickle.dumps(model.close))() is None  # noqa: S301


def test_how_attention_is_computed_is_an_option_of_load_and_part_of_what_is_cached() -> None:
    activations = {}
    for name in ("eager", "sdpa"):
        with offstage.load(TINY, attn_implementation=name, hardware={"rates": RATES}, max_length=64) as loaded:
            assert loaded.model.config._attn_implementation == name
            activations[name] = loaded.plan.devices["cpu"].ledger["activations"]
    assert activations["sdpa"] < activations["eager"], "the plan counts what attention makes"


@pytest.mark.parametrize("device", [torch.device("cpu"), "cpu", {"": torch.device("cpu")}], ids=repr)
def test_a_device_may_be_torch_s_own(device: Any) -> None:
    with closing(from_pretrained(device_map=device)) as model:
        assert model.hf_device_map == {"": "cpu"}


@pytest.mark.parametrize("device", [torch.device("cuda"), "cuda", "cuda:0", 0, {"": "cuda"}], ids=repr)
def test_the_default_accelerator_is_the_first(device: Any) -> None:
    with closing(offstage.load(TINY, device_map=device, max_length=64, hardware=simulated())) as loaded:
        assert set(loaded.plan.device_map.values()) == {0}


@pytest.mark.parametrize(("accelerators", "device"), [(0, "cpu"), (1, "0")])
def test_one_size_is_that_of_the_device_that_computes(accelerators: int, device: str) -> None:
    hardware = simulated() if accelerators else {"rates": RATES}
    with offstage.load(TINY, max_memory="3MB", max_length=64, hardware=hardware) as loaded:
        assert {str(each): one.budget for each, one in loaded.plan.devices.items() if one.budget} == {device: 3_000_000}
        assert loaded.plan.serving, "the rest streams from disk"


def simulated() -> dict[str, Any]:
    return {"devices": [{"memory": "40MB"}], "rates": RATES}


REFUSED: list[tuple[dict[str, Any], str]] = [
    (
        {"quantization_config": BitsAndBytesConfig()},
        "quantization_config: BitsAndBytesConfig isn't .* already, as GPTQ",
    ),
    (
        {"load_in_8bit": True},
        "load_in_8bit: True isn't followed: weights are quantised by quantize='q8_0', 'q6_k', 'q5_k', 'q4_k', 'fp8',",
    ),
    ({"token": "hf_x"}, "token: str isn't followed: .* set HF_TOKEN in the environment"),
    ({"cache_dir": "/x"}, "cache_dir: .* set HF_HOME in the environment"),
    ({"subfolder": "unet"}, "subfolder: .* give the path of that folder"),
    ({"tp_plan": "auto"}, "tp_plan: .* give device_map='auto' and max_memory"),
    ({"low_cpu_mem_usge": True}, "low_cpu_mem_usge: unknown option .did you mean 'low_cpu_mem_usage'"),
    ({"atn_implementation": "sdpa"}, "atn_implementation: unknown option .did you mean 'attn_implementation'"),
    ({"dtype": "float16", "torch_dtype": torch.float32}, "torch_dtype: torch.float32 isn't dtype, 'float16'"),
    ({"attn_implementation": "flash"}, "model.attn_implementation: 'flash' isn't served: "),
    ({"attn_implementation": "org/kernel"}, "model.attn_implementation: 'org/kernel' is code of the Hub"),
    ({"attn_implementation": 3}, "model.attn_implementation: 3 is no text; give eager, sdpa"),
    ({"max_memory": True}, "max_memory: True"),
    ({"max_memory": "much"}, "max_memory.cpu: 'much'"),
    ({"revision": "v2"}, "model.revision: 'v2' is of no use"),
    ({"gguf_file": "none.gguf"}, "none.gguf"),
]


@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[next(reversed(options)) for options, _ in REFUSED])
def test_what_cannot_be_followed_is_refused_by_name(options: dict[str, Any], words: str) -> None:
    with pytest.raises((ConfigError, offstage.CheckpointError), match=words):
        from_pretrained(**options)
