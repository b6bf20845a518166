"""What the late accelerator would find: each way to wait for too little fails its check."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage.stages.dispatch.transfer.link import Piece
from offstage.stages.dispatch.transfer.mover import Mover, Transfer
from offstage.stages.dispatch.transfer.pinned_buffers import Buffer
from tests.stages.dispatch.late_link import LateLink, LateMemory
from tests.stages.dispatch.transfer.test_late_orders import faults

CASES = (6, 56, 59, 82, 86, 102, 119, *range(60))
"""Those first that find what few do."""
_lend, _unpack, _copy = LateMemory.lend, LateLink.unpack, LateLink.copy


def follow_nothing(self: Mover, found: Sequence[Any]) -> None:
    """Have computing begin before what it computes with has come."""


def hurry(self: LateLink, pieces: Sequence[Piece], *, after: object, urgent: bool = False) -> threading.Event:
    """Have what is awaited be copied before what its region was used for last is over."""
    return _copy(self, pieces, after=None if urgent else after, urgent=urgent)


def come_at_once(self: LateLink) -> threading.Event:
    """Have copies begin before what their region was used for last is over."""
    event = threading.Event()
    event.set()
    return event


def give_back_early(self: Mover, transfer: Transfer) -> None:
    """Take a region back while what was given up is still on its way there."""
    for work in transfer.work:
        work.cancel()
    transfer.region = None


def unpack_beside(self: LateLink, *given: Any, after: Sequence[object], **options: Any) -> object:
    """Unpack without waiting for the copies of what is unpacked, which another stream makes."""
    return _unpack(self, *given, after=(), **options)


def forget_the_copy(self: Buffer, link: object, done: object) -> None:
    """Read the next bytes into a buffer that is still being copied from."""


def watch_the_tensor(self: LateMemory, begin: int, length: int) -> tuple[torch.Tensor, object]:
    """Take a region back when the tensor that was lent is gone, though views of it are seen."""
    region, _ = _lend(self, begin, length)
    return region, region


MUTATIONS: Mapping[str, tuple[type, str, Callable[..., Any]]] = {
    "computing doesn't wait for a copy": (Mover, "_follow", follow_nothing),
    "an awaited copy doesn't wait for computing": (LateLink, "copy", hurry),
    "a copy doesn't wait for computing": (LateLink, "computed", come_at_once),
    "a region is given back early": (Mover, "abandon", give_back_early),
    "unpacking is on a stream that waits for nothing": (LateLink, "unpack", unpack_beside),
    "a buffer is forgotten while it is copied from": (Buffer, "note_copy", forget_the_copy),
    "what is still seen is lent again": (LateMemory, "lend", watch_the_tensor),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_each_mutation_is_found(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTATIONS[name])
    assert any(faults(seed, tmp_path) for seed in CASES)
