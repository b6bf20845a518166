"""Packages that are imported as soon as something of them is used, and not before.

transformers and fake tensors import ``torch._dynamo`` for what a compiler alone heeds (marks on functions, what a
tensor is named by), and transformers ``scipy.optimize`` for the loss of a few detectors. To import both takes more than
half as long as to import torch, and a rehearsal needs neither. So a module without content stands in the place of each,
and becomes the package for whoever asks it for more than is known of it here. What was marked until then is marked
then: before there is a compiler nothing is compiled.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from functools import partial, wraps
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, NamedTuple

COMPILER = "torch._dynamo"
_SOLVERS = "scipy.optimize"
_SOURCES = f"{COMPILER}.source"
"""The compiler's module of what tensors are named by: it needs all others."""
_ALONE = (f"{COMPILER}.config", f"{COMPILER}._trace_wrapped_higher_order_op")
"""The modules of the compiler that are imported for a rehearsal, and need no other."""
_MARKED = "__marked__"
"""Under which name a stand-in has what is to be marked."""
_lock = threading.RLock()


class _LatePackage(ModuleType):
    """What stands in the place of a module that isn't imported yet."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            _import(self.__name__)
            if is_imported(self.__name__):
                return getattr(sys.modules[self.__name__], name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


class _Submodules(MetaPathFinder):
    """Has a package imported before one of its modules that needs the others."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> ModuleSpec | None:
        package = name.rpartition(".")[0]
        if name in (*_ALONE, _SOURCES) or not isinstance(sys.modules.get(package), _LatePackage):
            return None
        _import(package)
        return ModuleSpec(name, _Imported(sys.modules[name])) if name in sys.modules else None


class _Imported(Loader):
    """Loads a module that was imported while it was looked for: it stays as it is."""

    def __init__(self, module: ModuleType) -> None:
        self._module, self._spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec


class _Source(NamedTuple):
    """What a fake tensor is named by, where no compiler reads it."""

    name: str


def postpone_imports() -> None:
    """Put stand-ins in the places of the packages that aren't imported yet."""
    marks = {name: partial(_mark, name) for name in ("allow_in_graph", "assume_constant_result")}
    _postpone(_SOLVERS, {"linear_sum_assignment": _linear_sum_assignment})
    if _postpone(COMPILER, {"disable": _disable, **marks}):
        _postpone(_SOURCES, {"ConstantSource": _Source, "RandomValueSource": _Source})
        for name in _ALONE:
            import_module(name)


def is_imported(name: str) -> bool:
    """Return whether the module ``name`` is imported: a stand-in isn't it."""
    return name in sys.modules and not isinstance(sys.modules[name], _LatePackage)


def _postpone(name: str, known: Mapping[str, Callable[..., Any]]) -> bool:
    """Put a stand-in that has what is ``known`` in the place of the module ``name``, if it is one to be imported."""
    above, _, last = name.rpartition(".")
    spec = None if name in sys.modules or find_spec(above) is None else find_spec(name)
    if spec is None:
        return False
    if not any(isinstance(finder, _Submodules) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Submodules())
    module = module_from_spec(spec)
    module.__class__ = _LatePackage
    vars(module).update(known, **{_MARKED: []})
    sys.modules[name] = module
    setattr(import_module(above), last, module)
    return True


def _import(name: str) -> None:
    """Import the module ``name`` into its stand-in; the compiler's sources with all of the compiler."""
    with _lock:
        package = sys.modules[COMPILER if name == _SOURCES else name]
        marked = vars(package).pop(_MARKED, None)
        if marked is None or package.__spec__ is None or package.__spec__.loader is None:
            return
        if package.__name__ == COMPILER:
            del sys.modules[_SOURCES]
        package.__spec__.loader.exec_module(package)
        package.__class__ = ModuleType
        for mark in marked:
            mark()


def _mark(how: str, function: Any) -> Any:
    """Return ``function``, which is marked once there is a compiler."""
    compiler: Any = sys.modules[COMPILER]
    vars(compiler)[_MARKED].append(lambda: getattr(compiler, how)(function))
    return function


def _disable(function: Any = None, *args: Any, **kwargs: Any) -> Any:
    """Return ``function`` as one that no compiler traces: as it is while there is none."""
    if function is None:
        return lambda function: _disable(function, *args, **kwargs)
    compiler: Any = sys.modules[COMPILER]
    disabled = [function]

    @wraps(function)
    def call(*given: Any, **named: Any) -> Any:
        return disabled[0](*given, **named)

    def mark() -> None:
        disabled[0] = compiler.disable(function, *args, **kwargs)

    call._torchdynamo_disable = True  # type: ignore[attr-defined]
    vars(compiler)[_MARKED].append(mark)
    return call


def _linear_sum_assignment(*args: Any, **kwargs: Any) -> Any:
    _import(_SOLVERS)
    return sys.modules[_SOLVERS].linear_sum_assignment(*args, **kwargs)
