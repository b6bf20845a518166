"""The house keeps its measure: what stands at the top level, and the hard limits on files and functions."""

import ast
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
TOP_LEVEL = {"pyproject.toml", "README.md", "conf", "pipeline", "stages", "tests", "outputs"}
PACKAGES = ("pipeline", "stages", "conf")
FILE_LINES, FUNCTION_LINES, NESTING = 400, 50, 3

BLOCKS = (ast.If, ast.For, ast.While, ast.With, ast.Try)
Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def sources(*folders: str) -> list[str]:
    """Return the Python files under ``folders``, relative to the root."""
    return sorted(str(path.relative_to(ROOT)) for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions(text: str) -> Iterator[Function]:
    """Yield every function and method in a module's text."""
    return (node for node in ast.walk(ast.parse(text)) if isinstance(node, FUNCTIONS))


def length(function: Function) -> int:
    """Return the lines of a function, those of its docstring left out."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    if ast.get_docstring(function) is None:
        return lines
    docstring = function.body[0]
    return lines - ((docstring.end_lineno or 0) - docstring.lineno + 1)


def nesting(node: ast.AST, depth: int = 0) -> int:
    """Return how deep blocks stand in blocks inside ``node``; inner functions and classes count for themselves."""
    inner = [child for child in ast.iter_child_nodes(node) if not isinstance(child, (*FUNCTIONS, ast.ClassDef))]
    return max([depth, *(nesting(child, depth + isinstance(child, BLOCKS)) for child in inner)])


def too_long(text: str) -> list[str]:
    """Return what in a module's text is longer than the measure: the file itself, and functions by name."""
    lines = text.count("\n")
    file_faults = [f"{lines} lines"] if lines > FILE_LINES else []
    measured = [(function.name, length(function)) for function in functions(text)]
    return [*file_faults, *(f"{name}: {count} lines" for name, count in measured if count > FUNCTION_LINES)]


def too_deep(text: str) -> list[str]:
    """Return the functions of a module's text that nest deeper than the measure."""
    measured = [(function.name, nesting(function)) for function in functions(text)]
    return [f"{name}: nested {depth} deep" for name, depth in measured if depth > NESTING]


def undocumented(text: str) -> list[str]:
    """Return what is missing of a module's text, the docstring on its top."""
    return [] if ast.get_docstring(ast.parse(text)) else ["no docstring"]


def not_apart(text: str) -> list[str]:
    """Return where a module's context managers raise an error from another whose traceback holds them: a cycle from
    Python 3.12 on, in which what failed keeps its tensors (``errors.apart``).
    """
    managers = (each for each in functions(text) if any(map(_is_manager, each.decorator_list)))
    raised = (node for each in managers for node in ast.walk(each) if isinstance(node, ast.Raise))
    return [f"line {node.lineno}" for node in raised if isinstance(node.cause, ast.Name)]


def _is_manager(decorator: ast.expr) -> bool:
    return isinstance(decorator, ast.Name) and decorator.id == "contextmanager"


def faults(check: Callable[[str], list[str]], *folders: str) -> dict[str, list[str]]:
    """Return what ``check`` finds in each Python file under ``folders``, by the files in which it finds something."""
    by_file = {source: check((ROOT / source).read_text()) for source in sources(*folders)}
    return {source: wrong for source, wrong in by_file.items() if wrong}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs a git checkout")
def test_the_top_level_holds_what_the_design_names() -> None:
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tops = {path.split("/")[0] for path in listed.splitlines()}
    assert {top for top in tops if not top.startswith(".")} - TOP_LEVEL == set()


def test_files_and_functions_are_short() -> None:
    assert faults(too_long, *PACKAGES, "tests") == {}


def test_functions_are_flat() -> None:
    assert faults(too_deep, *PACKAGES) == {}


def test_every_module_says_what_it_is_for() -> None:
    assert faults(undocumented, *PACKAGES) == {}


def test_what_context_managers_raise_is_apart_from_what_they_caught() -> None:
    assert faults(not_apart, *PACKAGES) == {}
    manager = (
        "@contextmanager\ndef manager():\n    try:\n        yield\n    except OSError as error:\n        raise X from "
    )
    assert not_apart(manager + "error\n") == ["line 6"]
    assert not_apart(manager + "apart(error)\n") == []


def test_what_is_too_large_is_named() -> None:
    blocks = "".join("  " * depth + " if x:\n" for depth in range(4)) + " " * 9 + "x\n"
    assert too_long("x = 1\n" * 401) == ["401 lines"]
    assert too_long("def long():\n" + "    x = 1\n" * 50) == ["long: 51 lines"]
    assert too_long('def documented():\n    """Why."""\n' + "    x = 1\n" * 49) == []
    assert too_deep("def deep():\n" + blocks) == ["deep: nested 4 deep"]
    assert undocumented("x = 1\n") == ["no docstring"]
    assert undocumented('"""What for."""\n') == []
