"""The text that the embedded model learns: the documentation strings of the open-source packages installed here.

English that the project has a right to, and that every machine with the project's dependencies has already. The files
are parsed, never imported. Only prose is kept: a paragraph is a few sentences of ordinary words; code, doctests, tables
and the names of parameters go. A paragraph that stands in several places, as in the copies of one method among many
classes, is taken once. Packages whose metadata names a licence that asks for more than a notice are left out.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import inspect
import json
import logging
import platform
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT_SHARE = 50
"""One file in so many is held out of training."""
PERMISSIVE = re.compile(r"\b(MIT|\w*BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|HPND)\b", re.IGNORECASE)
DEMANDING = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL|proprietary", re.IGNORECASE)
ELSEWHERE = {"_vendor", "vendor", "vendored", "third_party", "_distutils", "test", "tests", "idlelib", "site-packages"}
"""Folders that are somebody else's work under another licence, or no documentation."""
OWN = "offstage-pipeline"

FENCE = re.compile(r"```.*?(```|\Z)", re.DOTALL)
ROLE = re.compile(r":[a-zA-Z:+-]+:`~?\.?([^`<]+?)(?:\s*<[^`>]*>)?`")
LINK = re.compile(r"\[([^\][]+)\]\([^)\s]*\)|`([^`<]+?)\s*<[^`>]+>`_*")
NOTE = re.compile(r"^\.\. (?:note|warning|tip|important|seealso|attention)::\s*(?:\n\s*)?", re.MULTILINE)
HEADING = re.compile(r"^\s*[-=~^\"'*#+]{3,}\s*$")
BULLET = re.compile(r"^\s*(?:[-*+•]|\d+[.)]|:[a-z]+|\.\.|@|>>>|\||<)")
SECTION = re.compile(
    r"^(?:Args|Arguments|Parameters|Keyword Args|Attributes|Examples?|Usage|Raises|Shape|Inputs?)\s*:*$"
)
COMMON = re.compile(
    "a|an|and|are|as|at|be|been|but|by|can|do|does|each|for|from|has|have|if|in|into|is|it|its|may|more|must|no|not|of|on|"
    "one|only|or|other|should|so|such|than|that|the|their|then|there|these|they|this|to|use|used|was|were|when|where|"
    "which|will|with|you|your",
    re.IGNORECASE,
)
ORDINARY = re.compile(r"[A-Z]?[a-z]+(?:[-'/][a-z]+)*|[A-Z]|[A-Z]{2,5}|\d{1,4}")
SHORTEST_WORDS = 4
ORDINARY_SHARE, COMMON_SHARE = 0.85, 0.25
"""What makes a paragraph prose: the shares of its words that are plain words, and that are English's commonest."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Source:
    """A package whose documentation is read."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...] = ()


@dataclass(frozen=True, slots=True)
class Document:
    """What may be read in one go of the prose of one documentation string."""

    source: str
    text: str
    held_out: bool


@dataclass(frozen=True, slots=True)
class Share:
    """What a package gave to the corpus."""

    name: str
    version: str
    licence: str
    bytes: int


@dataclass(frozen=True, slots=True)
class Corpus:
    """All documents, and the packages they are from (without their files)."""

    sources: tuple[Source, ...]
    documents: tuple[Document, ...]

    def texts(self, *, held_out: bool) -> list[str]:
        """Return the documents to learn from, or those held out."""
        return [document.text for document in self.documents if document.held_out == held_out]

    def shares(self) -> list[Share]:
        """Return what each package gave, the largest share first."""
        sizes: Counter[str] = Counter()
        for document in self.documents:
            sizes[document.source] += len(document.text)
        given = (Share(each.name, each.version, each.licence, sizes[each.name]) for each in self.sources)
        return sorted((share for share in given if share.bytes), key=lambda share: -share.bytes)


def read_or_gather(path: Path) -> Corpus:
    """Return the corpus of this machine: from ``path``, or gathered and then kept there."""
    if not path.exists():
        sources = installed_sources()
        documents = list(gather(sources))
        logger.info("%d documents from %d packages", len(documents), len(sources))
        content = {
            "sources": [[source.name, source.version, source.licence] for source in sources],
            "documents": [[document.source, document.text, document.held_out] for document in documents],
        }
        path.with_suffix(".new").write_text(json.dumps(content), encoding="utf-8")
        path.with_suffix(".new").replace(path)
    content = json.loads(path.read_bytes())
    return Corpus(
        tuple(Source(*fields) for fields in content["sources"]),
        tuple(Document(*fields) for fields in content["documents"]),
    )


