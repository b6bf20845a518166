"""Token ids of unequal length as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one batch: ``input_ids`` and ``attention_mask``, int64 of shape (sequences, longest sequence)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


def make_batch(ids: Sequence[Sequence[int]], *, pad: int, side: str) -> Batch:
    """Return ``ids`` as one batch, padded with ``pad`` on ``side`` ("left" for decoders, "right" for encoders)."""
    longest = max(map(len, ids))
    tokens = torch.full((len(ids), longest), pad, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for row, sequence in enumerate(ids):
        place = slice(longest - len(sequence), None) if side == "left" else slice(0, len(sequence))
        tokens[row, place] = torch.tensor(sequence)
        mask[row, place] = 1
    return Batch(tokens, mask)
