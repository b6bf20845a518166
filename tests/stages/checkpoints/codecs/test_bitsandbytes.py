import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.codecs.bitsandbytes import fold_bitsandbytes
from offstage.stages.checkpoints.codecs.scaled_codes import sample
from offstage.stages.checkpoints.packed import AtRest, PackedTensor, in_dtype
from offstage.stages.checkpoints.readers import open_reader, read_extent
from offstage.stages.empty_init.identity import quantization_fault

NAME = "model.layers.0.mlp.up_proj.weight"
STATE = f"{NAME}.quant_state.bitsandbytes__nf4"
QUANTIZATION = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
RUN, NESTED_RUN = 64, 256
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def as_text(state: object) -> torch.Tensor:
    return torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)


def packed(shape: tuple[int, ...], *, dtype: str = "bfloat16", nested: bool = True) -> dict[str, torch.Tensor]:
    """Return what the library writes of a weight of random codes, by the names' ends."""
    count = shape[0] * shape[1]
    codes = torch.randint(256, (count // 2, 1), dtype=torch.uint8)
    state = {"quant_type": "nf4", "blocksize": RUN, "dtype": dtype, "shape": list(shape)}
    values = {"": codes, ".quant_map": torch.linspace(-1, 1, 16), ".absmax": torch.rand(count // RUN)}
    if nested:
        state |= {"nested_blocksize": NESTED_RUN, "nested_dtype": "float32", "nested_offset": 0.05189931392669678}
        values |= {
            ".absmax": torch.randint(256, (count // RUN,), dtype=torch.uint8),
            ".nested_absmax": torch.rand(-(-count // RUN // NESTED_RUN)) * 0.1,
            ".nested_quant_map": torch.linspace(-1, 1, 256),
        }
    return {**values, ".quant_state.bitsandbytes__nf4": as_text(state)}


def unpacked(tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return the weight by the library's definition, in the dtype that it was quantised from."""
    state = json.loads(bytes(tensors[".quant_state.bitsandbytes__nf4"].tolist()))
    scales = tensors[".absmax"]
    if "nested_offset" in state:
        above = tensors[".nested_absmax"].repeat_interleave(NESTED_RUN)[: scales.numel()]
        scales = tensors[".nested_quant_map"][scales.int()] * above + torch.tensor(state["nested_offset"])
    codes = tensors[""].flatten()
    values = tensors[".quant_map"][torch.stack((codes >> 4, codes & 15), -1).flatten().int()]
    return (values.view(-1, RUN) * scales[:, None]).to(DTYPES[state["dtype"]]).view(state["shape"])


def folded(folder: Path, tensors: Mapping[str, torch.Tensor]) -> dict[str, AtRest]:
    save_file({f"{NAME}{part}": tensor for part, tensor in tensors.items()}, folder / "model.safetensors")
    return fold_bitsandbytes(open_checkpoint(folder).entries, QUANTIZATION)


def read_as(tensor: AtRest, dtype: torch.dtype) -> torch.Tensor:
    assert isinstance(tensor, PackedTensor)
    served = in_dtype(tensor, str(dtype).removeprefix("torch."))
    return read_extent(served if isinstance(served, PackedTensor) else tensor).to(dtype)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.view(torch.uint8), other.view(torch.uint8))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 96), (7, 64), (1500, 2048)], ids=["small", "odd", "of several blocks"])
def test_weights_are_unpacked_by_the_librarys_definition(
    shape: tuple[int, int], dtype: str, nested: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    tensors = packed(shape, dtype=dtype, nested=nested)
    (tensor,) = folded(tmp_path, tensors).values()
    want = unpacked(tensors)
    assert tensor.shape == want.shape
    for run in DTYPES.values() if shape[0] < 100 else [DTYPES[dtype]]:
        assert same_bits(read_as(tensor, run), want.to(run))


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
def test_weights_that_the_library_has_packed_are_unpacked_as_it_does(kind: str, nested: bool, tmp_path: Path) -> None:
    library = pytest.importorskip("bitsandbytes.functional")
    torch.manual_seed(1)
    weight = (torch.randn(96, 128) * 0.02).bfloat16()
    codes, state = library.quantize_4bit(weight, quant_type=kind, compress_statistics=nested, blocksize=RUN)
    parts = {f".{part}": tensor for part, tensor in state.as_dict(packed=True).items()}
    (tensor,) = folded(tmp_path, {"": codes, **parts}).values()
    want = library.dequantize_4bit(codes, state) + 0  # FP4's zero with a sign: minus zero, where it has no AVX-512
    assert same_bits(read_as(tensor, torch.bfloat16), want)


def test_rows_of_whole_runs_are_read_alone(tmp_path: Path) -> None:
    tensors = packed((32, NESTED_RUN * RUN))
    (tensor,) = folded(tmp_path, tensors).values()
    assert isinstance(tensor, PackedTensor)
    part = tensor.codec.rows(tensor, 3, 5)
    assert part is not None
    assert part.rest_bytes * 16 == tensor.rest_bytes
    assert same_bits(read_as(part, torch.bfloat16), unpacked(tensors)[3:5])
    (odd,) = folded(tmp_path, packed((64, 96))).values()
    assert isinstance(odd, PackedTensor)
    assert odd.codec.rows(odd, 1, 2) is None
    assert odd.codec.rows(odd, 2, 4) is None, "its scales' scales are for others too"


def test_the_sample_is_a_block_that_can_be_unpacked() -> None:
    tensor, block, data = sample("nf4")
    target = torch.zeros(tensor.shape, dtype=torch.bfloat16)
    tensor.codec.unpack(tensor, block, data, target.view(torch.uint8).flatten().numpy())
    assert (target != 0).float().mean() > 0.9


def test_a_checkpoint_that_declares_it_is_read_unpacked(tmp_path: Path) -> None:
    tensors = packed((64, 128))
    save_file({f"{NAME}{part}": tensor for part, tensor in tensors.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": QUANTIZATION}))
    reader = open_reader(open_checkpoint(tmp_path))
    assert list(reader.entries) == [NAME]
    assert same_bits(reader.read(NAME, torch.bfloat16), unpacked(tensors))


def test_only_four_bits_are_served(tmp_path: Path) -> None:
    for quantization, served in ((QUANTIZATION, True), ({**QUANTIZATION, "load_in_4bit": False}, False)):
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        assert (quantization_fault(tmp_path) is None) == served
    assert "in other than four bits, which aren't served" in str(quantization_fault(tmp_path))


GOOD, PLAIN = packed((64, 96)), packed((64, 96), nested=False)
TEXT = ".quant_state.bitsandbytes__nf4"
QUANT_STATE = json.loads(bytes(GOOD[TEXT].tolist()))


def without(part: str) -> dict[str, torch.Tensor]:
    return {key: tensor for key, tensor in GOOD.items() if key != part}


def with_state(**changed: object) -> dict[str, torch.Tensor]:
    return {**GOOD, TEXT: as_text({**QUANT_STATE, **changed})}


BROKEN: Mapping[str, tuple[dict[str, torch.Tensor], str]] = {
    "no codes": (without(""), f"{STATE!r} is of {NAME!r}, which isn't there"),
    "no text": (without(TEXT), "part of a quantised weight that has no"),
    "no scales": (without(".absmax"), f"needs '{NAME}.absmax', which isn't there"),
    "no values": (without(".quant_map"), f"needs '{NAME}.quant_map', which isn't there"),
    "no scales of scales": (without(".nested_absmax"), f"needs '{NAME}.nested_absmax'"),
    "fewer scales": ({**GOOD, ".absmax": GOOD[".absmax"][:-1]}, "[95] where 96 of uint8 belong"),
    "scales of bytes that aren't packed": ({**PLAIN, ".absmax": GOOD[".absmax"]}, "where 96 of float32 belong"),
    "fewer values": ({**GOOD, ".quant_map": torch.ones(15)}, "[15] where 16 of float32 belong"),
    "codes of another dtype": ({**GOOD, "": GOOD[""].int()}, "where the codes are int32"),
    "a text that is none": ({**GOOD, TEXT: torch.zeros(9, dtype=torch.uint8)}, "is no JSON text"),
    "a text that is too long": ({**GOOD, TEXT: torch.zeros(20_000, dtype=torch.uint8)}, "is uint8 [20000]"),
    "a text without end": ({**GOOD, TEXT: torch.full((16_000,), ord("["), dtype=torch.uint8)}, "is no JSON text"),
    "a list": ({**GOOD, TEXT: as_text([1])}, "is no JSON object"),
    "another shape": (
        with_state(shape=[64, 128]),
        "says shape [64, 128] in runs of 64, where the codes are uint8 [3072, 1]",
    ),
    "a shape of texts": (with_state(shape=["a"]), "says shape ['a']"),
    "a shape that is too large": (with_state(shape=[2**40, 2**40]), "says shape [1099511627776, 1099511627776]"),
    "runs of nothing": (with_state(blocksize=0), "blocksize 0"),
    "runs of a text": (with_state(blocksize=[64]), "blocksize [64]"),
    "runs of a fraction": (with_state(blocksize=64.0), "blocksize 64.0"),
    "runs that don't end with it": (with_state(blocksize=4096), "in runs of 4096"),
    "another dtype": (with_state(dtype="int8"), "dtype int8"),
    "an offset that is none": (with_state(nested_offset="x"), "nested_offset x"),
    "nested runs of nothing": (with_state(nested_blocksize=-1), "nested_blocksize -1"),
    "nested runs of a fraction": (with_state(nested_blocksize=256.0), "nested_blocksize 256.0"),
}


@pytest.mark.parametrize(("tensors", "said"), BROKEN.values(), ids=BROKEN)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, tensors: dict[str, torch.Tensor], said: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(said)) as refusal:
        folded(tmp_path, tensors)
    assert NAME in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_what_is_not_packed_stays_as_it_is(tmp_path: Path) -> None:
    plain: dict[str, Any] = {"model.norm.weight": torch.ones(3), "lm_head.weight": torch.ones(2, 3)}
    save_file(plain, tmp_path / "model.safetensors")
    entries = open_checkpoint(tmp_path).entries
    assert fold_bitsandbytes(entries, QUANTIZATION) == dict(entries)
