"""``.bin`` files of torch before 1.6: five pickles one after another, the last a list of keys, and then the storages.

``torch.load`` makes room for every storage that a tensor refers to, and fills those that the list of keys names. One
flipped bit in a key leaves a storage as the memory was: a tensor of whatever stood there before.
"""

from __future__ import annotations

import os
import pickletools
from collections.abc import Iterable
from pathlib import Path

import torch

from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.regular_files import open_regular

_PICKLES = 5
_COUNT_BYTES = 8
"""Before each storage stands how many elements it has."""


def check_storages(path: Path, tensors: Iterable[torch.Tensor]) -> None:
    """Raise a ``CheckpointError`` where ``tensors``, loaded from ``path``, have other bytes than were stored there."""
    storages = [tensor.untyped_storage() for tensor in tensors]
    needed = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
    with os.fdopen(open_regular(path), "rb") as file:
        keys = 0
        for _ in range(_PICKLES):
            keys = sum(isinstance(argument, str) for _, argument, _ in pickletools.genops(file))
        stored = os.fstat(file.fileno()).st_size - file.tell() - _COUNT_BYTES * keys
    if needed != stored:
        raise CheckpointError(
            f"{path}: its tensors have {needed} bytes, and {stored} are stored there; get the file again"
        )