def gather(sources: Iterable[Source]) -> Iterator[Document]:
    """Yield the documents of all sources, in an order that depends on nothing but their names and content."""
    seen: set[str] = set()
    for source in sources:
        for path in source.files:
            held_out = is_held_out(f"{source.name}/{path.name}")
            found = (passage for text in docstrings(path) for passage in passages(text))
            fresh = (" ".join(part for part in passage if _is_new(part, seen)) for passage in found)
            yield from (Document(source.name, text, held_out) for text in fresh if text)


def installed_sources() -> list[Source]:
    """Return Python itself and the installed packages of permissive licence, by name."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = [Source("Python", platform.python_version(), "PSF-2.0", _python_files(stdlib, stdlib.rglob("*.py")))]
    named = {distribution.name.lower(): distribution for distribution in importlib.metadata.distributions()}
    for name, distribution in sorted(named.items()):
        licence = licence_of(distribution.metadata)
        if name == OWN or DEMANDING.search(licence) or not PERMISSIVE.search(licence):
            continue
        root = Path(str(distribution.locate_file("")))
        files = _python_files(root, (root / file for file in distribution.files or () if file.suffix == ".py"))
        if files:
            sources.append(Source(distribution.name, distribution.version, licence, files))
    return sources


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """Return the licence that a package's metadata names: the expression, the classifiers or the first line of it."""
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier") or () if line[:7] == "License"]
    text = metadata["License"].strip() if "License" in metadata else ""
    return " AND ".join(classifiers) or text.partition("\n")[0][:60]


def is_held_out(name: str) -> bool:
    """Return whether the file of this name is kept from training: a hash decides, the same on every machine."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") % HELD_OUT_SHARE == 0


def docstrings(path: Path) -> Iterator[str]:
    """Yield the documentation strings of a file: those of its definitions, and those given to functions for them.

    numpy and torch document what is compiled with calls such as ``add_docstr(function, text)``.
    """
    try:
        with warnings.catch_warnings(action="ignore", category=SyntaxWarning):
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if text := ast.get_docstring(node):
                yield text
        elif isinstance(node, ast.Call) and "doc" in ast.unparse(node.func).lower():
            yield from (text for argument in node.args for text in _long_strings(argument))


def _long_strings(node: ast.expr) -> Iterator[str]:
    for part in ast.walk(node):
        if isinstance(part, ast.Constant) and isinstance(part.value, str) and "\n" in part.value:
            yield inspect.cleandoc(part.value)


def passages(text: str) -> Iterator[list[str]]:
    """Yield what may be read in one go: the paragraphs at the margin together, each one that is set in by itself."""
    at_margin = []
    for indent, paragraph in prose(text):
        if indent:
            yield [paragraph]
        else:
            at_margin.append(paragraph)
    yield at_margin


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a documentation string that are English sentences, and how far each is set in."""
    text = NOTE.sub("", FENCE.sub("\n", text))
    text = LINK.sub(r"\1\2", ROLE.sub(r"\1", text))
    code_below: int | None = None
    for lines in filter(None, _paragraphs(text)):
        indent = _indent(lines[0])
        if code_below is not None and indent > code_below:
            continue
        code_below = indent if lines[-1].rstrip().endswith("::") or SECTION.match(lines[0].strip()) else None
        sentence = " ".join(" ".join(lines).replace("`", "").replace("*", "").split())
        if not any(BULLET.match(line) for line in lines) and is_prose(sentence):
            yield indent, sentence


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _paragraphs(text: str) -> Iterator[list[str]]:
    """Yield runs of lines that belong together; a heading's line, its rule and a change of indentation end one."""
    lines: list[str] = []
    for line in text.expandtabs().splitlines():
        if HEADING.match(line):
            yield lines[:-1]
            lines = []
        elif not line.strip() or (lines and _indent(line) != _indent(lines[-1])):
            yield lines
            lines = [line] if line.strip() else []
        else:
            lines.append(line)
    yield lines


def is_prose(sentence: str) -> bool:
    """Return whether a line reads as English: it begins and ends as a sentence does and is made of ordinary words."""
    words = sentence.split()
    if len(words) < SHORTEST_WORDS or not sentence[0].isupper() or sentence[-1] not in ".!?" or not sentence.isascii():
        return False
    bare = [word.strip(".,;:!?()\"'") for word in words]
    ordinary = sum(bool(ORDINARY.fullmatch(word)) for word in bare)
    common = sum(bool(COMMON.fullmatch(word)) for word in bare)
    return ordinary >= ORDINARY_SHARE * len(words) and common >= COMMON_SHARE * len(words)


def _is_new(paragraph: str, seen: set[str]) -> bool:
    """Return whether no paragraph before had the same words, names with capitals, digits and underscores apart."""
    words = (word if word.islower() and word.isalpha() else "_" for word in paragraph.rstrip(".:").split())
    key = " ".join(words)
    if key in seen:
        return False
    seen.add(key)
    return True


def _python_files(root: Path, files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(file for file in files if not ELSEWHERE & set(file.relative_to(root).parts)))
