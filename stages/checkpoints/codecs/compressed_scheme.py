"""What a config of the library compressed-tensors says of a checkpoint's weights. Needs no torch.

All weights of a checkpoint must be of one scheme: of several, transformers takes the first for every plain layer, and
so its answer would be no guide. What activations are rounded to is for kernels that multiply packed numbers;
transformers leaves it out where it dequantises, and so does offstage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from offstage.pipeline.errors import CheckpointError

if TYPE_CHECKING:
    from offstage.stages.checkpoints.codecs.scaled_codes import Codes

Strategy = Literal["tensor", "channel", "group", "tensor_group", "block"]

_CODES: Mapping[tuple[str, str, int], Codes] = {
    ("float-quantized", "float", 8): "fp8",
    ("naive-quantized", "float", 8): "fp8",
    ("naive-quantized", "int", 8): "int8",
    ("int-quantized", "int", 8): "int8",
    ("pack-quantized", "int", 4): "int4",
    ("nvfp4-pack-quantized", "float", 4): "fp4",
    ("mxfp4-pack-quantized", "float", 4): "fp4",
}
"""The formats that are served, each with the type and the bits of its numbers."""

_STRATEGIES: Mapping[str, Strategy] = {
    "tensor": "tensor", "channel": "channel", "group": "group", "tensor_group": "tensor_group", "block": "block",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """How each packed weight rests: as which codes, and how many of them, ``rows`` by ``columns``, share a scale.

    Null is all that there are.
    """

    codes: Codes
    rows: int | None
    columns: int | None
    strategy: Strategy

    def block_of(self, rows: int, columns: int) -> tuple[int, int]:
        """Return how many rows and columns of a matrix of this size share a scale."""
        return (rows if self.rows is None else self.rows), (columns if self.columns is None else self.columns)


def weight_scheme(quantization: Mapping[str, object]) -> WeightScheme:
    """Return the one scheme of weights that ``quantization`` declares.

    A ``CheckpointError`` names what isn't served: a format, several schemes, zero points, an order of activations,
    sparsity, rotations. Who knows the config's path says it before.
    """
    for key in ("sparsity_config", "transform_config"):
        if _has_content(quantization.get(key)):
            raise _unserved(key, quantization[key])
    groups = quantization.get("config_groups")
    schemes = [_of_group(group, quantization) for group in groups.values()] if isinstance(groups, Mapping) else []
    if len(set(schemes)) != 1:
        raise _unserved("config_groups", f"{len(set(schemes))} schemes of weights, where one is served")
    return schemes[0]


def _has_content(value: object) -> bool:
    """Return whether ``value`` says anything beside that nothing is done."""
    entries = dict(value) if isinstance(value, Mapping) else {"": value} if value else {}
    return any(
        entry not in (None, {}, [], "dense") for key, entry in entries.items() if key != "registry_requires_subclass"
    )


def _of_group(group: object, quantization: Mapping[str, object]) -> WeightScheme:
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(group, Mapping) or not isinstance(weights, Mapping):
        raise _unserved("weights", weights)
    form = str(group.get("format") or quantization.get("format"))
    codes = _CODES.get((form, str(weights.get("type")), _count(weights.get("num_bits")) or 0))
    if codes is None:
        raise _unserved("format", f"{form} of {weights.get('num_bits')} bits, {weights.get('type')}")
    if weights.get("symmetric", True) is not True:
        raise _unserved("format", f"{form} with zero points (symmetric: false)")
    if weights.get("actorder") not in (None, False, "weight", "static"):
        raise _unserved("actorder", weights["actorder"])
    return _scheme(codes, weights)


def _scheme(codes: Codes, weights: Mapping[str, object]) -> WeightScheme:
    strategy = _STRATEGIES.get(str(weights.get("strategy")))
    group = _count(weights.get("group_size"))
    match strategy, weights.get("block_structure"):
        case "tensor", _:
            return WeightScheme(codes, None, None, "tensor")
        case "channel", _:
            return WeightScheme(codes, 1, None, "channel")
        case ("group" | "tensor_group") as grouped, _ if group:
            return WeightScheme(codes, 1, group, grouped)
        case "block", [rows, columns] if _count(rows) and _count(columns):
            return WeightScheme(codes, _count(rows), _count(columns), "block")
    raise _unserved("strategy", weights.get("strategy"))


def _count(value: object) -> int | None:
    """Return ``value`` if it is a number above 0, else null."""
    return value if type(value) is int and value > 0 else None


def _unserved(key: str, value: object) -> CheckpointError:
    served = ", ".join(sorted({form for form, _, _ in _CODES}))
    return CheckpointError(
        f"quantised weights (quant_method: 'compressed-tensors') that aren't served ({key}: {str(value)[:80]}); served "
        f"are those of one scheme without zero points: {served}; give such a checkpoint, or one in its original dtype"
    )
