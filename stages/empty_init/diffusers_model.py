"""Models of diffusers, built without their weights: the parts of a pipeline, each in a folder with its own config.

Such a config names its class (``_class_name``) and has the arguments of its constructor. A whole pipeline isn't a
model: its ``model_index.json`` lists the folders of those that it is made of.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import CheckpointError, ConfigError, closest, errors_alone, foreign
from offstage.stages.empty_init.config_limits import check_numbers
from offstage.stages.empty_init.init import init_empty_weights


def build_diffusers(folder: Path, config: Mapping[str, Any], dtype: torch.dtype) -> nn.Module:
    """Return the model that ``config``, of ``folder``, describes: parameters on meta, in ``dtype``.

    Those that the class declares so are in float32, as diffusers has them.
    """
    from diffusers.utils import logging

    check_numbers(folder / "config.json", config)
    model_class = _model_class(folder, str(config["_class_name"]))
    building = foreign(CheckpointError, f"{folder / 'config.json'}: no model can be built from it")
    with errors_alone(logging), building, init_empty_weights():
        model: nn.Module = model_class.from_config(dict(config)).to(dtype)
    in_float32 = set(getattr(model, "_keep_in_fp32_modules", None) or ())
    for name, parameter in model.named_parameters():
        if in_float32 & set(name.split(".")):
            parameter.data = parameter.data.float()
    return model


def _model_class(folder: Path, name: str) -> Any:
    """Return the class of diffusers that is called ``name``; nothing else that diffusers has is taken."""
    import diffusers

    with foreign(ConfigError, f"{folder / 'config.json'}: _class_name: {name!r} can't be had of diffusers"):
        candidate = getattr(diffusers, name, None) if name.isidentifier() else None
    if not (isinstance(candidate, type) and issubclass(candidate, diffusers.ModelMixin)):
        raise CheckpointError(
            f"{folder / 'config.json'}: _class_name: {name!r} is no model of diffusers {diffusers.__version__}"
            f"{closest(name, [one for one in dir(diffusers) if 'Model' in one])}; install a version that has it"
        )
    return candidate
