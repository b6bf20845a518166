"""The embedded model's card: what it was made from and how, filled into ``card.md``."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template

import tokenizers
import torch
import transformers

from offstage.conf.checkpoints.corpus import Share


@dataclass(frozen=True, slots=True)
class Figures:
    """What came out of a training."""

    parameters: int
    training_tokens: int
    seen_tokens: int
    steps: int
    minutes: float
    held_out_tokens: int
    loss: float
    """Nats a token of the held-out text."""
    bits_a_byte: float


def write(figures: Figures, shares: Sequence[Share]) -> str:
    """Return the card in Markdown."""
    template = Template(Path(__file__).with_name("card.md").read_text(encoding="utf-8"))
    return template.substitute(
        parameters=f"{figures.parameters:,}",
        training_tokens=f"{figures.training_tokens:,}",
        seen_tokens=f"{figures.seen_tokens:,}",
        rounds=f"{figures.seen_tokens / figures.training_tokens:.1f}",
        steps=f"{figures.steps:,}",
        minutes=f"{figures.minutes:.0f}",
        held_out_tokens=f"{figures.held_out_tokens:,}",
        loss=f"{figures.loss:.2f}",
        bits_a_byte=f"{figures.bits_a_byte:.2f}",
        versions=", ".join(f"{part.__name__} {part.__version__}" for part in (torch, transformers, tokenizers)),
        processor=platform.machine(),
        corpus_megabytes=f"{sum(share.bytes for share in shares) / 1e6:.1f}",
        packages="\n".join(
            f"| {share.name} | {share.version} | {share.licence} | {share.bytes / 1e3:,.1f} |" for share in shares
        ),
    )
