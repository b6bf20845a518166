"""Which modules a config means by the names that it leaves out."""

from __future__ import annotations

from typing import Any

import pytest

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.converted_modules import converted_modules

UP, GATE, HEAD = "model.layers.0.mlp.up_proj", "model.layers.0.mlp.gate", "lm_head"
EXPERT = "model.layers.11.mlp.experts.3.gate_proj"


def meant(quantization: dict[str, Any], *names: str) -> list[str]:
    converts = converted_modules(quantization, [HEAD])
    return [name for name in names if converts({name}, "Linear")]


def compressed(**fields: Any) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", **fields}


@pytest.mark.parametrize(
    ("quantization", "wanted"),
    [
        ({"quant_method": "fp8"}, [UP, GATE, EXPERT]),
        ({"quant_method": "fp8", "modules_to_not_convert": None}, [UP, GATE, EXPERT]),
        ({"quant_method": "fp8", "modules_to_not_convert": []}, [UP, GATE, HEAD, EXPERT]),
        ({"quant_method": "fp8", "modules_to_not_convert": ["lm_head", "mlp.gate"]}, [UP, EXPERT]),
        ({"quant_method": "fp8", "ignored_layers": ["model.layers.1"]}, [UP, GATE, HEAD, EXPERT]),
        ({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.mlp.gate", "lm_head"]}, [UP, EXPERT]),
        ({"quant_method": "bitsandbytes", "llm_int8_skip_modules": ["model.layers.0"]}, [HEAD, EXPERT]),
        (compressed(ignore=["lm_head", "re:.*mlp.gate$"]), [UP, EXPERT]),
        (compressed(ignore=["Linear"]), []),
        (compressed(config_groups={"group_0": {"targets": ["re:.*experts.*"]}}), [EXPERT]),
        (compressed(config_groups={"a": {"targets": [UP]}, "b": {"targets": [HEAD]}}, ignore=None), [UP, HEAD]),
    ],
)
def test_what_is_left_out_is_named_by_each_methods_own_rule(quantization: dict[str, Any], wanted: list[str]) -> None:
    assert meant(quantization, UP, GATE, HEAD, EXPERT) == wanted


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({"quant_method": "fp8", "modules_to_not_convert": ["("]}, r"modules_to_not_convert: '\(' is no pattern"),
        ({"quant_method": "fp8", "modules_to_not_convert": [3]}, "a list of names of modules belongs here"),
        (compressed(ignore="lm_head"), "ignore 'lm_head': a list of names of modules belongs here"),
        (compressed(ignore=["re:["]), r"ignore: '\[' is no pattern"),
    ],
)
def test_names_that_mean_nothing_are_refused(quantization: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        meant(quantization, UP)
