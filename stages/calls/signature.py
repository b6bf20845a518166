"""Which arguments a model's forward takes, held against those that are given."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError, closest

_BESIDE = ("_mask", "token_type_ids")
"""How the names end of what tokenizers and processors make beside the main thing: not every model takes all of it."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The ``names`` that a forward takes, those that it must be given, and whether it takes any other name too."""

    names: tuple[str, ...]
    needed: tuple[str, ...]
    open: bool

    @classmethod
    def of(cls, model: nn.Module) -> Signature:
        """Return the signature of ``model``'s forward.

        The keyword arguments of a transformers model are options of its layers: a tensor among them would be passed
        over without a word. So it is open only where it names nothing itself.
        """
        given = [one for one in inspect.signature(model.forward).parameters.values() if one.name != "self"]
        plain = [one for one in given if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)]
        takes_any = any(one.kind == one.VAR_KEYWORD for one in given)
        return cls(
            names=tuple(one.name for one in plain),
            needed=tuple(one.name for one in plain if one.default is one.empty),
            open=takes_any and not (plain and hasattr(model, "config")),
        )

    def takes(self, name: str) -> bool:
        """Return whether the forward takes an argument of that ``name``."""
        return self.open or name in self.names


def fitted(
    model: nn.Module, arguments: Mapping[str, torch.Tensor], *, made: Iterable[str], key: str
) -> dict[str, torch.Tensor]:
    """Return ``arguments`` as ``model``'s forward takes them; a ``ConfigError`` about ``key`` where it doesn't.

    Those ``made`` by a tokenizer or a processor are left out where they are of the kind that not every model takes.
    Floating ones have the model's dtype.
    """
    signature, made = Signature.of(model), set(made)
    taken = {
        name: value
        for name, value in arguments.items()
        if signature.takes(name) or not (name in made and name.endswith(_BESIDE))
    }
    _check_names(model, signature, taken, key=key)
    dtype = _floating_dtype(model)
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in taken.items()}


def _check_names(model: nn.Module, signature: Signature, taken: Mapping[str, Any], *, key: str) -> None:
    kind, listed = type(model).__name__, ", ".join(signature.names)
    for name in taken:
        if not signature.takes(name):
            near = closest(name, signature.names)
            raise ConfigError(f"{key}: {kind}'s forward takes no {name!r}{near}; it takes {listed}")
    missing = [name for name in signature.needed if name not in taken]
    if missing:
        raise ConfigError(
            f"{key}: {kind}'s forward needs {', '.join(map(repr, missing))} too; give it in the file of forward.inputs"
        )


def _floating_dtype(model: nn.Module) -> torch.dtype:
    declared = getattr(model, "dtype", None)
    if isinstance(declared, torch.dtype):
        return declared
    return next((one.dtype for one in model.parameters() if one.is_floating_point()), torch.get_default_dtype())
