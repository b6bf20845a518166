"""The source code behind a name, told without running any of it.

A model's code is a part of what it is: an edited class, or an edited helper that its module imports, is another model.
So the key of a model holds every source file that can have a say in it, and imports nothing to find them: files are
parsed, and what they import is looked up where Python would find it.
"""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import platform
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import metadata
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec, PathFinder
from pathlib import Path

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.regular_files import read_regular

ABSENT = "absent"
"""What stands for a module that isn't there: an import that may fail counts from the day on that it doesn't."""

_PYTHON = "python"
_SUFFIXES = {".py", *(Path(suffix).suffix for suffix in EXTENSION_SUFFIXES)}
_IMPORTERS = ("import_module", "__import__")


def code_identity(names: Iterable[str]) -> dict[str, str]:
    """Return what the code behind the dotted ``names`` is, and behind all that it imports, without importing it.

    What an installed distribution provides stands as its version, and so does Python's own library. Of all else, an
    editable install included, every source file of the top-level module or package stands by its hash. Names that are
    put together as a program runs can't be seen. A ``ConfigError`` names a module without source: nothing that it makes
    could be found again.
    """
    importlib.invalidate_caches()
    digests: dict[str, str] = {}
    waiting, seen = [name.partition(".")[0] for name in names], set[str]()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        spec = find_module(name)
        versions = {name: ABSENT} if spec is None else _versions(name, spec)
        files = list(_sources(name, spec)) if spec is not None and versions is None else []
        digests |= versions or hashes(files)
        waiting += imports(files)
    return digests


def find_module(name: str) -> ModuleSpec | None:
    """Return where Python would find the module of the dotted ``name``'s top level, or null; nothing is imported."""
    top = name.partition(".")[0]
    try:
        spec = importlib.util.find_spec(top)
    except ValueError:  # the program itself, or a module made by hand
        return None
    return spec or PathFinder.find_spec(top, [str(Path.cwd())])


def source_files(folder: Path) -> list[Path]:
    """Return the files of code in ``folder`` and all folders below, in a fixed order."""
    return sorted(file for file in folder.rglob("*") if file.suffix in _SUFFIXES and file.is_file())


def hashes(files: Iterable[Path], relative_to: Path | None = None) -> dict[str, str]:
    """Return the SHA-256 of each file by its path, or its path below ``relative_to``."""
    return {
        str(file.relative_to(relative_to) if relative_to else file): hashlib.sha256(read_regular(file)).hexdigest()
        for file in files
    }


def imports(files: Iterable[Path]) -> list[str]:
    """Return the top-level names that ``files`` import, wherever they do; relative imports stay in their package."""
    return sorted({name for file in files if file.suffix == ".py" for name in _imported(file)})


def _imported(file: Path) -> Iterator[str]:
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError, RecursionError):
        return  # Python says so itself when it comes to it
    for node in ast.walk(tree):
        for name in _names(node):
            yield name.partition(".")[0]


def _names(node: ast.AST) -> list[str]:
    """Return the modules that one node of a program imports by name."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module] if node.module and not node.level else []
    if not isinstance(node, ast.Call) or not node.args or not isinstance(node.args[0], ast.Constant):
        return []
    called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", None)
    given = node.args[0].value
    return [given] if called in _IMPORTERS and isinstance(given, str) and not given.startswith(".") else []


def _places(spec: ModuleSpec) -> list[Path]:
    return [Path(place) for place in spec.submodule_search_locations or ([spec.origin] if spec.origin else [])]


def _sources(name: str, spec: ModuleSpec) -> Iterator[Path]:
    for place in _places(spec):
        if place.is_dir():
            yield from source_files(place)
            for part in (link for link in place.iterdir() if link.is_symlink() and link.is_dir()):
                yield from source_files(part)
        elif place.suffix in _SUFFIXES and place.is_file():
            yield place
        else:
            raise ConfigError(
                f"model._target_: the module {name!r} has no source that can be read ({place}), so nothing could tell "
                "when its code changes; give its source on PYTHONPATH, or install it"
            )


def _versions(name: str, spec: ModuleSpec) -> dict[str, str] | None:
    """Return the versions that stand for the module ``name``; null where its source must be looked at."""
    if spec.origin in ("built-in", "frozen") or (name in sys.stdlib_module_names and _is_below(spec, "stdlib")):
        return {_PYTHON: platform.python_version()}
    owners = [metadata.distribution(owner) for owner in sorted(set(_distributions().get(name, ())))]
    if owners and all(_is_installed(owner, spec) for owner in owners):
        return {owner.metadata["Name"]: owner.version for owner in owners}
    return None


def _is_below(spec: ModuleSpec, key: str) -> bool:
    root = Path(sysconfig.get_path(key))
    return all(root in place.parents for place in _places(spec))


def _is_installed(owner: metadata.Distribution, spec: ModuleSpec) -> bool:
    """Return whether the module's files were copied there as ``owner`` was installed; an editable install's weren't."""
    home = Path(str(owner.locate_file("")))
    return owner.read_text("WHEEL") is not None and any(home in place.parents for place in _places(spec))


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(metadata.packages_distributions())
