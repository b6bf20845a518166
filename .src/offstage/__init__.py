"""One name for Python users: ``import offstage`` has all that the stages' packages export, and the errors.

The repository keeps ``pipeline``, ``stages`` and ``conf`` at its top. Here lie links to them, by which an editable
install, the tests and the type checker find them under the names that they are imported by; a wheel has the folders
themselves in their place. Nothing is listed here: a name that a package's stub gains is offstage's too. Importing it
imports none of that: a name's first use does.
"""

from functools import cache
from importlib import import_module, metadata
from typing import Any

_STAGES = ("empty_init", "plan", "shard_load", "dispatch", "finetune")


@cache
def _homes() -> dict[str, str]:
    """Return which module each name is of."""
    packages = [f"offstage.stages.{stage}" for stage in _STAGES]
    exported = [(name, package) for package in packages for name in import_module(package).__all__]
    errors = import_module("offstage.pipeline.errors")
    kinds = [
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, errors.OffstageError)
    ]
    return dict(exported) | dict.fromkeys(kinds, errors.__name__)


def __getattr__(name: str) -> Any:
    """Return what one of the packages exports as ``name``, and keep it."""
    if name == "__all__":
        return __dir__()
    value: Any
    if name == "__version__":
        value = metadata.version("offstage-pipeline")
    elif not name.startswith("__") and name in _homes():
        value = getattr(import_module(_homes()[name]), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names that the packages export."""
    return sorted(_homes())
