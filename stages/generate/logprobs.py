"""Log-probabilities of the tokens that were chosen: natural logarithms, of the model's own distribution.

They are taken before any option changes it (temperature, penalties, words that are barred), as other servers of models
do: they say what the model thinks of a text and not how it was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import StoppingCriteria

from offstage.stages.dispatch.streaming.lockstep import current_call

_ROWS = 16
"""How many sequences are normalised at once: what that takes needs no room in a plan then."""


class ChosenLogprobs(StoppingCriteria):  # type: ignore[misc]
    """Collects the log-probability of each token, as it comes or from logits that were kept.

    As a stopping criterion, which transformers asks after each token and which never stops anything, it goes by the
    logits of the forward before, and keeps none of them.
    """

    def __init__(self) -> None:
        self._logits: torch.Tensor | None = None
        self._columns: list[torch.Tensor] = []

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[ChosenLogprobs]:
        """Take the logits of the last position of each forward of ``model`` inside."""

        mine = current_call()

        def take(_model: nn.Module, _args: Any, output: Any) -> None:
            if current_call() is not mine:  # another's, in lockstep
                return
            self._logits = output.logits[:, -1].clone()  # not a view: a prompt's forward may give all positions

        handle = model.register_forward_hook(take)
        try:
            yield self
        finally:
            handle.remove()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """Add that of the last token of each row of ``input_ids``."""
        if self._logits is not None:
            self.note(self._logits, input_ids[:, -1])
            self._logits = None
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    def note(self, logits: torch.Tensor, chosen: torch.Tensor) -> None:
        """Add those of the ``chosen`` token of each row of ``logits`` (sequences, words)."""
        pieces = zip(torch.split(logits, _ROWS), torch.split(chosen.to(logits.device), _ROWS), strict=True)
        columns = [rows.float().log_softmax(dim=-1).gather(1, tokens[:, None])[:, 0] for rows, tokens in pieces]
        self._columns.append(torch.cat(columns).cpu())

    def note_kept(self, output: Any, tokens: torch.Tensor) -> None:
        """Add those of the new ``tokens`` (sequences, steps), of what ``generate`` returned with all steps' logits.

        A beam's token was chosen from the logits of the beam that it goes on; one that has ended goes on none.
        """
        beams = getattr(output, "beam_indices", None)
        for step, logits in enumerate(output.logits[: tokens.shape[1]]):
            rows = torch.arange(len(tokens)) if beams is None else beams[:, step].long().cpu()
            self.note(logits[rows.clamp(min=0).to(logits.device)], tokens[:, step])
            self._columns[-1][rows < 0] = math.nan

    def of(self, sequence: int, tokens: int) -> list[float | None]:
        """Return those of the first ``tokens`` of a sequence; null for a word that the model holds impossible."""
        logprobs = [float(column[sequence]) for column in self._columns][:tokens]
        return [value if math.isfinite(value) else None for value in logprobs]
