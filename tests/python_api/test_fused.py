"""GGUF models whose linear layers multiply by the blocks of the file: the same bits wherever these lie."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig

import offstage
from offstage.pipeline.errors import ConfigError
from offstage.stages.checkpoints import codec_rates
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codec_rates import product_name
from offstage.stages.checkpoints.codecs.loops import FORMATS_OF_LOOPS
from offstage.stages.checkpoints.packed import rest_bytes
from offstage.stages.checkpoints.readers import open_reader
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.packed_modules import PackedEmbedding, PackedLinear, keep_packed, packed_modules
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.machine.kernels import has_tiles
from offstage.stages.shard_load.stage import ShardLoadStage
from offstage.stages.units import tensor_bytes

pytest.importorskip("gguf")

from tests.e2e.fp8_checkpoints import CONFIGS, rewrite, save_fp8, tensors_in
from tests.long_form import in_ci
from tests.operator_threads import in_threads
from tests.python_api.rates import RATES
from tests.stages.checkpoints.codecs import test_bitsandbytes, test_compressed_tensors, test_grouped
from tests.stages.checkpoints.ggufs import make_gguf
from tests.stages.checkpoints.test_gguf_entries import HEADS, SMALL, made
from tests.stages.dispatch.experts.packed_mixture import save_packed_mixture

TOKENS = torch.tensor([[5, 66, 100, 33, 20, 7, 8], [9, 2, 33, 120, 4, 4, 61]])
FP8_SIZES: Mapping[str, int] = {
    "vocab_size": 320, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64,
}  # fmt: skip
NO_TILES = "the processor has no tiles of bfloat16 (AMX)"
PLACES: Mapping[str, dict[str, Any]] = {
    "in memory": {"device_map": {"": "cpu"}},
    "in part": {"device_map": "sequential", "max_memory": {"cpu": "2.7MB"}},
    "on disk": {"device_map": {"": "disk"}, "storage": {"io": "direct"}},
    "in a map": {"device_map": {"": "disk"}, "storage": {"io": "mmap"}},
}


def load(
    path: Path, products: str = "fused", compute: str | None = None, *, tiles: bool = False, **options: Any
) -> Any:
    quantized = {"products": products, "compute_dtype": compute, "tiles": tiles}
    return offstage.load(path, hardware={"rates": RATES}, max_length=32, quantized=quantized, **options)


def logits_of(loaded: Any) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = loaded.model(input_ids=TOKENS).logits
    return logits


@pytest.mark.parametrize(
    ("architecture", "dtype", "compute", "tiles"),
    [
        ("llama", "float32", None, False),
        pytest.param("qwen2", "bfloat16", None, False, marks=pytest.mark.long_form),
        pytest.param("qwen3moe", "bfloat16", None, False, marks=pytest.mark.long_form),
        ("qwen2", "float32", "bfloat16", False),
        pytest.param("qwen2", "bfloat16", None, True, marks=pytest.mark.skipif(not has_tiles(), reason=NO_TILES)),
    ],
)
def test_the_bits_are_the_same_wherever_weights_lie_and_in_any_threads(
    tmp_path: Path, architecture: str, dtype: str, compute: str | None, tiles: bool
) -> None:
    path, by_place, streamed = made(tmp_path, architecture), {}, {}
    for name, place in PLACES.items():
        for threads in (1, 2) if name == "in memory" else (1,):
            with in_threads(threads), load(path, compute=compute, tiles=tiles, dtype=dtype, **place) as loaded:
                assert packed_modules(loaded.model)
                by_place[name, threads] = logits_of(loaded)
                streamed[name] = loaded.traffic.streamed_bytes
    first = by_place["in memory", 1]
    assert {name: torch.equal(logits, first) for name, logits in by_place.items()} == dict.fromkeys(by_place, True)
    assert streamed["in memory"] == 0 < streamed["on disk"]
    with load(path, "exact", dtype=dtype, device_map={"": "cpu"}) as loaded:
        exact = logits_of(loaded).float()
    assert torch.allclose(first.float(), exact, rtol=0, atol=0.05 * float(exact.abs().max()))


def test_a_plan_counts_packed_bytes_where_they_lie(tmp_path: Path) -> None:
    path = made(tmp_path, "llama")
    with load(path, device_map={"": "cpu"}) as loaded:
        packed, lines = packed_modules(loaded.model), loaded.plan.tensors
        packed_bytes = {name: module.weight.nbytes for name, module in packed.items()}
        assert {name: lines[f"{name}.weight"].bytes for name in packed} == packed_bytes
        assert {module.kind for module in packed.values()} <= set(FORMATS_OF_LOOPS)
        fused = loaded.plan.devices["cpu"].weights
        multiplied = [packed_bytes[name] for name, module in packed.items() if isinstance(module, PackedLinear)]
        assert loaded.plan.forecast["multiplied_bytes_per_token"] == sum(multiplied)
    entries = open_checkpoint(path).entries.values()
    assert set(packed_bytes.values()) <= {entry.bytes for entry in entries}
    with load(path, "exact", device_map={"": "cpu"}) as loaded:
        in_use = {name: loaded.plan.tensors[f"{name}.weight"].bytes for name in packed}
        assert loaded.plan.devices["cpu"].weights - fused == sum(in_use.values()) - sum(packed_bytes.values())


FP8_CONFIGS = {**CONFIGS, "llama": LlamaConfig(**FP8_SIZES, num_key_value_heads=2)}


def answers_everywhere(path: Path, tokens: torch.Tensor, *, dtype: str, kinds: set[str]) -> torch.Tensor:
    """Return the logits of ``tokens``, once they were found the same wherever weights lie, alone and in lockstep."""
    by_place, memory = {}, {}
    for place, options in PLACES.items():
        if place == "in part":
            part = max(90_000, memory["in memory"] // 2)
            options = {"device_map": "sequential", "max_memory": {"cpu": part}}
        for threads in (1, 2) if place == "in memory" else (1,):
            with in_threads(threads), load(path, dtype=dtype, **options) as loaded, torch.no_grad():
                assert {module.kind for module in packed_modules(loaded.model).values()} == kinds
                by_place[place, threads] = loaded.model(input_ids=tokens).logits
                memory[place] = loaded.plan.devices["cpu"].weights
                calls = [partial(loaded.model, input_ids=row[None]) for row in tokens]
                apart = [call().logits for call in calls]
                together = [answer.logits for answer in offstage.lockstep(loaded.model, calls, size=2)]
        assert [torch.equal(*pair) for pair in zip(apart, together, strict=True)] == [True, True]
    first = by_place["in memory", 1]
    assert {key: torch.equal(logits, first) for key, logits in by_place.items()} == dict.fromkeys(by_place, True)
    with load(path, "exact", device_map={"": "cpu"}, dtype=dtype) as loaded, torch.no_grad():
        exact = loaded.model(input_ids=tokens).logits.float()
        assert memory["in memory"] < loaded.plan.devices["cpu"].weights
    assert torch.allclose(first.float(), exact, rtol=0, atol=0.05 * float(exact.abs().max()))
    return first


FP8_CASES = [("llama", "bfloat16"), ("qwen3", "float32"), ("deepseek_v3", "bfloat16")]


@pytest.mark.long_form
@pytest.mark.parametrize(("name", "dtype"), in_ci(FP8_CASES[2], of=FP8_CASES))
def test_fp8_has_the_same_bits_wherever_weights_lie_alone_and_in_lockstep(
    tmp_path: Path, name: str, dtype: str
) -> None:
    path = save_fp8(tmp_path / "model", FP8_CONFIGS[name], block=(32, 32))
    answers_everywhere(path, TOKENS % FP8_CONFIGS[name].vocab_size, dtype=dtype, kinds={"fp8"})


def plain_llama(dtype: torch.dtype = torch.bfloat16) -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**FP8_SIZES, num_key_value_heads=2)).to(dtype)


Pack = Callable[[tuple[int, int], int], Mapping[str, torch.Tensor]]
"""What makes parts of a matrix's shape, and of a seed where it doesn't go on with torch's; by the names' ends."""


def pack_matrices(folder: Path, quantization: Mapping[str, Any], pack: Pack, *, named: str) -> Path:
    """Have the matrices in the checkpoint ``folder`` in whose name ``named`` is found be what ``pack`` makes of each:
    the ends it gives stand where ``weight`` did.
    """
    saved: dict[str, torch.Tensor] = {}
    for seed, (name, tensor) in enumerate(tensors_in(folder).items()):
        if tensor.dim() == 2 and re.search(named, name):
            rows, columns = tensor.shape
            parts = pack((rows, columns), seed)
            saved |= {name.removesuffix("weight") + end: part.contiguous() for end, part in parts.items()}
        else:
            saved[name] = tensor
    save_file(saved, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"quantization_config": dict(quantization)}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def packed_nf4(shape: tuple[int, int], _seed: int, *, nested: bool) -> Mapping[str, torch.Tensor]:
    return {f"weight{end}": part for end, part in test_bitsandbytes.packed(shape, nested=nested).items()}


def packed_groups(shape: tuple[int, int], seed: int, *, kind: str) -> Mapping[str, torch.Tensor]:
    return test_grouped.packed(test_grouped.KINDS[kind], shape, seed=seed)[0]


def save_listed(folder: Path, quantization: Mapping[str, Any], pack: Pack) -> Path:
    """Write a mixture whose layers' linear weights, experts' one by one, are what ``pack`` makes."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(MOE, dtype=torch.float16).save_pretrained(folder)
    return pack_matrices(folder, quantization, pack, named=r"proj\.weight$")


