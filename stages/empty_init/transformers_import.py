"""transformers' package of models, imported without what takes a quarter of a second and that no model needs.

transformers makes a list of what its models' files have, of the source of all of them, and makes it again as its
package of models is imported, where names only lack that package's own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import transformers
from transformers.utils import import_utils

Listing = Mapping[frozenset[str], Mapping[str, set[str]]]
"""The names that can be imported, by what they need installed and by the module that has them."""

_PACKAGE = Path(transformers.__file__).parent / "models"
_PREFIX = "models."


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
