"""A plain checkpoint that is quantised as it is loaded: the model that a maker's file of that format gives."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import offstage
from offstage.pipeline.errors import CheckpointError, ConfigError
from offstage.stages.checkpoints.quantization import QUANTISES
from offstage.stages.empty_init.packed_modules import packed_modules
from tests.e2e.quantised_twins import plain_tensors, save_fp8_twin, save_gguf_twin, save_plain
from tests.long_form import in_ci
from tests.python_api.rates import RATES

TOKENS = torch.tensor([[5, 66, 100, 33, 20, 7, 8], [9, 2, 33, 120, 4, 4, 61]])
ACCELERATOR = {"devices": [{"name": "small", "memory": "40MB", "host_to_device": "10GB"}]}
PLACES: Mapping[str, dict[str, Any]] = {
    "resident": {"device_map": {"": "cpu"}},
    "disk": {"device_map": {"": "disk"}, "storage": {"io": "direct"}},
    "accelerator": {"device_map": "sequential", "max_memory": {0: "300kB", "cpu": "100kB"}, "hardware": ACCELERATOR},
}


MIXTURE_PLACE = {**PLACES["accelerator"], "max_memory": {0: "800kB", "cpu": "100kB"}}


def load(path: Path, *, products: str = "exact", hardware: Mapping[str, Any] | None = None, **options: Any) -> Any:
    given = {"rates": RATES, "devices": [], **(hardware or {})}
    return offstage.load(
        path, hardware=given, dtype="bfloat16", max_length=32, quantized={"products": products}, **options
    )


def answer_of(loaded: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits of a forward, and the tokens that follow."""
    with torch.no_grad():
        logits = loaded.model(input_ids=TOKENS).logits
        tokens = loaded.model.generate(TOKENS, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)
    return logits, tokens


def twin_of(kind: str, folder: Path, source: Path, name: str) -> Path:
    """Write the checkpoint ``source`` of the model ``name`` in the format ``kind``, as its maker would have."""
    if kind == "fp8":
        return save_fp8_twin(folder / "twin", source)
    pytest.importorskip("gguf")
    return save_gguf_twin(folder / "twin.gguf", source, name, kind)


MADE = [
    ("q8_0", "llama"), ("q8_0", "qwen3moe"), ("q8_0", "qwen2"),
    ("q6_k", "qwen3moe"), ("q5_k", "qwen3moe"), ("q4_k", "qwen3moe"), ("q4_k", "llama"),
    ("fp8", "llama"), ("fp8", "deepseek_v3"), ("fp8", "qwen3"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name"), in_ci(("q8_0", "llama"), ("q4_k", "qwen3moe"), of=MADE))
def test_tokens_are_those_of_the_model_that_a_maker_quantised(tmp_path: Path, kind: str, name: str) -> None:
    source = save_plain(tmp_path / "plain", name)
    twin = twin_of(kind, tmp_path, source, name)
    places = {**PLACES, "accelerator": MIXTURE_PLACE} if name == "qwen3moe" else PLACES
    ways = [*((place, "exact") for place in PLACES), ("disk", "fused")]
    with load(source, **PLACES["resident"]) as loaded:
        plain, _ = answer_of(loaded)
    for place, products in ways:
        with load(twin, products=products, **places[place]) as loaded:
            expected = answer_of(loaded)
        with load(source, products=products, quantize=kind, **places[place]) as loaded:
            answer = answer_of(loaded)
            assert bool(packed_modules(loaded.model)) == (products == "fused")
        assert [torch.equal(*pair) for pair in zip(answer, expected, strict=True)] == [True, True], (place, products)
        assert not torch.equal(answer[0], plain)
        assert torch.allclose(answer[0].float(), plain.float(), rtol=0, atol=0.25 * float(plain.abs().max()))


def test_every_placement_and_budget_gives_the_same_tokens_and_streams_what_rests(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", "llama")
    answers, streamed = [], {}
    for kind in (None, *QUANTISES):
        with load(source, quantize=kind, **PLACES["disk"]) as loaded:
            answers.append(answer_of(loaded))
            streamed[kind] = loaded.traffic.streamed_bytes
        for options in (PLACES["resident"], {"max_memory": {"cpu": "500kB"}}):
            with load(source, quantize=kind, **options) as loaded:
                again = answer_of(loaded)
            assert all(torch.equal(*pair) for pair in zip(again, answers[-1], strict=True))
    sizes = [streamed[kind] for kind in ("q4_k", "q5_k", "fp8", "q8_0", None)]
    assert sizes == sorted(set(sizes))
    assert streamed["q6_k"] == streamed["q8_0"], "no rows here are whole runs of 256"


def test_pickled_shards_are_quantised_too(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", "qwen3moe")
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text((source / "config.json").read_text())
    torch.save(plain_tensors(source), pickled / "pytorch_model.bin")
    for place in ("resident", "disk"):
        answers = []
        for path in (source, pickled):
            with load(path, quantize="q8_0", **PLACES[place]) as loaded:
                answers.append(answer_of(loaded))
        assert all(torch.equal(*pair) for pair in zip(*answers, strict=True))


def test_what_can_not_be_quantised_is_refused_by_name(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", "llama")
    twin = save_fp8_twin(tmp_path / "twin", source)
    with pytest.raises(
        ConfigError, match=r"model\.quantize: 'q8' is none of q8_0, q6_k, q5_k, q4_k, fp8 \(did you mean 'q8_0'\?\)"
    ):
        load(source, quantize="q8")
    with pytest.raises(ConfigError, match=r"model\.quantize: 'q8_0' is for plain weights, and .* already \(fp8\)"):
        load(twin, quantize="q8_0")
    with pytest.raises(ConfigError, match=r"model\.quantize: 8 is no text; give q8_0, q6_k, q5_k, q4_k, fp8, or null"):
        load(source, quantize=8)


def test_weights_that_are_no_numbers_are_refused_by_name(tmp_path: Path) -> None:
    source = save_plain(tmp_path / "plain", "llama", max_shard_size="10MB")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    for kind in QUANTISES:
        with pytest.raises(CheckpointError, match=rf"'model\.layers\.1\.mlp\.up_proj\.weight' holds NaN.*for {kind}"):
            load(source, quantize=kind)