def save_listed_groups(folder: Path, kind: str) -> Path:
    return save_listed(folder, test_grouped.KINDS[kind], partial(packed_groups, kind=kind))


def save_listed_nf4(folder: Path) -> Path:
    return save_listed(folder, test_bitsandbytes.QUANTIZATION, partial(packed_nf4, nested=False))


def save_listed_codes(folder: Path, scheme: str) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MOE, dtype=torch.float32)  # the same in every torch, as bfloat16 isn't
    test_compressed_tensors.compress(model.to(torch.bfloat16), scheme, folder)
    return folder


def save_stacks_in_gguf(folder: Path) -> Path:
    folder.mkdir()
    config = Qwen3MoeConfig(**SMALL, **HEADS, num_experts=4, num_experts_per_tok=2, head_dim=64)
    kinds = ("q4_k", "q6_k", "q8_0")  # so that the halves of a first matrix are of two, as in published files
    return Path(make_gguf(folder / "model.gguf", "qwen3moe", config, kinds=kinds, tokens=320))


def save_nf4(folder: Path) -> Path:
    """Write a Llama whose layers' linear weights are of random codes, as bitsandbytes packs them."""
    plain_llama().save_pretrained(folder)
    return pack_matrices(folder, test_bitsandbytes.QUANTIZATION, partial(packed_nf4, nested=True), named=r"\.layers\.")


