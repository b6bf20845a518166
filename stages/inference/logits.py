"""The logits in what a model returned."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offstage.pipeline.errors import ConfigError


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits (prompts, length, words) in what a model returned: a tensor, a mapping, or a tuple's first."""
    if isinstance(output, Mapping) and "logits" in output:
        output = output["logits"]
    elif hasattr(output, "logits"):
        output = output.logits
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    if not isinstance(output, torch.Tensor) or output.dim() != 3:
        got = f"a tensor of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
        raise ConfigError(f"model: its forward returned {got}; text needs logits of shape (prompts, length, words)")
    return output
