"""How a config declares integers in groups: those of GPTQ, and those of AWQ. Needs no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offstage.pipeline.errors import CheckpointError

GPTQ, AWQ = "gptq", "awq"
_BITS: Mapping[str, tuple[int, ...]] = {GPTQ: (2, 3, 4, 8), AWQ: (4,)}
_FORMATS: Mapping[str, tuple[str, ...]] = {GPTQ: ("gptq", "gptq_v2"), AWQ: ("gemm",)}
_FORMAT_KEYS: Mapping[str, tuple[str, ...]] = {GPTQ: ("checkpoint_format", "format"), AWQ: ("version", "format")}


@dataclass(frozen=True, slots=True)
class GroupedScheme:
    """Each packed weight rests in so many ``bits``, a scale and a zero for each ``group`` of inputs (null: all).

    Zeros may be ``less_one`` than they mean. Inputs that are ``reordered`` have their groups in any order.
    """

    method: str
    bits: int
    group: int | None
    less_one: bool
    reordered: bool


def grouped_scheme(quantization: Mapping[str, object]) -> GroupedScheme:
    """Return the one scheme that ``quantization`` declares, of GPTQ or of AWQ.

    A ``CheckpointError`` names the key and the value of what isn't served. Who knows the config's path says it before.
    """
    method = str(quantization.get("quant_method"))
    bits = quantization.get("bits", quantization.get("w_bit", 4 if method == AWQ else None))
    if type(bits) is not int or bits not in _BITS[method]:
        raise _unserved(method, "bits", bits)
    size = quantization.get("group_size", quantization.get("q_group_size", 128))
    if type(size) is not int or (size != -1 and size <= 0):
        raise _unserved(method, "group_size", size)
    key = next((key for key in _FORMAT_KEYS[method] if quantization.get(key)), "format")
    form = str(quantization.get(key) or _FORMATS[method][0]).lower()
    if form not in _FORMATS[method]:
        raise _unserved(method, key, form)
    _check_options(method, quantization)
    group, reordered = (None if size == -1 else size), bool(quantization.get("desc_act"))
    return GroupedScheme(method, bits, group, form == "gptq", method == GPTQ and reordered)


def left_out(quantization: Mapping[str, object]) -> list[str]:
    """Return the patterns of modules that ``dynamic``, the config's, leaves as they are."""
    dynamic = quantization.get("dynamic")
    return [str(key).removeprefix("-:") for key in dynamic] if isinstance(dynamic, Mapping) else []


def _check_options(method: str, quantization: Mapping[str, object]) -> None:
    """Refuse what has weights lie otherwise than the rest of the config says."""
    dynamic = quantization.get("dynamic")
    wrong = {
        "is_marlin_format": bool(quantization.get("is_marlin_format")),
        "pack_dtype": str(quantization.get("pack_dtype") or "int32").removeprefix("torch.") != "int32",
        "zero_point": method == AWQ and quantization.get("zero_point", True) is not True,
        "backend": method == AWQ and quantization.get("backend") == "llm-awq",
        "dynamic": bool(dynamic)
        and not (isinstance(dynamic, Mapping) and all(str(key).startswith("-:") for key in dynamic)),
    }
    key = next((key for key, is_wrong in wrong.items() if is_wrong), None)
    if key is not None:
        raise _unserved(method, key, quantization.get(key))


def _unserved(method: str, key: str, value: object) -> CheckpointError:
    served = {
        GPTQ: "2, 3, 4 or 8 bits alike for all weights, checkpoint_format gptq or gptq_v2",
        AWQ: "4 bits with zero points, version gemm",
    }
    return CheckpointError(
        f"quantised weights (quant_method: {method!r}) that aren't served ({key}: {str(value)[:80]}); served are "
        f"{served[method]}, group_size above 0 or -1; give such a checkpoint, or one in its original dtype"
    )