def save_compressed(folder: Path, scheme: str) -> Path:
    test_compressed_tensors.compress(plain_llama(), scheme, folder)
    return folder


def save_grouped(folder: Path, kind: str) -> Path:
    test_grouped.quantise(plain_llama(torch.float16), test_grouped.KINDS[kind], folder)
    return folder


FORMATS: Mapping[str, tuple[Callable[[Path], Path], set[str], str]] = {
    "INT8": (partial(save_compressed, scheme="INT8 by channels"), {"int8"}, "bfloat16"),
    "INT4": (partial(save_compressed, scheme="INT4 by groups"), {"int4"}, "float32"),
    "NVFP4": (partial(save_compressed, scheme="NVFP4"), {"fp4"}, "bfloat16"),
    "NF4": (save_nf4, {"nf4"}, "bfloat16"),
    "GPTQ": (partial(save_grouped, kind="GPTQ, zeros less one"), {"gptq4"}, "float16"),
    "GPTQ of 3 bits, reordered": (partial(save_grouped, kind="GPTQ of 3 bits, reordered"), {"gptq3"}, "float16"),
    "AWQ": (partial(save_grouped, kind="AWQ"), {"awq4"}, "bfloat16"),
}


@pytest.mark.parametrize("name", in_ci("INT4", "NF4", of=FORMATS))
def test_formats_have_the_same_bits_wherever_weights_lie_alone_and_in_lockstep(tmp_path: Path, name: str) -> None:
    save, kinds, dtype = FORMATS[name]
    answers_everywhere(save(tmp_path / "model"), TOKENS, dtype=dtype, kinds=kinds)


MOE = Qwen3MoeConfig(
    **FP8_SIZES, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=32, num_key_value_heads=2
)
MIXTURES: Mapping[str, tuple[Callable[[Path], Path], str]] = {
    "stacks in MXFP4": (save_packed_mixture, "mxfp4"),
    "stacks in GGUF": (save_stacks_in_gguf, "q4_k q6_k q8_0"),
    "experts in FP8, one by one": (partial(save_fp8, config=MOE, block=(32, 32)), "fp8"),
    "in INT8, one by one": (partial(save_listed_codes, scheme="INT8 by channels"), "int8"),
    "in INT4, one by one": (partial(save_listed_codes, scheme="INT4 by groups"), "int4"),
    "in NVFP4, one by one": (partial(save_listed_codes, scheme="NVFP4"), "fp4"),
    "in GPTQ, one by one": (partial(save_listed_groups, kind="GPTQ, zeros less one"), "gptq4"),
    "in GPTQ, reordered": (partial(save_listed_groups, kind="GPTQ, reordered"), "gptq4"),
    "in AWQ, one by one": (partial(save_listed_groups, kind="AWQ"), "awq4"),
    "in NF4, one by one": (save_listed_nf4, "nf4"),
}


