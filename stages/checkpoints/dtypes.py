"""Dtypes by their names, as headers, indexes and skeletons hold them, and as torch's own."""

from __future__ import annotations

import torch


def torch_dtype(name: str) -> torch.dtype:
    """Return the dtype that torch calls ``name``."""
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def dtype_name(dtype: object) -> str:
    """Return torch's name of ``dtype``, without the prefix: ``float32``; a name is taken with or without it."""
    return str(dtype).removeprefix("torch.")
