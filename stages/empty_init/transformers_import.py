"""transformers' package of models, imported without what takes half a second and that no model needs.

transformers makes a list of what its models' files have, of the source of all of them, and makes it again as its
package of models is imported, where names only lack that package's own. Every model's module imports the losses of
all, and those of object detection scipy's optimizers, of which they call one.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import transformers
from transformers.utils import import_utils

Listing = Mapping[frozenset[str], Mapping[str, set[str]]]
"""The names that can be imported, by what they need installed and by the module that has them."""

_PACKAGE = Path(transformers.__file__).parent / "models"
_PREFIX = "models."
_LOSSES, _OPTIMIZERS = "transformers.loss.loss_utils", "scipy.optimize"


def import_models() -> None:
    """Import transformers' package of models with the list that is there, and its losses without scipy's optimizers,
    if they weren't imported before.

    A transformers that does otherwise is left to it.
    """
    _import_listed()
    _import_losses()


def _import_listed() -> None:
    listing_of: Any = getattr(import_utils, "define_import_structure", None)
    is_listed = getattr(listing_of, "cache_info", None) is not None and listing_of.cache_info().currsize == 1
    if "transformers.models" in sys.modules or not is_listed:
        return
    listing = models_alone(listing_of(_PACKAGE, prefix=_PREFIX.removesuffix(".")))

    def define(path: str, prefix: str | None = None) -> Any:
        return listing if (Path(path), prefix) == (_PACKAGE / "__init__.py", None) else listing_of(path, prefix)

    import_utils.define_import_structure = define
    try:
        import_module("transformers.models")
    finally:
        import_utils.define_import_structure = listing_of


def _import_losses() -> None:
    """Import the losses with a stand-in for scipy's optimizers, which are imported as a loss calls one."""
    if {_LOSSES, _OPTIMIZERS} & sys.modules.keys() or not import_utils.is_scipy_available():
        return
    stand_in: Any = ModuleType(_OPTIMIZERS)
    stand_in.linear_sum_assignment = _linear_sum_assignment
    sys.modules[_OPTIMIZERS] = stand_in
    try:
        with suppress(ImportError):
            import_module(_LOSSES)
    finally:
        del sys.modules[_OPTIMIZERS]


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    return import_module(_OPTIMIZERS).linear_sum_assignment(*args, **kwargs)


def models_alone(listing: Listing) -> Listing:
    """Return what ``listing`` has of the package of models, by names in it."""
    return {
        needed: {name.removeprefix(_PREFIX): members for name, members in modules.items() if name.startswith(_PREFIX)}
        for needed, modules in listing.items()
    }
