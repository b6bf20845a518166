"""``import offstage``: all that the stages' packages export, under one name, at no cost until it is used."""

import ast
import subprocess
import sys
from importlib import import_module, metadata
from pathlib import Path

import pytest

import offstage
from offstage.pipeline import errors

ROOT = Path(__file__).parents[2]
PACKAGES = ("empty_init", "plan", "shard_load", "dispatch", "finetune")


def error_names() -> list[str]:
    """Return the names of the errors that users may catch."""
    kinds = (name for name, value in vars(errors).items() if isinstance(value, type))
    return sorted(name for name in kinds if issubclass(vars(errors)[name], errors.OffstageError))


def exported(package: str) -> list[str]:
    """Return the names that the stub of a stage's package exports."""
    stub = ast.parse((ROOT / "stages" / package / "__init__.pyi").read_text())
    return [alias.asname or alias.name for node in stub.body for alias in getattr(node, "names", ())]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_of_a_package_is_the_same_object_here(package: str) -> None:
    names = exported(package)
    own = import_module(f"offstage.stages.{package}")
    assert names
    assert [name for name in names if getattr(offstage, name) is not getattr(own, name)] == []


def test_it_holds_these_names_and_no_other() -> None:
    names = [name for package in PACKAGES for name in exported(package)]
    assert sorted([*names, *error_names()]) == sorted(offstage.__all__) == dir(offstage)


def test_errors_are_named_by_it_and_by_its_types() -> None:
    stub = ast.parse((ROOT / ".src/offstage/__init__.pyi").read_text())
    (own,) = (node for node in stub.body if isinstance(node, ast.ImportFrom) and node.names[0].name != "*")
    assert [alias.asname for alias in own.names] == error_names()
    assert all(getattr(offstage, name) is getattr(errors, name) for name in error_names())


def test_it_says_its_version() -> None:
    assert offstage.__version__ == metadata.version("offstage-pipeline")


def test_no_two_packages_export_the_same_name() -> None:
    names = [*(name for package in PACKAGES for name in exported(package)), *error_names()]
    assert sorted(set(names)) == sorted(names)


def test_its_types_are_those_of_the_same_packages() -> None:
    stub = ast.parse((ROOT / ".src/offstage/__init__.pyi").read_text())
    assert sorted(f"offstage.stages.{package}" for package in PACKAGES) == [
        node.module for node in stub.body if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"
    ]


def test_a_name_that_nobody_exports_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'offstage' has no attribute 'dispatch_modell'"):
        offstage.dispatch_modell  # noqa: B018


def test_importing_it_imports_neither_torch_nor_transformers() -> None:
    program = (
        f"import sys; sys.path[:0] = {[str(ROOT / '.src')]}; import offstage; "
        "assert 'dispatch_model' in offstage.__all__; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert {"torch", "transformers", "numpy"} & set(done.stdout.split()) == set()
