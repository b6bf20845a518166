"""Token ids of unequal length as one batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.utils.rnn import pad_sequence


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences of one batch: ``input_ids`` and ``attention_mask``, int64 of shape (sequences, longest sequence)."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor


def make_batch(ids: Sequence[Sequence[int]], *, pad: int, side: str) -> Batch:
    """Return ``ids`` as one batch, padded with ``pad`` on ``side`` ("left" for decoders, "right" for encoders)."""
    rows = [torch.tensor(sequence, dtype=torch.long) for sequence in ids]
    tokens = pad_sequence(rows, batch_first=True, padding_value=pad, padding_side=side)
    mask = pad_sequence([*map(torch.ones_like, rows)], batch_first=True, padding_side=side)
    return Batch(tokens, mask)
