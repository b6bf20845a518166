"""The classes that a config names: looked up and checked before anything of them is called.

Hydra calls whatever a ``_target_`` names, a function that deletes files too, and what that returns is seen only
afterwards. A model is made of modules and of what configures them, so nothing else is called here.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra._internal.utils import _locate
from torch import nn
from transformers import PreTrainedConfig

from offstage.pipeline.errors import ConfigError, foreign
from offstage.pipeline.plain_data import walk

_LATE = "${"
"""An interpolation that is still there in a resolved config would be resolved after the check."""


def check_targets(arguments: Mapping[str, Any]) -> None:
    """Raise a ``ConfigError`` unless all that Hydra would call to build ``arguments`` may be called.

    That is a subclass of ``nn.Module``, and among the arguments of one also a transformers config or a dataclass.
    """
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    for place, value in walk(arguments, "model"):
        if isinstance(value, str) and _LATE in value:
            raise ConfigError(f"{place}: {value!r} is an interpolation that isn't resolved; give the value itself")
    for place, node in walk(arguments, "model"):
        if isinstance(node, Mapping) and "_target_" in node:
            module_class(str(node["_target_"]), f"{place}._target_", nested=node is not arguments)


def module_class(target: str, place: str, *, nested: bool = False) -> type[Any]:
    """Return the class that the dotted ``target`` names, if it is a module's; ``place`` is the key that names it.

    Its module is imported, which runs that module's code: who calls this trusts it.
    """
    with foreign(ConfigError, f"{place}: {target!r} can't be looked up"):
        located = _locate(target)  # as Hydra does when it calls it
    if not isinstance(located, type) or not (issubclass(located, nn.Module) or (nested and _configures(located))):
        raise ConfigError(
            f"{place}: {target!r} is no subclass of torch.nn.Module, and nothing else is called; give such a class"
        )
    return located


def _configures(kind: type[Any]) -> bool:
    return issubclass(kind, PreTrainedConfig) or dataclasses.is_dataclass(kind)
