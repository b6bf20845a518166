"""Whole commands on a changed input, each in a process of its own that is forked after the imports.

A command exits with a code of its table, says one line for each fault and no traceback, and leaves no record
``running``. Where it exits 0 its tokens are those of transformers on the same checkpoint; where only the cache was
changed, they are those of the whole one, and it always exits 0.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import torch
import transformers

from offstage.pipeline.errors import OffstageError
from tests.e2e.conftest import records_in
from tests.fuzz.formats import ALONE, RIGHT, Format, WrongAnswerError, require
from tests.fuzz.mutations import BYTES, JSON, SAFETENSORS, ZIP
from tests.fuzz.texts import TINY
from tests.packed_references import without_asking_for_accelerate

CODES = (2, 3, 4, 5)
TOKENS = 3
CHECKPOINT = ("model.path=ckpt", "max_memory.cpu=4.5MB", f"generate.max_new_tokens={TOKENS}", "storage.io=direct")
ON_DISK = (*CHECKPOINT, "dtype=float32", "device_map=disk")


class RefusedError(OffstageError):
    """A command that exited as one does that refuses its input."""


def run_command(arguments: Sequence[str], folder: Path) -> tuple[int, str]:
    """Run the command ``offstage`` in ``folder``, in this process; return its exit code and its errors."""
    from offstage.pipeline.app import main

    return _called(lambda: main(list(arguments)), folder, "offstage")


def _called(command: Any, folder: Path, name: str) -> tuple[int, str]:
    os.chdir(folder)
    sys.argv = [name]
    sys.stderr, before = StringIO(), sys.stderr
    try:
        command()
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 0 if end.code is None else 1
    finally:
        said, sys.stderr = sys.stderr.getvalue(), before
    return code, said


def judge(code: int, said: str, folder: Path, *, codes: Sequence[int] = CODES) -> None:
    """Raise what is wrong with how a command ended; a refusal with one of ``codes`` is a ``RefusedError``."""
    faults = [line for line in said.splitlines() if line.startswith("offstage")]
    require("Traceback" not in said and "unforeseen" not in said, f"exit {code}: {said[-3000:]}")
    require(code in (0, *codes), f"exit {code}: {said[-2000:]}")
    for path, record in records_in(folder).items():
        require(record["status"] != "running", f"{path} is left running")
    if code:
        require(bool(faults), f"exit {code} without a word: {said[-2000:]}")
        raise RefusedError("\n".join(faults))


def tokens_in(folder: Path) -> list[list[int]]:
    """Return the tokens of the latest run in ``folder``."""
    *_, record = records_in(folder).values()
    return [output["token_ids"] for output in record["outputs"]]


def _make_checkpoint(folder: Path) -> None:
    """Copy the embedded checkpoint, and have what is measured of the machine measured once."""
    shutil.copytree(TINY, folder / "ckpt")
    measure_once(folder, CHECKPOINT)


def measure_once(folder: Path, arguments: Sequence[str]) -> None:
    """Run the command on the whole checkpoint; keep its tokens, and what was measured of the machine."""
    code, said = run_command(arguments, folder)
    require(code == 0, said)
    folder.joinpath("tokens.json").write_text(json.dumps(tokens_in(folder)))
    keep_figures(folder)


def keep_figures(folder: Path) -> None:
    """Remove what the runs in ``folder`` left, but for what was measured of the machine."""
    for path in (folder / "outputs").glob("*/*"):
        if path.name != "hardware":
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def _make_bin_checkpoint(folder: Path) -> None:
    _make_checkpoint(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "ckpt", dtype="auto")
    torch.save(model.state_dict(), folder / "ckpt" / "pytorch_model.bin")
    for path in folder.glob("ckpt/*.safetensors*"):
        path.unlink()


def attempt_checkpoint(
    folder: Path, _pristine: Path, *, arguments: Sequence[str] = CHECKPOINT, codes: Sequence[int] = CODES, **where: str
) -> str:
    """Run the command, which may exit with ``codes``; hold its tokens against those of transformers on the same."""
    judge(*run_command(arguments, folder), folder, codes=codes)
    tokens = tokens_in(folder)
    wanted = by_transformers(folder / "ckpt", **where)
    if wanted is None:
        return ALONE
    require(tokens == wanted, f"tokens {tokens} instead of {wanted}")
    return RIGHT


def by_transformers(folder: Path, **where: str) -> list[list[int]] | None:
    """Return what transformers generates from the checkpoint; null where it doesn't.

    ``where`` says which file of the folder it is, if not all: ``gguf_file``.
    """
    try:
        config = transformers.AutoConfig.from_pretrained(folder, **where)
        kind = getattr(transformers, (config.architectures or ["AutoModelForCausalLM"])[0])
        with without_asking_for_accelerate():
            model = kind.from_pretrained(folder, dtype=config.dtype or "auto", **where).eval()
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **where)
        given = tokenizer("The weights wait offstage", return_tensors="pt")
        with torch.no_grad():
            asked = {"max_new_tokens": TOKENS, "do_sample": False}
            rows = model.generate(given["input_ids"], attention_mask=given["attention_mask"], **asked)
    except Exception:  # noqa: BLE001 - the reference may raise what it likes
        return None
    ends = model.generation_config.eos_token_id
    row = rows[0, given["input_ids"].shape[1] :].tolist()
    stops = [place for place, token in enumerate(row) if token in (ends if isinstance(ends, list) else [ends])]
    return [row[: stops[0] + 1] if stops else row]


def _make_cache(folder: Path) -> None:
    """Have a run that leaves all there is in a cache: artifacts, figures, an offload store."""
    shutil.copytree(TINY, folder / "ckpt")
    code, said = run_command(ON_DISK, folder)
    require(code == 0, said)
    folder.joinpath("tokens.json").write_text(json.dumps(tokens_in(folder)))
    shutil.rmtree(folder / "outputs" / "runs")


def _attempt_cache(folder: Path, _pristine: Path) -> str:
    code, said = run_command(ON_DISK, folder)
    try:
        judge(code, said, folder)
    except RefusedError as error:
        raise WrongAnswerError(f"a damaged cache failed the run: {error}") from error
    wanted = json.loads((folder / "tokens.json").read_text())
    require(tokens_in(folder) == wanted, f"tokens {tokens_in(folder)} instead of {wanted}")
    return RIGHT


def _make_map(folder: Path) -> None:
    _make_checkpoint(folder)
    layers = {f"model.layers.{number}": "cpu" if number % 2 else "disk" for number in range(8)}
    whole = {"model.embed_tokens": "disk", **layers, "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "disk"}
    folder.joinpath("map.json").write_text(json.dumps(whole, indent=1))
    folder.joinpath("prompts.txt").write_text("The weights wait offstage\n")


def _attempt_map(folder: Path, _pristine: Path) -> str:
    judge(*run_command((*CHECKPOINT, "device_map=map.json"), folder), folder)
    wanted = json.loads((folder / "tokens.json").read_text())
    require(tokens_in(folder) == wanted, f"tokens {tokens_in(folder)} instead of {wanted}")
    return RIGHT


_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)
_command = partial(Format, apart=True)
FORMATS = (
    _command("run: texts", _make_checkpoint, tuple(f"ckpt/{name}" for name in _NAMES), JSON, attempt_checkpoint),
    _command("run: safetensors", _make_checkpoint, ("ckpt/*.safetensors",), SAFETENSORS, attempt_checkpoint),
    _command("run: bin", _make_bin_checkpoint, ("ckpt/*.bin",), ZIP, attempt_checkpoint),
    _command("run: device map", _make_map, ("map.json",), JSON, _attempt_map),
    _command("run: cache", _make_cache, ("outputs/cache/*/*", "outputs/cache/*/*/*"), (*JSON, *BYTES), _attempt_cache),
    _command("run: figures", _make_cache, ("outputs/cache/hardware/*",), JSON, _attempt_cache),
)
