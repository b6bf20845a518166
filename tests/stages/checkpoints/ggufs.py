"""GGUF files for tests: whole ones made byte by byte, so that any byte can be wrong, and blocks with sound scales."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from stages.checkpoints.codecs.ggml_blocks import FORMATS

STRING, ARRAY, UINT32 = 8, 9, 4
HALVES = {
    "q4_0": (0,), "q4_1": (0, 2), "q5_0": (0,), "q5_1": (0, 2), "q8_0": (0,), "q4_k": (0, 2), "q5_k": (0, 2),
    "q6_k": (208,),
}  # fmt: skip
"""Where in a block of each format a float16 stands."""
KEYS = {"general.architecture": "llama"}


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
    for begin in HALVES[kind]:
        scales = (generator.standard_normal((count, 1)) * 0.01).astype(np.float16)
        blocks[:, begin : begin + 2] = scales.view(np.uint8)
    return blocks.reshape(rows, -1)


def dequantized(kind: str, packed: npt.NDArray[np.uint8]) -> npt.NDArray[Any]:
    """Return what the ``gguf`` package makes of rows of blocks, in float32."""
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    return np.ascontiguousarray(dequantize(packed, GGMLQuantizationType[kind.upper()]))


def settings(of: Mapping[str, str | int | Sequence[str]]) -> list[bytes]:
    return [key(name, value) for name, value in of.items()]
