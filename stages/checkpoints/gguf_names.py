"""How the tensors of a GGUF file become a model's: transformers' name map, and what its loader changes back.

Which tensor of the file is which of the model's, transformers knows of the ``gguf`` package. What it does to the values
it does in code, a class for each architecture (``TensorProcessor``); each of these is known here by its name, as an
arrangement of rows that is undone while the tensor is unpacked. One that isn't known here is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.codecs.ggml_formats import PLAIN
from offstage.stages.checkpoints.codecs.gguf import AS_THEY_ARE, Arrangement
from offstage.stages.checkpoints.gguf_header import GgufHeader, GgufTensor

_STACKED = re.compile(r"(?P<name>.*\.ffn_(gate|down|up)_exps)\.weight")
_TRANSPOSED = re.compile(r"(attn_qkv|ffn_down|ffn_up|attn_output)\.weight")


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """One of the model's tensors: its ``shape``, the file's tensors that it is made of, how their rows lie in it."""

    shape: tuple[int, ...]
    sources: tuple[str, ...]
    arrangement: Arrangement = AS_THEY_ARE


def name_gguf_tensors(header: GgufHeader, config: Mapping[str, Any], model: Any) -> dict[str, NamedTensor]:
    """Return the tensors of ``model``, one without weights, that are in the file, by their names in the model.

    ``config`` is what transformers makes of the file's keys. A ``CheckpointError`` names an architecture that isn't
    served, and a tensor that doesn't fit.
    """
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
    arrange = _ARRANGEMENTS.get(processor.__name__)
    if arrange is None:
        raise CheckpointError(
            f"{header.file.path}: tensors of the architecture {header.architecture!r} are changed as they are loaded "
            f"({processor.__name__}), which isn't served; give the model as safetensors"
        )
    names = get_gguf_hf_weights_map(model, processor(config=dict(config)))
    if processor.__name__ == "GPT2TensorProcessor":
        names["output.weight"] = "lm_head.weight"
    stacked = processor.__name__ in _STACKING
    sources: dict[str, list[str]] = {}
    for source in sorted(header.tensors):  # the half of the gate comes before that of up
        matching = _STACKED.fullmatch(source) if stacked else None
        target = names.get(matching["name"] if matching else source)
        if target is not None:
            sources.setdefault(target, []).append(source)
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    return {
        target: _fitting(header, target, NamedTensor(shapes[target], tuple(made_of)), arrange, config)
        for target, made_of in sources.items()
        if target in shapes
    }


Arrange = Callable[[str, GgufTensor, Mapping[str, Any]], Arrangement]
"""From a tensor's name in the file, what it is there, and the model's config, to how its rows lie in the model."""


def _as_it_is(_name: str, _tensor: GgufTensor, _config: Mapping[str, Any]) -> Arrangement:
    return AS_THEY_ARE


def _halves_of_heads(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> Arrangement:
    """Llama's queries and keys: the file alternates between the two halves of each head."""
    heads, key_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    if heads is None or key_heads is None or not re.search(r"\.attn_[qk]\.", name):
        return AS_THEY_ARE
    count = int(heads if ".attn_q." in name else key_heads)
    return Arrangement(swapped=(count, tensor.shape[0] // max(1, count) // 2, 2, 1))


def _grouped_by_head(name: str, tensor: GgufTensor, config: Mapping[str, Any]) -> Arrangement:
    """Bloom's queries, keys and values: the file has all queries first, the model those of a head together."""
    heads = int(config["n_head"])
    return Arrangement(swapped=(1, 3, heads, tensor.shape[0] // 3 // heads)) if "attn_qkv" in name else AS_THEY_ARE


def _transposed(name: str, _tensor: GgufTensor, _config: Mapping[str, Any]) -> Arrangement:
    return Arrangement(transposed=_TRANSPOSED.search(name) is not None)


def _norms_from_zero(name: str, _tensor: GgufTensor, _config: Mapping[str, Any]) -> Arrangement:
    return Arrangement(less=1.0 if "norm.weight" in name else 0.0)


_ARRANGEMENTS: Mapping[str, Arrange] = {
    "TensorProcessor": _as_it_is, "T5TensorProcessor": _as_it_is, "Qwen2MoeTensorProcessor": _as_it_is,
    "MiniMaxM2TensorProcessor": _as_it_is, "LlamaTensorProcessor": _halves_of_heads,
    "BloomTensorProcessor": _grouped_by_head, "GPT2TensorProcessor": _transposed,
    "Gemma2TensorProcessor": _norms_from_zero, "NemotronTensorProcessor": _norms_from_zero,
}  # fmt: skip
_STACKING = ("Qwen2MoeTensorProcessor", "MiniMaxM2TensorProcessor")
"""Those that join the halves of the experts' first matrices."""


def _fitting(
    header: GgufHeader, target: str, named: NamedTensor, arrange: Arrange, config: Mapping[str, Any]
) -> NamedTensor:
    """Return ``named`` with its arrangement, if the file's tensors have the shape of the model's ``target``."""
    parts = [header.tensors[name] for name in named.sources]
    arrangement = arrange(named.sources[0], parts[0], config)
    if _is_stack(parts, named.shape) if len(parts) > 1 else _is_whole(parts[0], arrangement, named.shape):
        return NamedTensor(named.shape, named.sources, arrangement)
    shapes = " and ".join(f"{name!r} of shape {list(header.tensors[name].shape)}" for name in named.sources)
    raise CheckpointError(
        f"{header.file.path}: {shapes} can't be the model's {target!r} of shape {list(named.shape)}; get the file again"
    )


def _is_stack(parts: Sequence[GgufTensor], shape: tuple[int, ...]) -> bool:
    """Return whether each matrix of a stack of ``shape`` is rows of each of ``parts``, one after the other."""
    alike = {(len(part.shape), part.shape[:1], part.shape[2:]) for part in parts} == {(3, shape[:1], shape[2:])}
    return alike and len(shape) == 3 and sum(part.shape[1] for part in parts) == shape[1]


def _is_whole(part: GgufTensor, arrangement: Arrangement, shape: tuple[int, ...]) -> bool:
    """Return whether ``part`` has the ``shape`` of the model's tensor, but for dimensions of one.

    Elements of a vector change places one by one: it must be plain.
    """
    if arrangement.transposed:
        return part.shape == shape[::-1]
    if arrangement.swapped is not None and (
        math.prod(arrangement.swapped) != part.shape[0] or (len(part.shape) == 1 and part.kind not in PLAIN)
    ):
        return False
    return [size for size in part.shape if size > 1] == [size for size in shape if size > 1]
