"""The types of a GGUF file's tensors that are served: how many values lie in how many bytes. Needs no numpy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """One of ggml's types: ``elements`` values of a row lie in ``bytes``; ``code`` is its number in a file."""

    code: int
    elements: int
    bytes: int


FORMATS: Mapping[str, BlockFormat] = {
    "f32": BlockFormat(0, 1, 4),
    "f16": BlockFormat(1, 1, 2),
    "bf16": BlockFormat(30, 1, 2),
    "q4_0": BlockFormat(2, 32, 18),
    "q4_1": BlockFormat(3, 32, 20),
    "q5_0": BlockFormat(6, 32, 22),
    "q5_1": BlockFormat(7, 32, 24),
    "q8_0": BlockFormat(8, 32, 34),
    "q4_k": BlockFormat(12, 256, 144),
    "q5_k": BlockFormat(13, 256, 176),
    "q6_k": BlockFormat(14, 256, 210),
    "q2_k": BlockFormat(10, 256, 84),
    "q3_k": BlockFormat(11, 256, 110),
    "iq1_s": BlockFormat(19, 256, 50),
    "iq1_m": BlockFormat(29, 256, 56),
    "iq2_xxs": BlockFormat(16, 256, 66),
    "iq2_xs": BlockFormat(17, 256, 74),
    "iq2_s": BlockFormat(22, 256, 82),
    "iq3_xxs": BlockFormat(18, 256, 98),
    "iq3_s": BlockFormat(21, 256, 110),
    "iq4_nl": BlockFormat(20, 32, 18),
    "iq4_xs": BlockFormat(23, 256, 136),
    "tq1_0": BlockFormat(34, 256, 54),
    "tq2_0": BlockFormat(35, 256, 66),
}
"""By the name that ggml gives them, in small letters."""

PLAIN = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}
"""Those that are plain values, and torch's names for them."""
