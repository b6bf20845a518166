"""Makes the embedded model: ``python -m tests.make_tiny WORK [--steps 2400] [--out FOLDER]``.

A small Llama that learns English from the documentation strings of the packages installed here: text that every machine
with the project's dependencies has, under licences that ask for no more than a notice. Files are parsed, never
imported, and only prose is kept. The architecture and the kind of tokenizer are the embedded model's. transformers'
``Trainer`` keeps its checkpoints in WORK, and goes on from the last one after a kill.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import inspect
import platform
import random
import re
import sysconfig
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any

import tokenizers
import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

TINY = Path(__file__).parents[1] / "conf" / "checkpoints" / "tiny"
SEED, ROWS, CONTEXT = 20, 32, 128
HELD_OUT_SHARE = 50  # one file in so many
OWN = "offstage-pipeline"

PERMISSIVE = re.compile(r"\b(MIT|\w*BSD|0BSD|Apache|PSF|Python Software Foundation|ISC|HPND)\b", re.IGNORECASE)
DEMANDING = re.compile(r"GPL|MPL|Mozilla|EPL|CDDL|proprietary", re.IGNORECASE)
# Somebody else's work under another licence, or no documentation.
ELSEWHERE = {"_vendor", "vendor", "vendored", "third_party", "_distutils", "test", "tests", "idlelib", "site-packages"}
FENCE = re.compile(r"```.*?(```|\Z)", re.DOTALL)
ROLE = re.compile(r":[a-zA-Z:+-]+:`~?\.?([^`<]+?)(?:\s*<[^`>]*>)?`")
NO_PROSE = re.compile(r"^\s*(?:[-*+•|<@]|\d+[.)]|:[a-z]+|\.\.|>>>|[-=~^\"'#]{3,})", re.MULTILINE)
COMMON = re.compile(
    "a|an|and|are|as|at|be|been|but|by|can|do|does|each|for|from|has|have|if|in|into|is|it|its|may|more|must|no|not|of|on|"
    "one|only|or|other|should|so|such|than|that|the|their|then|there|these|they|this|to|use|used|was|were|when|where|"
    "which|will|with|you|your",
    re.IGNORECASE,
)
ORDINARY = re.compile(r"[A-Z]?[a-z]+(?:[-'/][a-z]+)*|[A-Z]|[A-Z]{2,5}|\d{1,4}")

CARD = Template("""---
language: en
license: other  # the terms of the repository that it comes with
library_name: transformers
pipeline_tag: text-generation
---
# The embedded model

A Llama of $parameters parameters that continues English sentences in the manner of programmers' documentation, made by
`python -m tests.make_tiny WORK --steps $steps`. It knows no facts: what it says about a function is made up.

- Data: $megabytes MB of prose of documentation strings; one file in $share, by a hash of its name, was held out.
- Training: $steps steps of $rows rows of $context tokens with AdamW, then rounded to bfloat16; seed $seed.
- Held-out text: loss $loss nats a token over $held_out tokens.
- Made with $versions on $processor.

The weights, under the terms of the rest of this repository, were learnt from the text of these packages, under theirs:

| package | version | licence | kB of prose |
|---|---|---|---|
$packages
""")


@dataclass(frozen=True, slots=True)
class Source:
    """A package whose documentation is read."""

    name: str
    version: str
    licence: str
    files: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Document:
    """What may be read in one go of a documentation string: all at its margin, or a paragraph that is set in."""

    source: Source
    text: str
    held_out: bool


def main(arguments: Sequence[str] | None = None) -> None:
    """Make the checkpoint as the command line says."""
    parser = argparse.ArgumentParser(description="Train the embedded model; after a kill, go on with the same command.")
    parser.add_argument("work", type=Path, metavar="WORK", help="the folder for the training's checkpoints")
    parser.add_argument("--out", type=Path, default=TINY, metavar="FOLDER", help="default: %(default)s")
    parser.add_argument("--steps", type=int, default=2400, help="default: %(default)s")
    given = parser.parse_args(arguments)
    make(given.work, given.out, list(documents(installed_sources())), steps=given.steps)


def make(work: Path, folder: Path, corpus: Sequence[Document], *, steps: int, **narrower: Any) -> None:
    """Train on ``corpus`` and write the checkpoint into ``folder``, with the embedded model's config or a narrower."""
    config = AutoConfig.from_pretrained(TINY, **narrower)
    learnt = [document.text for document in corpus if not document.held_out]
    tokenizer = AutoTokenizer.from_pretrained(TINY).train_new_from_iterator(learnt, config.vocab_size)
    random.Random(SEED).shuffle(learnt)
    rows = token_rows(tokenizer, learnt)
    held_out = token_rows(tokenizer, [document.text for document in corpus if document.held_out])
    torch.manual_seed(SEED)
    # The plain formula of attention: its backward pass is faster on a processor than the fused one's.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager")
    options = TrainingArguments(
        output_dir=str(work), max_steps=steps, per_device_train_batch_size=ROWS, learning_rate=3e-3,
        lr_scheduler_type="cosine", warmup_steps=round(0.03 * steps), weight_decay=0.1, adam_beta2=0.95, bf16=True,
        use_cpu=True, seed=SEED, save_steps=200, save_total_limit=2, logging_steps=20, report_to="none",
    )  # fmt: skip
    trainer = Trainer(model=model, args=options, train_dataset=rows, eval_dataset=held_out)  # type: ignore[arg-type]
    last = get_last_checkpoint(str(work)) if work.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    model.bfloat16()
    loss = trainer.evaluate()["eval_loss"]
    model.save_pretrained(folder, max_shard_size="2MB")
    tokenizer.save_pretrained(folder)
    (folder / "README.md").write_text(_card(model, corpus, steps=steps, loss=loss, held_out=len(held_out)))
    print(f"{folder}: held-out loss {loss:.3f} nats a token")


