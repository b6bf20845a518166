import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel, Qwen3MoeConfig

import offstage
from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs.compressed_scheme import weight_scheme
from offstage.stages.checkpoints.codecs.compressed_tensors import fold_compressed
from offstage.stages.checkpoints.packed import PackedTensor, in_dtype
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.empty_init.identity import quantization_fault

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
SCHEMES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "FP8 by tensors": ("float-quantized", {**FP8, "strategy": "tensor"}),
    "FP8 by channels": ("float-quantized", {**FP8, "strategy": "channel"}),
    "FP8 by blocks": ("naive-quantized", {**FP8, "strategy": "block", "block_structure": [32, 16]}),
    "INT8 by channels": ("int-quantized", {**INT8, "strategy": "channel"}),
    "INT8 by tensors": ("naive-quantized", {**INT8, "strategy": "tensor"}),
    "INT4 by groups": ("pack-quantized", {**INT4, "strategy": "group", "group_size": 32}),
    "INT4 by channels": ("pack-quantized", {**INT4, "strategy": "channel"}),
    "NVFP4": (
        "nvfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16},
    ),
    "MXFP4": (
        "mxfp4-pack-quantized",
        {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "group", "group_size": 32},
    ),
}
ROWS, COLUMNS = 64, 96
MODULE = "model.layers.0.mlp.up_proj"


