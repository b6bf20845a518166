"""transformers, imported without two things that it does as it is and that no model needs.

It makes a list of what its models' files have of the source of all of them, and makes it again as its package of models
is imported, where names only lack that package's own: a quarter of a second. And its losses import scipy, where that
is installed, for one function that training an object detector calls: another.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers import utils
from transformers.utils import import_utils

Listing = Mapping[frozenset[str], Mapping[str, set[str]]]
"""The names that can be imported, by what they need installed and by the module that has them."""

_PACKAGE = Path(transformers.__file__).parent / "models"
_PREFIX = "models."
_LOSSES = "transformers.loss."


def import_models() -> None:
    """Import transformers' package of models with the list that is there, if it wasn't imported before.

    A transformers that lists its models otherwise does so.
    """
    made: Any = getattr(import_utils, "define_import_structure", None)
    is_listed = getattr(made, "cache_info", None) is not None and made.cache_info().currsize == 1
    if "transformers.models" in sys.modules or not is_listed:
        return
    listing = models_alone(made(_PACKAGE, prefix=_PREFIX.removesuffix(".")))

    def define(path: str, prefix: str | None = None) -> Any:
        return listing if (Path(path), prefix) == (_PACKAGE / "__init__.py", None) else made(path, prefix)

    import_utils.define_import_structure = define
    try:
        import_module("transformers.models")
    finally:
        import_utils.define_import_structure = made


def models_alone(listing: Listing) -> Listing:
    """Return what ``listing`` has of the package of models, by names in it."""
    return {
        needed: {name.removeprefix(_PREFIX): found for name, found in modules.items() if name.startswith(_PREFIX)}
        for needed, modules in listing.items()
    }


def import_losses() -> None:
    """Import transformers' losses, if they weren't before: scipy is imported by the first call of its function there.

    They ask whether scipy is installed as they are imported, and are told that it isn't; afterwards, that it is.
    """
    is_installed: Any = getattr(utils, "is_scipy_available", None)
    is_there = "scipy.optimize" in sys.modules or f"{_LOSSES}loss_utils" in sys.modules
    if is_there or is_installed is None or not is_installed():
        return
    vars(utils)["is_scipy_available"] = lambda: False
    try:
        import_module(f"{_LOSSES}loss_utils")
    finally:
        vars(utils)["is_scipy_available"] = is_installed
        for name, module in list(sys.modules.items()):
            if name.startswith(_LOSSES) and hasattr(module, "is_scipy_available"):
                vars(module).update(is_scipy_available=is_installed, linear_sum_assignment=_assign)


def _assign(*args: Any, **kwargs: Any) -> Any:
    return import_module("scipy.optimize").linear_sum_assignment(*args, **kwargs)
