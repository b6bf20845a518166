"""A GGUF file of a real size, made of a Llama checkpoint with the ``gguf`` package's own quantiser, and its twin."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import torch
from gguf.quants import dequantize, quant_shape_to_byte_shape, quantize
from transformers import AutoConfig
from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

from tests.benchmarks.checkpoints import INDEX, Named, copy_beside, save_shards, tensors_of

KIND = gguf.GGMLQuantizationType.Q8_0
PLAIN = gguf.GGMLQuantizationType.F32
_ARCHITECTURE = "llama"


def make_gguf(source: Path, folder: Path) -> Path:
    """Write the Llama checkpoint ``source`` into a file in ``folder`` unless it is there; return the file.

    Matrices are of Q8_0, 8.5 bits a value, vectors of float32. There is no tokenizer in it.
    """
    path = folder / "model.gguf"
    if path.exists():
        return path
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    config = AutoConfig.from_pretrained(source)
    writer = gguf.GGUFWriter(unfinished, _ARCHITECTURE)
    _tell(writer, config)
    writer.add_tokenizer_model("no_vocab")  # llama.cpp wants to be told
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in tensors_of(source):
        kind, shape = _kind_of(tensor), tuple(tensor.shape)
        rested = quant_shape_to_byte_shape(shape, kind) if kind == KIND else shape
        item = np.dtype(np.uint8 if kind == KIND else np.float32)
        gguf_name = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        writer.add_tensor_info(gguf_name, rested, item, int(np.prod(rested)) * item.itemsize, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, tensor in tensors_of(source):
        values = _permute(name, tensor.float().numpy(), config)
        writer.write_tensor_data(quantize(values, _kind_of(tensor)))
    writer.close()
    unfinished.rename(path)
    return path


def unpack_gguf(source: Path, folder: Path) -> Path:
    """Write what the ``gguf`` package unpacks of the checkpoint ``source`` once it is quantised into ``folder``."""
    if (folder / INDEX).exists():
        return folder

    def unpacked() -> Named:
        for name, tensor in tensors_of(source):
            kind = _kind_of(tensor)
            values = dequantize(quantize(tensor.float().numpy(), kind), kind)
            yield name, torch.from_numpy(values).bfloat16()

    copy_beside(source, folder)
    save_shards(unpacked(), folder)
    return folder


def _tell(writer: Any, config: Any) -> None:
    """Write what the config says under the names that transformers reads it by."""
    for name, attribute in GGUF_CONFIG_MAPPING[_ARCHITECTURE].items():
        value = getattr(config, attribute, None) if attribute else None
        if isinstance(value, int):
            writer.add_uint32(f"{_ARCHITECTURE}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{_ARCHITECTURE}.{name}", value)


def _kind_of(tensor: torch.Tensor) -> gguf.GGMLQuantizationType:
    return KIND if tensor.dim() > 1 else PLAIN


def _permute(name: str, values: npt.NDArray[np.float32], config: Any) -> npt.NDArray[np.float32]:
    """Return ``values`` with the halves of each head's rows in turn, where a Llama's file has them so."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return values
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(values.shape))