@pytest.mark.parametrize("name", in_ci("stacks in GGUF", "in NF4, one by one", of=MIXTURES))
def test_experts_are_multiplied_and_kept_as_they_rest(tmp_path: Path, name: str) -> None:
    save, kinds = MIXTURES[name]
    path = save(tmp_path / "model")
    answers_everywhere(path, TOKENS % 96, dtype="float32", kinds=set(kinds.split()))  # so that none is routed otherwise
    with load(path, dtype="float32", device_map={"": "disk"}) as loaded:
        packed = {place: module for place, module in packed_modules(loaded.model).items() if hasattr(module, "config")}
        lines = loaded.plan.tensors
        stacks = {name: line for name, line in lines.items() if parent(name) in packed and "bias" not in name}
        products = describe(loaded.model, rehearsed=False).products
        for place in packed:
            own = {name: line for name, line in stacks.items() if parent(name) == place}
            used = sum(line.bytes for line in own.values()) * MOE.num_experts_per_tok / MOE.num_experts
            for name, line in own.items():  # what is little of an expert comes with all of the module
                assert line.serving == ("experts" if line.bytes > used / 32 else "map"), name
    entries = open_reader(open_checkpoint(path)).entries
    multiplied = {name: (each, at) for each in products for at, name in enumerate(each.tensors)}
    assert stacks.keys() <= multiplied.keys() <= lines.keys()
    for name, line in stacks.items():
        each, at = multiplied[name]
        kind, shape = each.parts[at % len(each.parts)]
        assert line.bytes == packed[parent(name)].num_experts * tensor_bytes(shape, kind)
    asked = {product_name(each.matrix_text, each.parts, "float32", tiles=False) for each in products}
    assert codec_rates.measure("multiplying", *asked).keys() == asked
    in_files = [rest_bytes(entry) for key, entry in entries.items() if ".experts." in key and "bias" not in key]
    assert sum(line.bytes for line in stacks.values()) == sum(in_files) > 0


def test_scales_under_another_name_are_the_same(tmp_path: Path) -> None:
    path, logits = save_fp8(tmp_path / "model", FP8_CONFIGS["llama"], block=(32, 32)), []
    other = {name.replace("weight_scale_inv", "scale"): tensor for name, tensor in tensors_in(path).items()}
    for tensors in (None, other):
        if tensors is not None:
            rewrite(path, tensors, {"quant_method": "fp8", "weight_block_size": [32, 32]})
        with load(path, device_map={"": "cpu"}, dtype="bfloat16") as loaded:
            assert packed_modules(loaded.model)
            logits.append(logits_of(loaded))
    assert torch.equal(*logits)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_looked_up_have_the_bits_that_unpacking_the_table_gives(tmp_path: Path, dtype: str) -> None:
    path, rows = made(tmp_path, "qwen2"), {}
    for products in ("exact", "fused"):
        with load(path, products, dtype=dtype, device_map={"": "cpu"}) as loaded:
            embedding = loaded.model.get_input_embeddings()
            assert isinstance(embedding, PackedEmbedding) == (products == "fused")
            rows[products] = embedding(TOKENS)
            if products == "fused":
                assert loaded.model.lm_head.weight is embedding.weight
    assert rows["fused"].dtype == rows["exact"].dtype
    assert torch.equal(rows["fused"], rows["exact"])


def test_what_needs_unpacked_weights_is_refused_by_name(tmp_path: Path) -> None:
    with load(made(tmp_path, "llama"), device_map={"": "cpu"}) as loaded:
        with pytest.raises(RuntimeError, match="can't be saved; load it"):
            loaded.model.save_pretrained(tmp_path / "saved")
        with pytest.raises(RuntimeError, match="has no gradients"):
            loaded.model(inputs_embeds=torch.zeros(1, 3, 256, requires_grad=True))


def test_models_that_have_nothing_to_multiply_so_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="'fused' is of no use, no linear layer of"):
        load(
            make_gguf(
                tmp_path / "plain.gguf", "llama", LlamaConfig(**SMALL, **HEADS), kinds=["f16", "q2_k"], tokens=320
            )
        )
    devices = [{"name": "small", "memory": "400MB"}]
    (tmp_path / "llama").mkdir()
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL, **HEADS), dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"quantized\.tiles: true is of no use, .* none multiplies bfloat16; add"):
        keep_packed(model, open_checkpoint(made(tmp_path / "llama", "llama")), tiles=True)
    with pytest.raises(ConfigError, match="multiplies on the host alone, and by this plan accelerator 0 computes"):
        offstage.load(
            made(tmp_path / "llama", "llama"),
            hardware={"rates": RATES, "devices": devices},
            quantized={"products": "fused"},
        )


def test_an_exact_load_and_a_fused_one_share_nothing_that_differs(tmp_path: Path) -> None:
    path = made(tmp_path, "llama")
    keys = []
    for products in ("exact", "fused", "exact"):
        with load(path, products, device_map={"": "cpu"}) as loaded:
            keys.append(loaded._chain.artifact(ShardLoadStage.name).key)
    assert keys[0] == keys[2] != keys[1]
