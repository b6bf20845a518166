"""What a forward returns, by name: which of it is kept, and one vector of each row where that is asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError, closest
from offstage.stages.calls.options import KEY, ForwardOptions
from offstage.stages.calls.signature import Signature

EMBEDDINGS = "embeddings"
_HIDDEN = "last_hidden_state"
_MASK = "attention_mask"
ASKED = ("hidden_states", "attentions")
"""What transformers' models return of every layer, where they are told to; asked for by either name."""
_NEVER = ("past_key_values",)
CACHES = (*_NEVER, "cache", "cache_params", "state")
"""What transformers calls the cache, each of its releases and models by one of these names."""


def named_tensors(output: Any, name: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every tensor in what a model returned, by its dotted name: that of a key, or the place in a tuple.

    A tensor that is all that there is, is called ``output``. Keys and values kept for a next token are none of it.
    """
    if isinstance(output, torch.Tensor):
        yield name or "output", output
        return
    inner = _parts(output)
    if not name and isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        inner = {"output": output[0]} if len(output) == 1 else {f"output.{key}": one for key, one in inner.items()}
    for key, value in inner.items():
        if key not in _NEVER:
            yield from named_tensors(value, f"{name}.{key}" if name else key)


def _parts(output: Any) -> dict[str, Any]:
    if isinstance(output, Mapping):
        return {str(key): value for key, value in output.items()}
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        return {str(place): value for place, value in enumerate(output)}
    if hasattr(output, "_asdict"):
        return dict(output._asdict())
    return dict(vars(output)) if is_dataclass(output) else {}


def kept_cache(named: Any) -> dict[str, Any]:
    """Return what ``named``, an output or the arguments of a call, keeps for a next token: the cache, by its name.

    The call of that token takes it by this name too. Empty where nothing is kept.
    """
    return {name: cache for name, cache in _parts(named).items() if name in CACHES and cache is not None}


def call_options(model: nn.Module, given: ForwardOptions) -> dict[str, bool]:
    """Return what a transformers model is told beside its arguments, so that it returns what is asked for, and no
    more.
    """
    config = getattr(model, "config", None)
    if config is None or not hasattr(config, "to_diff_dict"):
        return {}
    options = {f"output_{name}": True for name in names_asked(given)}
    caches = "use_cache" in Signature.of(model).names
    return {**options, "use_cache": False} if caches else options


def select(
    model: nn.Module, output: Any, arguments: Mapping[str, torch.Tensor], given: ForwardOptions
) -> dict[str, torch.Tensor]:
    """Return what is kept of the ``output`` of a call with ``arguments``, contiguous, wherever it was computed.

    By default that is every tensor at the top of it, or the embeddings where there is pooling. Raises a ``ConfigError``
    for names that aren't there.
    """
    tensors = dict(named_tensors(output))
    if given.pooling is not None:
        tensors[EMBEDDINGS] = _embeddings(model, tensors, arguments, given)
    default = [EMBEDDINGS] if given.pooling else [name for name in tensors if "." not in name] or list(tensors)
    chosen = [name for asked in given.outputs or default for name in _matching(model, asked, tensors)]
    if not chosen:
        raise ConfigError(f"{KEY}: {type(model).__name__} returned {type(output).__name__}, with no tensor in it")
    return {name: tensors[name].detach().contiguous() for name in dict.fromkeys(chosen)}


def _matching(model: nn.Module, asked: str, tensors: Mapping[str, torch.Tensor]) -> list[str]:
    names = [name for name in tensors if _is_below(name, asked)]
    if not names:
        raise ConfigError(
            f"{KEY}.outputs: {type(model).__name__} returns no {asked!r}{closest(asked, tensors)}; "
            f"it returns {', '.join(tensors)}"
        )
    return names


def _is_below(name: str, above: str) -> bool:
    return name == above or name.startswith(f"{above}.")


def _embeddings(
    model: nn.Module, tensors: Mapping[str, torch.Tensor], arguments: Mapping[str, torch.Tensor], given: ForwardOptions
) -> torch.Tensor:
    """Return one float32 vector of each row, shape (rows, hidden), from the last hidden states."""
    hidden = tensors.get(_HIDDEN)
    if hidden is None or hidden.dim() != 3:
        raise ConfigError(
            f"{KEY}.pooling: {type(model).__name__} returns no {_HIDDEN} of shape (rows, length, hidden), only "
            f"{', '.join(tensors)}; set model.class to a class without a head, such as AutoModel"
        )
    pooled = pool(hidden.float(), _mask(model, hidden, arguments.get(_MASK)), given.pooling or "mean")
    return nn.functional.normalize(pooled, dim=-1) if given.normalize else pooled


def _mask(model: nn.Module, hidden: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
    """Return which positions of ``hidden`` count, shape (rows, length): all, without a ``mask``."""
    if mask is None:
        return torch.ones(hidden.shape[:2], dtype=torch.long, device=hidden.device)
    shortened = getattr(model, "_get_feature_vector_attention_mask", None)
    if mask.shape != hidden.shape[:2] and shortened is not None:  # of audio: samples in, frames out
        mask = shortened(hidden.shape[1], mask)
    if mask.shape != hidden.shape[:2]:
        raise ConfigError(
            f"{KEY}.pooling: {_MASK} has shape {tuple(mask.shape)} and {_HIDDEN} {tuple(hidden.shape)}: which "
            "positions count can't be told; keep last_hidden_state and pool that"
        )
    return mask.long()


def pool(hidden: torch.Tensor, mask: torch.Tensor, pooling: str) -> torch.Tensor:
    """Return one vector of each row of ``hidden`` (rows, length, size): of the positions whose ``mask`` isn't 0 the
    mean, the first (``cls``) or the last.
    """
    if pooling == "mean":
        weights = mask[:, :, None].to(hidden.dtype)
        return (hidden * weights).sum(dim=1) / weights.sum(dim=1).clamp(min=1e-9)
    rows = torch.arange(len(hidden), device=hidden.device)
    positions = torch.arange(mask.shape[1], device=hidden.device) * (mask != 0)
    place = positions.argmax(dim=1) if pooling == "last" else (mask != 0).long().argmax(dim=1)
    return hidden[rows, place]


def names_asked(given: ForwardOptions) -> list[str]:
    """Return which outputs of every layer are asked for."""
    return [name for name in ASKED if any(_is_below(one, name) for one in given.outputs or ())]
