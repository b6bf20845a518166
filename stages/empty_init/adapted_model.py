"""A model with an adapter: peft's own modules around those that it adapts, and the same model as it is without them.

What an adapter computes is peft's, so that it is bit for bit what peft gives. What is ours is that nothing of it is
made in memory: the modules are put in on meta, and their weights come from the adapter's own file as the checkpoint's
do. These are loaded into a view of the model without the adapter, where every name is the one that they have there.
"""

from __future__ import annotations

import copy
import logging
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from offstage.pipeline.errors import CheckpointError, ConfigError, OffstageError, foreign
from offstage.stages.checkpoints.adapters import ADAPTER, CONFIG, read_settings, told_model
from offstage.stages.checkpoints.bounds import bounded_in_time

_log = logging.getLogger(__name__)

_REPLACEMENT = f"modules_to_save.{ADAPTER}"
"""Where peft has the module that replaces another one whole."""

_WITHIN = re.compile(rf"(\.modules_to_save)?\.{ADAPTER}(?=\.|$)|(?<=lora_magnitude_vector\.{ADAPTER})\.weight$")
"""What the name of an adapter's tensor has in a model and doesn't have in its file."""

_INJECTION_SECONDS = 2.0
_MODULE_SECONDS = 0.01
"""Of processor time for each module of the model, beside: peft takes a tenth of it."""
_SIMPLER = "as no adapter's does; make its patterns simpler, or its lists of names shorter"


@dataclass(frozen=True, slots=True)
class Unadapted:
    """An adapted model as it is without its adapter.

    ``model`` has the modules that it had before, and they hold their tensors in the same tables as the adapted model's:
    what is put into one is in the other. ``names`` maps each tensor's name in it to that in the adapted model.
    ``added`` maps the names that the adapter's tensors have in its file, without peft's prefix, to those in the model.
    """

    model: nn.Module
    names: Mapping[str, str]
    added: Mapping[str, str]


def add_adapter(model: nn.Module, folder: Path) -> None:
    """Put the modules of the adapter in ``folder`` into ``model``, their parameters on meta and in float32.

    That is the dtype that peft computes an adapter in, whatever the model's. A ``CheckpointError`` where it has no
    place in this model.
    """
    settings = read_settings(folder)
    _log.info("%s: says that it is for %s", folder / CONFIG, told_model(folder))
    with foreign(CheckpointError, f"{folder / CONFIG}: it is no adapter of {type(model).__name__}"):
        _inject(model, {**settings, "inference_mode": True}, about=str(folder / CONFIG), kind=CheckpointError)
    _drop_replaced(model)


def add_new_adapter(model: nn.Module, settings: Mapping[str, Any], *, key: str) -> None:
    """Put the modules of an adapter into ``model`` that has no weights yet: they are on meta and in float32.

    ``settings`` are arguments of peft's ``LoraConfig``. A ``ConfigError`` about ``key`` where it has no place there.
    """
    with foreign(ConfigError, f"{key}: it has no place in {type(model).__name__}"):
        _inject(model, {**settings, "inference_mode": False}, about=key, kind=ConfigError)


def _inject(model: nn.Module, settings: Mapping[str, Any], *, about: str, kind: type[OffstageError]) -> None:
    """Have peft put its modules in. It holds all names of ``model`` against those of ``settings``: a pattern among them
    may be one that has no end, and there may be any number.
    """
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import cast_adapter_dtype

    seconds = _INJECTION_SECONDS + _MODULE_SECONDS * sum(1 for _ in model.modules())
    bound = bounded_in_time(f"{about}: finding its modules", seconds, as_none_does=_SIMPLER, kind=kind)
    with bound, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that a GPT-2's weights are transposed, say, which peft then heeds
        inject_adapter_in_model(LoraConfig(**settings), model, adapter_name=ADAPTER, low_cpu_mem_usage=True)
        cast_adapter_dtype(model, ADAPTER)


def _drop_replaced(model: nn.Module) -> None:
    """Take out of ``model`` the modules that the adapter replaces whole, but for those whose tensors others use too."""
    from peft.utils.other import ModulesToSaveWrapper

    uses: dict[int, int] = {}
    for _, parameter in model.named_parameters(remove_duplicate=False):
        uses[id(parameter)] = uses.get(id(parameter), 0) + 1
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper) and all(
            uses[id(parameter)] == 1 for parameter in module.original_module.parameters()
        ):
            module.original_module = nn.Identity()


def without_adapter(model: nn.Module) -> Unadapted:
    """Return ``model``, which has an adapter, as it is without."""
    names: dict[str, str] = {}
    plain = _unwrapped(model, "", "", names)
    own = set(names.values())
    added = {
        _WITHIN.sub("", name): name for name, _ in model.named_parameters(remove_duplicate=False) if name not in own
    }
    return Unadapted(plain, names, added)


def _unwrapped(module: nn.Module, prefix: str, within: str, names: dict[str, str]) -> nn.Module:
    """Return ``module`` without the adapter's, and note in ``names`` what its tensors are called without and with it.

    ``prefix`` and ``within`` are what the names in it begin with, in the one model and in the other.
    """
    step = _step_within(module)
    if step is not None:  # what replaces a module whole has its names and shapes, and is still the adapter's
        noted = {} if step == _REPLACEMENT else names
        return _unwrapped(module.get_submodule(step), prefix, f"{within}{step}.", noted)
    for name in (*module._parameters, *module._buffers):
        names[prefix + name] = within + name
    children = {
        name: child if child is None else _unwrapped(child, f"{prefix}{name}.", f"{within}{name}.", names)
        for name, child in module._modules.items()
    }
    if all(children[name] is child for name, child in module._modules.items()):
        return module
    twin = copy.copy(module)
    twin._modules = children
    return twin


def _step_within(module: nn.Module) -> str | None:
    """Return the name, in ``module`` of peft's, of the module that it stands in the place of; null for any other."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import ModulesToSaveWrapper

    if isinstance(module, ModulesToSaveWrapper):
        has_own = any(True for _ in module.original_module.parameters())
        return "original_module" if has_own else _REPLACEMENT
    return "base_layer" if isinstance(module, BaseTunerLayer) else None
