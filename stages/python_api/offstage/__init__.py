"""One name for Python users: ``import offstage`` has all that the stages' packages export.

It lies here and not at the top of the repository; the build puts it at the top, and an editable install puts this
folder on the import path. Nothing is listed here: a name that a package's stub gains is offstage's too. Importing it
imports none of torch; a name's first use does, if what it names needs that.
"""

from importlib import import_module
from typing import Any

_PACKAGES = ("stages.empty_init", "stages.plan", "stages.shard_load", "stages.dispatch", "stages.finetune")
_PACKAGE_OF = {name: package for package in _PACKAGES for name in import_module(package).__all__}

__all__ = sorted(_PACKAGE_OF)


def __getattr__(name: str) -> Any:
    """Return what one of the packages exports as ``name``, and keep it."""
    if name not in _PACKAGE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_PACKAGE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    """Return the names that the packages export."""
    return list(__all__)
