"""FP8 checkpoints: whatever lies where, logits and tokens are those of the model that transformers dequantises."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

import offstage
from tests.e2e.conftest import Finished
from tests.e2e.fp8_checkpoints import CONFIGS, dequantised, rewrite, save_fp8, save_twin, tensors_in
from tests.e2e.pipelines import dispatched, dispatched_model
from tests.e2e.test_architectures import SIZES
from tests.e2e.test_same_answer import answers, random_map
from tests.long_form import in_ci

pytestmark = pytest.mark.long_form
"""What it shows of whole runs, tests of the stages show of these."""

EMBEDDED, EMBEDDED_WORDS = Path(__file__).parents[2] / "conf" / "checkpoints" / "tiny", 3072
SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"


@pytest.fixture(scope="module", params=in_ci("deepseek_v3", of=CONFIGS))
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fp8(tmp_path_factory.mktemp(request.param), CONFIGS[request.param])


@pytest.fixture(scope="module")
def outputs(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"outputs-of-{checkpoint.name}")


@pytest.mark.long_form
def test_any_placement_gives_the_answer_of_the_dequantised_model(checkpoint: Path, outputs: Path) -> None:
    plain = dequantised(checkpoint)
    expected, chance = answers(plain), random.Random(checkpoint.name)
    placements = ["disk", random_map(plain, chance), random_map(plain, chance, others=(0, 1, "cpu", "cpu"))]
    for placement in placements:
        model = dispatched_model(
            checkpoint, outputs, device_map=placement, storage={"io": "direct"},
            max_memory={0: "1GB", 1: "1GB", "cpu": "1GB"}, hardware={"devices": [{"memory": "2GB"}, {"memory": "2GB"}]},
        )  # fmt: skip
        assert model.dtype == torch.bfloat16
        for got, wanted in zip(answers(model), expected, strict=True):
            assert torch.equal(got, wanted), placement


def test_what_is_streamed_are_the_bytes_at_rest(checkpoint: Path, outputs: Path) -> None:
    live = dispatched(checkpoint, outputs, device_map="disk", max_memory={"cpu": "1GB"}, storage={"io": "direct"})
    model, traffic = live.model, live.streamer.traffic
    with torch.no_grad():
        model(input_ids=torch.tensor([[5]]))
        before = replace(traffic)
        model(input_ids=torch.tensor([[6]]))
    at_rest = {name: tensor.nbytes for name, tensor in tensors_in(checkpoint).items()}
    experts = {name: size for name, size in at_rest.items() if ".experts." in name}
    one = sum(size for name, size in experts.items() if ".1.mlp.experts.0." in name)
    looked_up = 0 if model.config.tie_word_embeddings else at_rest["model.embed_tokens.weight"]
    dense = sum(at_rest.values()) - sum(experts.values()) - looked_up
    brought = (traffic.expert_misses - before.expert_misses) * one
    assert traffic.streamed_bytes - before.streamed_bytes == dense + brought


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_fp8(tmp_path_factory.mktemp("llama"), LlamaConfig(**SIZES, vocab_size=EMBEDDED_WORDS))


@pytest.mark.parametrize("dtype", in_ci(torch.float16, of=[torch.float16, torch.float32]), ids=str)
def test_python_users_have_it_in_any_dtype(llama: Path, dtype: torch.dtype) -> None:
    tokens = torch.tensor([[5, 6, 7]])
    with offstage.load(llama, max_memory={"cpu": "600kB"}, dtype=dtype) as loaded, torch.no_grad():
        logits = loaded.model(input_ids=tokens).logits
        expected = dequantised(llama, dtype=dtype)(input_ids=tokens).logits
        assert torch.equal(logits, expected)
        assert not hasattr(loaded.model.config, "quantization_config")


def test_an_adapter_trained_beside_it_is_that_of_its_twin(
    llama: Path, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    pytest.importorskip("peft", reason="the extra adapter isn't installed")
    Path("text.txt").write_text("The weights wait offstage until their cue. " * 8)
    given = (
        "stages=finetune", "model=pretrained", f"model.tokenizer={EMBEDDED}", "finetune.text_file=text.txt",
        "finetune.window=16", "finetune.steps=1", "finetune.lora={r: 4}", "device_map=disk", "storage.io=direct",
    )  # fmt: skip
    trained = []
    for folder in (llama, save_twin(tmp_path / "twin", llama)):
        finished = offstage_here(*given, f"model.path={folder}")
        assert finished.code == 0, finished.err
        (adapter,) = Path(finished.record["stages"][-1]["artifact"]).glob("**/adapter_model.safetensors")
        trained.append(adapter.read_bytes())
    assert trained[0] == trained[1]


def test_parts_that_do_not_belong_together_are_one_line_and_exit_3(
    llama: Path, tmp_path: Path, offstage_here: Callable[..., Finished]
) -> None:
    tensors, config = tensors_in(llama), llama.joinpath("config.json").read_text()
    tensors[SCALE] = torch.ones(5, 2)
    tmp_path.joinpath("config.json").write_text(config)
    rewrite(tmp_path, tensors, json.loads(config)["quantization_config"])
    finished = offstage_here("model=pretrained", f"model.path={tmp_path}", "stages=plan_only")
    assert finished.code == 3
    assert f"tensor {SCALE!r}: shape [5, 2] doesn't fit" in finished.err
    assert len(finished.err.strip().splitlines()) == 1
