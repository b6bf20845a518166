"""Prompts: strings or token ids, from the config or a file, as padded batches."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.errors import ConfigError, Fault
from pipeline.regular_files import read_regular
from stages.checkpoints.tokenizers import tokenizing

if TYPE_CHECKING:
    import torch

OWN_KEYS = ("prompts", "prompts_file", "batch_size")
"""The keys of ``generate`` that are ours; all others are options of transformers' ``GenerationConfig``."""

Prompt = str | list[int]
_MOST = 2**63


@dataclass(frozen=True, slots=True)
class Batch:
    """Prompts of one batch: ``input_ids`` and ``attention_mask``, int64 of shape (prompts, longest prompt)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


def check_prompts(generate: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the prompts and the batch size of the config node ``generate``."""
    size, file = generate.get("batch_size"), generate.get("prompts_file")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
        yield Fault("generate.batch_size", f"{size!r} is no batch size; give a whole number from 1, or null for all")
    if file is not None:
        if not Path(file).is_file():
            yield Fault("generate.prompts_file", f"{file!r} is no file; give a text file with one prompt a line")
        return
    prompts = generate.get("prompts")
    if not isinstance(prompts, list) or not prompts:
        yield Fault("generate.prompts", f"{prompts!r} is no list of prompts; give generate.prompts=['…'] or [[5,6,7]]")
        return
    for index, prompt in enumerate(prompts):
        if not _is_prompt(prompt):
            yield Fault(f"generate.prompts[{index}]", f"{prompt!r} is neither text in UTF-8 nor a list of token ids")


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value) and _is_unicode(value)
    ids = value if isinstance(value, list) else []
    return bool(ids) and all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids)


def _is_unicode(text: str) -> bool:
    """Return whether UTF-8 has ``text``: what came from bytes that aren't UTF-8 holds halves of characters."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def token_ids(option: str, value: object) -> list[int]:
    """Return the token ids that an ``option`` names: none, one or a list; a ``ConfigError`` for anything else."""
    found = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(isinstance(token, int) and not isinstance(token, bool) and abs(token) < _MOST for token in found):
        raise ConfigError(f"generate.{option}: {value!r} is no token id; give a whole number, or leave it out")
    return list(found)


def read_prompts(generate: Mapping[str, Any]) -> list[Prompt]:
    """Return the prompts of the config node ``generate``; blank lines of a prompts file are passed over."""
    if generate.get("prompts_file") is None:
        return list(generate["prompts"])
    file = Path(generate["prompts_file"])
    try:
        lines = [line for line in read_regular(file).decode("utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"generate.prompts_file: {str(file)!r} can't be read as UTF-8 text: {error}") from error
    if not lines:
        raise ConfigError(f"generate.prompts_file: {str(file)!r} holds no prompt; write one a line")
    return list(lines)


def encode(prompts: Sequence[Prompt], tokenizer: Any) -> list[list[int]]:
    """Return the token ids of each prompt. A string needs a tokenizer: a ``ConfigError`` where there is none."""
    encoded = []
    for prompt in prompts:
        if isinstance(prompt, str) and tokenizer is None:
            raise ConfigError(
                f"generate.prompts: {prompt!r} is text and the checkpoint has no tokenizer; "
                "set model.tokenizer to a folder that has one, or give token ids: generate.prompts=[[5,6,7]]"
            )
        ids = _tokenize(prompt, tokenizer) if isinstance(prompt, str) else prompt
        if not ids:
            raise ConfigError(f"generate.prompts: {prompt!r} has no tokens; give a longer prompt")
        encoded.append([int(i) for i in ids])
    return encoded


def _tokenize(prompt: str, tokenizer: Any) -> list[int]:
    with tokenizing(ConfigError, f"generate.prompts: {prompt!r} can't be made tokens by the tokenizer"):
        return list(tokenizer(prompt)["input_ids"])


def make_batch(ids: Sequence[Sequence[int]], *, pad: int, side: str) -> Batch:
    """Return ``ids`` as one batch, padded with ``pad`` on ``side`` ("left" for decoders, "right" for encoders)."""
    import torch

    longest = max(map(len, ids))
    tokens = torch.full((len(ids), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, prompt in enumerate(ids):
        place = slice(longest - len(prompt), None) if side == "left" else slice(0, len(prompt))
        tokens[row, place] = torch.tensor(prompt)
        mask[row, place] = 1
    return Batch(tokens, mask)
