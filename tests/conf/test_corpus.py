"""The corpus is the prose of documentation strings, of packages that allow it."""

import sys
from email.message import Message
from pathlib import Path

import pytest

from tests import make_tiny

MODULE = '''
"""Tools for reading a file of numbers.

The file is read as a whole, so it should fit in the memory of the machine.

Parameters
----------
path : str
    The path of the file that is to be read.

>>> read("a.txt")
[1, 2, 3]
"""

class Reader:
    """Read numbers from the file at `path`::

        for number in Reader(path): it is code that stands here and not a sentence.

    Returns a list of the numbers, in the order of the file.
    """

    def again(self):
        """The file is read as a whole, so it should fit in the memory of the machine."""

add_docstr(f, """
Close the :class:`~files.Reader` and give the memory back to the system.
""")
'''


def gather(path: Path) -> list[str]:
    return [document.text for document in make_tiny.documents([make_tiny.Source("numbers", "1.0", "MIT", (path,))])]


def test_sentences_are_kept_and_code_lists_and_repetitions_are_not(tmp_path: Path) -> None:
    path = tmp_path / "numbers.py"
    path.write_text(MODULE)
    assert sorted(gather(path)) == [
        "Close the files.Reader and give the memory back to the system.",
        "Returns a list of the numbers, in the order of the file.",
        "The path of the file that is to be read.",
        "Tools for reading a file of numbers. "
        "The file is read as a whole, so it should fit in the memory of the machine.",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Return the number of elements in the list.", True),
        ("Return it.", False),
        ("the first letter is no capital of a sentence.", False),
        ("The end of this sentence is the beginning of a list:", False),
        ("Gibt die Anzahl der Elemente in dieser Liste an den Aufrufer.", False),
        ("Rückgabe of the number of elements in the list.", False),
        ("The x_1 = foo(a, b) + bar[c] is in self.__dict__ of cls.", False),
    ],
)
def test_prose_is_told_from_what_is_none(line: str, expected: bool) -> None:
    assert make_tiny.is_prose(line) == expected


def test_a_file_that_is_no_python_gives_nothing(tmp_path: Path) -> None:
    path = tmp_path / "template.py"
    path.write_text('"""The name of this module is {{ name }} in the template."""\ndef {{ name }}: pass\n')
    assert gather(path) == []


@pytest.mark.parametrize(
    ("fields", "licence"),
    [
        ({"License-Expression": "MIT"}, "MIT"),
        ({"Classifier": "License :: OSI Approved :: BSD License", "License": "see the file"}, "BSD License"),
        ({"License": "Apache 2.0\nand then its whole text"}, "Apache 2.0"),
        ({}, ""),
    ],
)
def test_a_licence_is_what_the_metadata_names(fields: dict[str, str], licence: str) -> None:
    metadata = Message()
    for name, value in fields.items():
        metadata[name] = value
    assert make_tiny.licence_of(metadata) == licence  # type: ignore[arg-type]


def test_only_packages_of_permissive_licences_are_read_and_python_is_the_first() -> None:
    sources = {source.name: source for source in make_tiny.installed_sources()}
    assert next(iter(sources)) == "Python"
    assert {"numpy", "torch", "transformers"} <= sources.keys()
    assert not {"certifi", "tqdm", make_tiny.OWN} & sources.keys(), "these ask for more than a notice, or are ours"
    assert all(file.suffix == ".py" for file in sources["numpy"].files)
    assert not [file for file in sources["Python"].files if "site-packages" in file.parts]


def test_about_one_file_in_fifty_is_held_out() -> None:
    held_out = [name for name in sys.stdlib_module_names if make_tiny.is_held_out(f"Python/{name}.py")]
    assert 1 <= len(held_out) <= 15
    assert held_out == [name for name in sys.stdlib_module_names if make_tiny.is_held_out(f"Python/{name}.py")]