def token_rows(tokenizer: Any, texts: Iterable[str]) -> list[dict[str, torch.Tensor]]:
    """Return all of ``texts``, one after the other, each with its bos and eos token, as full rows of ``CONTEXT``."""
    ids = [token for text in texts for token in (*tokenizer(text).input_ids, tokenizer.eos_token_id)]
    rows = torch.tensor(ids[: len(ids) // CONTEXT * CONTEXT]).view(-1, CONTEXT)
    return [{"input_ids": row, "labels": row} for row in rows]


def installed_sources() -> list[Source]:
    """Return Python itself and the installed packages of permissive licence, by name."""
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    sources = [Source("Python", platform.python_version(), "PSF-2.0", _python_files(stdlib, stdlib.rglob("*.py")))]
    named = {distribution.name.lower(): distribution for distribution in importlib.metadata.distributions()}
    for name, distribution in sorted(named.items()):
        licence = licence_of(distribution.metadata)
        if name != OWN and PERMISSIVE.search(licence) and not DEMANDING.search(licence):
            root = Path(str(distribution.locate_file("")))
            files = _python_files(root, (root / file for file in distribution.files or () if file.suffix == ".py"))
            sources.append(Source(distribution.name, distribution.version, licence, files))
    return sources


def licence_of(metadata: importlib.metadata.PackageMetadata) -> str:
    """Return the licence that a package's metadata names: the expression, the classifiers or the first line of it."""
    if "License-Expression" in metadata:
        return metadata["License-Expression"]
    classifiers = [line.split(" :: ")[-1] for line in metadata.get_all("Classifier") or () if line[:7] == "License"]
    text = metadata["License"].strip() if "License" in metadata else ""
    return " AND ".join(classifiers) or text.partition("\n")[0][:60]


def documents(sources: Iterable[Source]) -> Iterator[Document]:
    """Yield the prose of all sources, in an order that names and content alone decide; a paragraph comes once."""
    seen: set[str] = set()
    for source in sources:
        for path in source.files:
            held_out = is_held_out(f"{source.name}/{path.name}")
            for text in docstrings(path):
                fresh = [(indent, part) for indent, part in prose(text) if part not in seen]
                seen.update(part for _, part in fresh)
                together = " ".join(part for indent, part in fresh if not indent)
                apart = (part for indent, part in fresh if indent)
                yield from (Document(source, passage, held_out) for passage in (*apart, together) if passage)


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
            yield ast.get_docstring(node) or ""
        elif isinstance(node, ast.Call) and "doc" in getattr(node.func, "attr", getattr(node.func, "id", "")):
            texts = (
                part.value for argument in node.args for part in ast.walk(argument) if isinstance(part, ast.Constant)
            )
            yield from (inspect.cleandoc(text) for text in texts if isinstance(text, str) and "\n" in text)


def prose(text: str) -> Iterator[tuple[int, str]]:
    """Yield the paragraphs of a documentation string that are English sentences, and how far each is set in."""
    plain = ROLE.sub(r"\1", FENCE.sub("\n", text)).replace("`", "").replace("*", "")
    for indent, lines in groupby(plain.splitlines(), key=lambda line: len(line) - len(line.lstrip()) if line else -1):
        paragraph = "\n".join(lines)
        sentence = " ".join(paragraph.split())
        if not NO_PROSE.search(paragraph) and is_prose(sentence):
            yield indent, sentence


def is_prose(sentence: str) -> bool:
    """Return whether a line reads as English: it begins and ends as a sentence does and is made of ordinary words."""
    words = sentence.split()
    if len(words) < 4 or not sentence[0].isupper() or sentence[-1] not in ".!?" or not sentence.isascii():
        return False
    bare = [word.strip(".,;:!?()\"'") for word in words]
    ordinary = sum(ORDINARY.fullmatch(word) is not None for word in bare)
    common = sum(COMMON.fullmatch(word) is not None for word in bare)
    return ordinary >= 0.85 * len(words) and common >= 0.25 * len(words)


def _python_files(root: Path, files: Iterable[Path]) -> tuple[Path, ...]:
    return tuple(sorted(file for file in files if not ELSEWHERE & set(file.relative_to(root).parts)))


def _card(model: Any, corpus: Sequence[Document], *, steps: int, loss: float, held_out: int) -> str:
    given: Counter[Source] = Counter()
    for document in corpus:
        given[document.source] += len(document.text)
    rows = (
        f"| {one.name} | {one.version} | {one.licence} | {count / 1e3:,.1f} |" for one, count in given.most_common()
    )
    parts = (torch, transformers, tokenizers)
    return CARD.substitute(
        parameters=f"{model.num_parameters():,}", megabytes=f"{given.total() / 1e6:.1f}", share=HELD_OUT_SHARE,
        steps=steps, rows=ROWS, context=CONTEXT, seed=SEED, loss=f"{loss:.2f}", held_out=f"{held_out * CONTEXT:,}",
        versions=", ".join(f"{part.__name__} {part.__version__}" for part in parts), processor=platform.machine(),
        packages="\n".join(rows),
    )  # fmt: skip


if __name__ == "__main__":
    main()
