"""GGUF files for tests: whole ones made byte by byte, so that any byte can be wrong, and blocks with sound scales."""

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from offstage.stages.checkpoints.codecs.ggml_formats import FORMATS

STRING, ARRAY, UINT32 = 8, 9, 4
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2),
    "q6_k": (208,), "q2_k": (80, 82), "q3_k": (108,), "tq1_0": (52,), "tq2_0": (64,), "iq1_m": (),
}  # fmt: skip
"""Where in a block of each format a float16 stands."""
KEYS = {"general.architecture": "llama"}
WrittenTensor = tuple[str, str, npt.NDArray[Any]]


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def key(name: str, value: str | int | Sequence[str]) -> bytes:
    if isinstance(value, int):
        return text(name) + struct.pack("<II", UINT32, value)
    if isinstance(value, str):
        return text(name) + struct.pack("<I", STRING) + text(value)
    return text(name) + struct.pack("<IIQ", ARRAY, STRING, len(value)) + b"".join(map(text, value))


def tensor(name: str, sizes: Sequence[int], *, code: int = 0, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, code, offset)


def raw_gguf(
    tensors: Sequence[bytes],
    keys: Sequence[bytes] | None = None,
    data: bytes = b"",
    *,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    """Return a file of these parts; ``counts`` (tensors, keys) are what it says of them if not the truth."""
    entries = [key(name, value) for name, value in KEYS.items()] if keys is None else keys
    said = counts or (len(tensors), len(entries))
    head = b"GGUF" + struct.pack("<IQQ", version, *said) + b"".join(entries) + b"".join(tensors)
    return head + bytes(-len(head) % 32) + data


def random_blocks(kind: str, rows: int, columns: int, *, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Return ``rows`` of blocks of ``kind``, as bytes, with ``columns`` values each, all of them finite."""
    form, generator = FORMATS[kind], np.random.default_rng(seed)
    if form.elements == 1:
        values = generator.standard_normal((rows, columns)).astype(np.float32)
        if kind == "bf16":
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.astype(np.float16 if kind == "f16" else np.float32).view(np.uint8)
    count = rows * columns // form.elements
    blocks = generator.integers(0, 256, (count, form.bytes), dtype=np.uint8)
    for begin in HALVES.get(kind, (0,)):
        scales = (generator.standard_normal((count, 1)) * 0.01).astype(np.float16)
        blocks[:, begin : begin + 2] = scales.view(np.uint8)
    if kind == "iq1_m":  # whose float16 lies in the upper four bits of four numbers: a small one here
        blocks[:, 49::2] &= 15
        blocks[:, 55] |= 0x10
    return blocks.reshape(rows, -1)


def dequantized(kind: str, packed: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return what the ``gguf`` package makes of rows of blocks, in float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.ascontiguousarray(dequantize(packed, GGMLQuantizationType[kind.upper()]))


def settings(of: Mapping[str, str | int | Sequence[str]]) -> list[bytes]:
    return [key(name, value) for name, value in of.items()]


def make_gguf(path: Any, architecture: str, config: Any, *, kinds: Sequence[str], tokens: int = 0) -> Any:
    """Write the file of a model of random weights, as the ``gguf`` package writes one, and return ``path``.

    Matrices are of ``kinds`` in turn, of those that their rows are whole blocks of; vectors are of float32. With
    ``tokens`` the file has a tokenizer of so many: bytes, a few merges, and what ends a text.
    """
    import gguf
    import torch
    import transformers

    writer = _begun(path, architecture, config, tokens)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    named = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    turn = 0
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        for gguf_name, shape in _names_in_file(name, tuple(tensor.shape), named):
            fitting = [kind for kind in kinds if shape[-1] % FORMATS[kind].elements == 0]
            kind = fitting[turn % len(fitting)] if len(shape) > 1 else "f32"
            turn += len(shape) > 1
            rows = random_blocks(kind, int(np.prod(shape[:-1])), shape[-1], seed=turn)
            packed = rows.reshape(*shape[:-1], -1)
            writer.add_tensor(
                gguf_name, packed, raw_shape=packed.shape, raw_dtype=gguf.GGMLQuantizationType[kind.upper()]
            )
    writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))  # which no model of transformers has
    return _ended(writer, path)


def write_gguf(path: Any, architecture: str, config: Any, tensors: Iterable[WrittenTensor], *, tokens: int = 0) -> Any:
    """Write the file of a model of ``tensors``: name, kind, and float32 values, which the ``gguf`` package quantises,
    or their blocks.
    """
    import gguf

    writer = _begun(path, architecture, config, tokens)
    for name, kind, values in tensors:
        dtype = gguf.GGMLQuantizationType[kind.upper()]
        blocks = values if values.dtype == np.uint8 else gguf.quants.quantize(values, dtype)
        writer.add_tensor(name, blocks, raw_dtype=dtype)
    return _ended(writer, path)


def _begun(path: Any, architecture: str, config: Any, tokens: int) -> Any:
    import gguf
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    writer = gguf.GGUFWriter(path, architecture)
    writer.add_string("general.name", "of tests")
    for name, attribute in GGUF_CONFIG_MAPPING[architecture.replace("moe", "_moe")].items():
        value = getattr(config, attribute, None) if attribute else None
        if isinstance(value, int):
            writer.add_uint32(f"{architecture}.{name}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{name}", value)
    if tokens:
        _write_tokenizer(writer, tokens)
    return writer


def _ended(writer: Any, path: Any) -> Any:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _names_in_file(name: str, shape: tuple[int, ...], named: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return what a tensor of the model is called in a file, with its shape there; what is joined comes in halves."""
    if name.endswith("experts.gate_up_proj"):
        layer, half = name.split(".")[2], (shape[0], shape[1] // 2, *shape[2:])
        return [(f"blk.{layer}.ffn_{which}_exps.weight", half) for which in ("gate", "up")]
    bare, suffix = name.rpartition(".")[::2] if name.endswith((".weight", ".bias")) else (name, "weight")
    gguf_name = named.get_name(bare) or named.get_name(bare.removeprefix("transformer."))
    if name.endswith("shared_expert_gate.weight"):
        shape = shape[-1:]
    if name.startswith("transformer.h.") and "c_" in name:  # GPT-2's, whose matrices are the other way round
        shape = tuple(reversed(shape))
    return [(f"{gguf_name}.{suffix}", shape)]


def _write_tokenizer(writer: Any, count: int) -> None:
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    letters = list(bytes_to_unicode().values())
    merges = [(a, b) for a in "aeiou" for b in "nrst"]
    texts = ["<|end|>", *letters, *(a + b for a, b in merges)]
    texts += [f"<|{index}|>" for index in range(len(texts), count)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(texts)
    writer.add_token_types([3 if text.startswith("<|") and len(text) > 2 else 1 for text in texts])
    writer.add_token_merges([f"{a} {b}" for a, b in merges])
    writer.add_eos_token_id(0)
    writer.add_bos_token_id(0)
