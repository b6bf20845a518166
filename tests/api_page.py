"""The page of the Python API: made of the signatures and docstrings of all that ``import offstage`` has.

``python -m tests.api_page`` writes it to ``.github/API.md``. The examples in docstrings are run with what stands in
``example_names``: that is what each may use without making it.
"""

from __future__ import annotations

import doctest
import inspect
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from itertools import groupby
from pathlib import Path
from typing import Any

import offstage
from offstage.pipeline.errors import OffstageError

ROOT = Path(__file__).parents[1]
PAGE = ROOT / ".github" / "API.md"
CHECKPOINT = ROOT / "conf" / "checkpoints" / "tiny"
_WIDTH = 100
"""Characters of a signature that stands in one line."""
_HEAD = """# The Python API

Made of the docstrings by `python -m tests.api_page`; [from Python](PYTHON.md) says where to begin. Sizes are bytes, or
text such as `"12GB"` (10⁹) and `"12GiB"` (2³⁰). A device is `0`, `1`, … (an accelerator), `"cpu"` or `"disk"`. Where a
function has accelerate's name, it has its signature.

Each example runs in the tests, after `from offstage import *`, with `torch`, `nn`, `partial`, `AutoConfig` and
`AutoModelForCausalLM` imported; `checkpoint` is a folder as `save_pretrained` writes it, `folder` an empty one, and
`loaded` what `load(checkpoint)` returns.
"""
_SECTIONS = {
    "dispatch": "Loading and dispatching: `offstage.stages.dispatch`",
    "empty_init": "Models without data: `offstage.stages.empty_init`",
    "plan": "What goes where: `offstage.stages.plan`",
    "shard_load": "Weights from files: `offstage.stages.shard_load`",
    "finetune": "Activations: `offstage.stages.finetune`",
}


def sections() -> Iterator[tuple[str, list[str]]]:
    """Yield each title of the page, and the names below it: functions first, then classes."""
    for stage, title in _SECTIONS.items():
        names = import_module(f"offstage.stages.{stage}").__all__
        yield title, sorted(names, key=lambda name: (isinstance(getattr(offstage, name), type), name.lower()))


def errors() -> list[type[OffstageError]]:
    """Return the classes of errors that ``offstage`` has."""
    kinds = [getattr(offstage, name) for name in offstage.__all__]
    return [kind for kind in kinds if isinstance(kind, type) and issubclass(kind, OffstageError)]


def example_names(folder: Path) -> dict[str, Any]:
    """Return what an example may use."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    return {name: getattr(offstage, name) for name in offstage.__all__} | {
        "offstage": offstage, "torch": torch, "nn": torch.nn, "partial": partial, "AutoConfig": AutoConfig,
        "AutoModelForCausalLM": AutoModelForCausalLM, "checkpoint": CHECKPOINT, "folder": folder,
    }  # fmt: skip


def members(thing: object) -> dict[str, Any]:
    """Return the public methods and properties that a class declares itself."""
    own = vars(thing).items() if isinstance(thing, type) else ()
    return {name: one for name, one in own if name[0] != "_" and (callable(one) or isinstance(one, property))}


def examples(name: str) -> list[doctest.Example]:
    """Return the examples in the docstring of ``offstage.NAME``, and in those of its methods."""
    thing = getattr(offstage, name)
    texts = [inspect.getdoc(one) or "" for one in (thing, *members(thing).values())]
    return [example for text in texts for example in doctest.DocTestParser().get_examples(text)]


def page() -> str:
    """Return what stands in the file."""
    parts = [_HEAD]
    for title, names in sections():
        listed = ", ".join(f"[{name}](#{name.lower()})" for name in names)
        parts += [f"## {title}", listed, *(_entry(name) for name in names)]
    parts += ["## Errors", "Each is an `OffstageError`. The command exits with the code that its class has.", _errors()]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def _entry(name: str) -> str:
    """Return the part of the page about ``offstage.NAME``, with the methods and properties of a class."""
    thing = getattr(offstage, name)
    parts = [f"### {name}", _fence(_signature(name, thing)), _prose(inspect.getdoc(thing) or "")]
    for own, member in members(thing).items():
        called = [] if isinstance(member, property) else [_fence(_signature(own, member))]
        parts += [f"#### {name}.{own}", *called, _prose(inspect.getdoc(member) or "")]
    return "\n\n".join(parts)


def _signature(name: str, thing: Any) -> str:
    """Return the call of ``thing``, its parameters one below the other where a line is too short."""
    signature = inspect.signature(thing)
    called = [parameter for parameter in signature.parameters.values() if parameter.name != "self"]
    shown: list[str] = []
    for kind, group in groupby(called, key=lambda parameter: parameter.kind):
        if kind is inspect.Parameter.KEYWORD_ONLY and not any(text.startswith("*") for text in shown):
            shown.append("*")
        shown += [_parameter(parameter) for parameter in group]
        shown += ["/"] * (kind is inspect.Parameter.POSITIONAL_ONLY)
    returned = signature.return_annotation
    tail = "" if isinstance(thing, type) or returned is signature.empty else f" -> {_annotation(returned)}"
    line = f"{name}({', '.join(shown)}){tail}"
    if len(line) <= _WIDTH or not shown:
        return line
    return "\n".join([f"{name}(", *(f"    {text}," for text in shown), f"){tail}"])


def _parameter(parameter: inspect.Parameter) -> str:
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    typed = "" if parameter.annotation is parameter.empty else f": {_annotation(parameter.annotation)}"
    default = "" if parameter.default is parameter.empty else f"{' = ' if typed else '='}{_default(parameter.default)}"
    return f"{stars}{parameter.name}{typed}{default}"


def _default(value: object) -> str:
    return "…" if repr(value).startswith("<") else repr(value)


def _annotation(value: object) -> str:
    return value if isinstance(value, str) else inspect.formatannotation(value)


def _prose(text: str) -> str:
    """Return a docstring in Markdown: examples and what is raised stand apart in it, all else is as it was."""
    blocks = re.split(r"\n{2,}", text)
    return "\n\n".join(_block(block) for block in blocks).replace("\n```\n\n```python\n", "\n")


def _block(block: str) -> str:
    if block.startswith(">>>"):
        return _fence(block)
    if block.startswith("Raises:\n"):
        entries = re.sub(r"\n {5,}", " ", block.removeprefix("Raises:\n")).splitlines()
        return "Raises:\n\n" + "\n".join(f"- `{kind.strip()}`:{description}" for kind, _, description in (
            entry.partition(":") for entry in entries))  # fmt: skip
    return block


def _fence(code: str) -> str:
    return f"```python\n{code}\n```"


def _errors() -> str:
    rows = [
        f"| `{kind.__name__}` | {kind.exit_code} | {' '.join((inspect.getdoc(kind) or '').split())} |"
        for kind in sorted(errors(), key=lambda kind: (kind is not OffstageError, kind.exit_code, kind.__name__))
    ]
    return "\n".join(["| error | exit code | when |", "|---|---|---|", *rows])


if __name__ == "__main__":
    PAGE.write_text(page())