def declared(form: str, weights: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Return what a config says of weights, as the library writes it."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "format": form}
    nothing: dict[str, Any] = {"sparsity_config": {}, "transform_config": {}, "kv_cache_scheme": None}
    quantization = {"quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group}}
    return {**quantization, "ignore": ["lm_head"], "quantization_status": "compressed", **nothing, **more}


def shape_of_scales(weights: Mapping[str, Any], rows: int, columns: int) -> tuple[int, ...]:
    match weights["strategy"]:
        case "tensor":
            return (1,)
        case "channel":
            return (rows, 1)
        case "block":
            return (rows // weights["block_structure"][0], columns // weights["block_structure"][1])
    return (rows, columns // weights["group_size"])


def packed(
    form: str, weights: Mapping[str, Any], scales: torch.dtype, shape: tuple[int, int] = (ROWS, COLUMNS)
) -> dict[str, torch.Tensor]:
    """Return a module's tensors at rest, of random codes, by the names that the library gives them."""
    rows, columns = shape
    codes = torch.randint(256, (rows, columns * weights["num_bits"] // 8), dtype=torch.uint8)
    scale = (torch.rand(shape_of_scales(weights, rows, columns)) * 0.01).to(scales)
    if form == "pack-quantized":
        shape_tensor = torch.tensor([rows, columns])
        return {"weight_packed": codes.view(torch.int32), "weight_scale": scale, "weight_shape": shape_tensor}
    if form == "nvfp4-pack-quantized":
        divisor = torch.tensor([1234.5])
        return {
            "weight_packed": codes,
            "weight_scale": (scale.float() * 4e4).to(torch.float8_e4m3fn),
            "weight_global_scale": divisor,
        }
    if form == "mxfp4-pack-quantized":
        return {"weight_packed": codes, "weight_scale": torch.randint(118, 122, scale.shape, dtype=torch.uint8)}
    kind = torch.float8_e4m3fn if weights["type"] == "float" else torch.int8
    return {"weight": (codes & 0xF7 if weights["type"] == "float" else codes).view(kind), "weight_scale": scale}


def unpacked(form: str, weights: Mapping[str, Any], at_rest: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight by the library's definition: codes times scales in the scales' dtype, that of FP4 bfloat16."""
    codes, scale = at_rest.get("weight"), at_rest["weight_scale"]
    if codes is None:
        pairs = at_rest["weight_packed"].view(torch.uint8)
        low_first = torch.stack((pairs & 15, pairs >> 4), -1).flatten(-2)
        codes = FP4[low_first.int()] if weights["type"] == "float" else low_first.to(torch.int8) - 8
    if form == "nvfp4-pack-quantized":
        scale = scale.float() / at_rest["weight_global_scale"]
    if form == "mxfp4-pack-quantized":
        scale = (2.0 ** (scale.float() - 127)).bfloat16()
    down, across = scale.shape if scale.dim() == 2 else (1, 1)
    each = scale.repeat_interleave(codes.shape[0] // down, -2) if scale.dim() == 2 else scale
    each = each.repeat_interleave(codes.shape[1] // across, -1) if scale.dim() == 2 else each
    made = codes.to(each.dtype) * each
    return made.bfloat16() if weights["type"] == "float" and weights["num_bits"] == 4 else made


def folded(folder: Path, tensors: Mapping[str, torch.Tensor], quantization: Mapping[str, Any]) -> dict[str, Any]:
    named = {f"{MODULE}.{name}": tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "model.safetensors")
    return fold_compressed(open_checkpoint(folder).entries, quantization)


def read_as(tensor: Any, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(tensor, PackedTensor)
    served = in_dtype(tensor, str(dtype).removeprefix("torch."))
    return read_extent(served if isinstance(served, PackedTensor) else tensor).to(dtype)


def test_rows_that_were_filled_up_to_whole_numbers_are_refused_as_such(tmp_path: Path) -> None:
    form, weights = SCHEMES["INT4 by channels"]
    at_rest = packed(form, weights, torch.bfloat16, (64, 104)) | {"weight_shape": torch.tensor([64, 100])}
    with pytest.raises(CheckpointError, match=r"up_proj\.weight_packed': rows of 100 codes .* filled up to 104 aren't"):
        folded(tmp_path, at_rest, declared(form, weights))


@pytest.mark.parametrize("scales", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_unpacked_by_the_librarys_definition(scheme: str, scales: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    form, weights = SCHEMES[scheme]
    at_rest = packed(form, weights, scales)
    (tensor,) = folded(tmp_path, at_rest, declared(form, weights)).values()
    assert tensor.rest_bytes == sum(part.nbytes for name, part in at_rest.items() if name != "weight_shape")
    want = unpacked(form, weights, at_rest)
    for dtype in (torch.bfloat16, torch.float32, torch.float16):
        made = read_as(tensor, dtype)
        assert torch.equal(made.view(torch.uint8), want.to(dtype).view(torch.uint8))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_weights_are_unpacked_as_the_library_does_it(scheme: str, tmp_path: Path) -> None:
    compressors = pytest.importorskip("compressed_tensors.compressors")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    torch.manual_seed(1)
    form, weights = SCHEMES[scheme]
    at_rest = packed(form, weights, torch.bfloat16)
    (tensor,) = folded(tmp_path, at_rest, declared(form, weights)).values()
    library = compressors.BaseCompressor.get_value_from_registry(form)
    made = library.decompress(at_rest, quantization.QuantizationScheme(targets=["Linear"], weights=weights))["weight"]
    assert torch.equal(read_as(tensor, torch.bfloat16).view(torch.int16), made.bfloat16().view(torch.int16))


def compress(model: PreTrainedModel, scheme: str, folder: Path) -> dict[str, torch.Tensor]:
    """Write ``model`` into ``folder`` with packed layers, codes drawn anew; return its weights as they are used."""
    form, weights = SCHEMES[scheme]
    model.save_pretrained(folder)
    used = {name: read_whole(entry) for name, entry in open_checkpoint(folder).entries.items()}
    at_rest: dict[str, torch.Tensor] = {}
    for name, tensor in used.items():
        if not name.endswith("proj.weight"):
            at_rest[name] = tensor
            continue
        module = packed(form, weights, torch.bfloat16, tuple(tensor.shape))
        used[name] = unpacked(form, weights, module).bfloat16()
        at_rest |= {f"{name.removesuffix('weight')}{part}": value for part, value in module.items()}
        at_rest[f"{name.removesuffix('weight')}input_scale"] = torch.ones(1)
    save_file(at_rest, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = declared(form, weights)
    (folder / "config.json").write_text(json.dumps(config))
    return used


def read_whole(entry: Any) -> torch.Tensor:
    from offstage.stages.checkpoints.readers import read_extent

    return read_extent(entry)


SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 96, "pad_token_id": 0, "eos_token_id": 1, "dtype": "bfloat16",
}  # fmt: skip
MODELS = {
    "INT4 by groups": LlamaConfig(**SIZES),
    "FP8 by channels": Qwen3MoeConfig(**SIZES, num_experts=4, moe_intermediate_size=32, num_experts_per_tok=2),
}


@pytest.mark.parametrize("scheme", MODELS)
def test_a_model_streams_its_bytes_at_rest_and_answers_as_the_unpacked_one(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # the user's cache knows this machine: another would have it measured for ten seconds
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(MODELS[scheme], dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "plain")
    used = compress(model, scheme, tmp_path / "compressed")
    save_file(used, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})
    expected = AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.bfloat16).eval()
    tokens = torch.tensor([[3]])
    placed = {"": "disk", "model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
    with offstage.load(tmp_path / "compressed", cache=tmp_path, max_length=16, device_map=placed) as loaded:
        assert torch.equal(loaded.model(tokens).logits, expected(tokens).logits)
        streamed = loaded.traffic.streamed_bytes
    layers = sum(tensor.nbytes for name, tensor in used.items() if ".layers." in name)
    assert 0 < streamed < layers * 0.4


FORM, WEIGHTS = SCHEMES["INT4 by groups"]
REFUSED: Mapping[str, tuple[dict[str, Any], str]] = {
    "zero points": (declared(FORM, {**WEIGHTS, "symmetric": False}), "zero points"),
    "another format": (declared("marlin-24", WEIGHTS), "format: marlin-24 of 4 bits, int"),
    "another width": (declared(FORM, {**WEIGHTS, "num_bits": 3}), "of 3 bits"),
    "an order of activations": (declared(FORM, {**WEIGHTS, "actorder": "group"}), "actorder: group"),
    "sparsity": (declared(FORM, WEIGHTS, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
    "rotations": (declared(FORM, WEIGHTS, transform_config={"config_groups": {"R1": {}}}), "transform_config"),
    "another strategy": (declared(FORM, {**WEIGHTS, "strategy": "token"}), "strategy: token"),
    "groups of nothing": (declared(FORM, {**WEIGHTS, "group_size": 0}), "strategy: group"),
    "no scheme": (declared(FORM, WEIGHTS, config_groups={}), "0 schemes"),
    "schemes that aren't": (declared(FORM, WEIGHTS, config_groups={"a": [1]}), "weights: None"),
    "two schemes": (
        declared(
            FORM,
            WEIGHTS,
            config_groups={
                str(size): {"weights": {**WEIGHTS, "group_size": size}, "format": FORM} for size in (32, 64)
            },
        ),
        "2 schemes",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("quantization", "said"), REFUSED.values(), ids=REFUSED)
def test_what_is_not_served_is_refused_by_name_before_any_work(
    tmp_path: Path, quantization: dict[str, Any], said: str
) -> None:
    with pytest.raises(CheckpointError) as refusal:
        weight_scheme(quantization)
    assert said in str(refusal.value)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    fault = quantization_fault(tmp_path)
    assert fault is not None
    assert said in fault
    assert str(tmp_path / "config.json") in fault


def test_what_is_served_is_no_fault(tmp_path: Path) -> None:
    for form, weights in SCHEMES.values():
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": declared(form, weights)}))
        assert quantization_fault(tmp_path) is None


def without(tensors: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in tensors.items() if key != name}


GOOD = packed(*SCHEMES["INT4 by groups"], torch.bfloat16)
NV = packed(*SCHEMES["NVFP4"], torch.bfloat16)
BROKEN: Mapping[str, tuple[str, dict[str, torch.Tensor], str]] = {
    "no scale": ("INT4 by groups", without(GOOD, "weight_scale"), "has no weight_scale"),
    "no codes": ("INT4 by groups", without(GOOD, "weight_packed"), "is a scale without a weight"),
    "scales of another shape": (
        "INT4 by groups", {**GOOD, "weight_scale": GOOD["weight_scale"][:, :2]}, "[64, 2] where .* [64, 3] belongs",
    ),
    "scales of another dtype": ("INT4 by groups", {**GOOD, "weight_scale": GOOD["weight_scale"].int()}, "is int32"),
    "codes of another dtype": ("INT4 by groups", {**GOOD, "weight_packed": GOOD["weight_packed"].float()}, "float32"),
    "codes of three dimensions": (
        "INT4 by groups", {**GOOD, "weight_packed": GOOD["weight_packed"][None]}, "[1, 64, 12] where int32",
    ),
    "zero points": ("INT4 by groups", {**GOOD, "weight_zero_point": torch.zeros(1)}, "weight_zero_point isn't served"),
    "no scale for all": ("NVFP4", without(NV, "weight_global_scale"), "there is no"),
    "scales for all": ("NVFP4", {**NV, "weight_global_scale": torch.ones(2)}, "[2] where float32 [1] belongs"),
}  # fmt: skip


@pytest.mark.parametrize(("scheme", "tensors", "said"), BROKEN.values(), ids=BROKEN)
def test_parts_that_do_not_fit_are_refused_by_name(
    tmp_path: Path, scheme: str, tensors: dict[str, torch.Tensor], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said.replace("[", r"\[").replace("]", r"\]")) as refusal:
        folded(tmp_path, tensors, declared(*SCHEMES[scheme]))
    assert f"{MODULE}.weight" in str(refusal.value)
    assert "\n" not in str(refusal.value)
