"""What the late accelerator would find: each way to wait for too little fails its check."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest
import torch

from offstage.stages.dispatch.transfer.link import CopyBack, Moved, Piece
from offstage.stages.dispatch.transfer.mover import Mover, Transfer
from offstage.stages.dispatch.transfer.pinned_buffers import Buffer
from offstage.stages.finetune import disk_store
from tests.long_form import in_part
from tests.stages.dispatch.late_link import LateLink, LateMemory
from tests.stages.dispatch.test_late_models import faults as of_models
from tests.stages.dispatch.transfer.test_late_orders import faults as of_parts

PARTS, MODELS = (6, 56, 59, 82, 86, 102, 119, *range(60)), (30, 0, 6, 32, 35, 54, *range(1, 40))
"""Cases of single parts, and of whole models. Those first that find what few do."""
_lend, _unpack, _copy, _arrive = LateMemory.lend, LateLink.unpack, LateLink.copy, Transfer.arrive
_write = disk_store._write
Mutation = tuple[object, str, Callable[..., Any]]


def follow_nothing(self: Mover, moves: Sequence[Any]) -> None:
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


def hand_on_early(self: Mover, transfer: Transfer) -> None:
    """Take a region back once nothing is asked for any more, though computing doesn't follow what was."""
    wait([work for work in transfer.work if not work.cancel()])
    transfer.region = None


def follow_only_what_was_ahead(self: Transfer) -> list[Moved]:
    """Have computing begin before what it awaits has come, by the stream for what is urgent."""
    moves = _arrive(self)
    return [moved._replace(done=None) for moved in moves] if self.is_awaited else moves


def take_as_back(self: CopyBack) -> None:
    """Have computing begin before the activations have come back that it needs."""
    self._done = None


def read_as_back(self: disk_store._Returning) -> None:
    """Have computing begin before what was read of them has come back."""
    self._jobs.clear()


def write_at_once(region: disk_store.FileRegion, begin: int, buffer: Buffer, **options: Any) -> None:
    """Write a block of activations before it has come from the accelerator."""
    buffer._copied = None
    _write(region, begin, buffer, **options)


def unpack_beside(self: LateLink, *given: Any, after: Sequence[object], **options: Any) -> object:
    """Unpack without waiting for the copies of what is unpacked, which another stream makes."""
    return _unpack(self, *given, after=(), **options)


def forget_the_copy(self: Buffer, link: object, done: object) -> None:
    """Read the next bytes into a buffer that is still being copied from."""


def watch_the_tensor(self: LateMemory, begin: int, length: int) -> tuple[torch.Tensor, object]:
    """Take a region back when the tensor that was lent is gone, though views of it are seen."""
    region, _ = _lend(self, begin, length)
    return region, region


MUTATIONS: Mapping[str, Mutation] = {
    "computing doesn't wait for a copy": (Mover, "_follow", follow_nothing),
    "computing doesn't wait for the urgent stream": (Transfer, "arrive", follow_only_what_was_ahead),
    "an awaited copy doesn't wait for computing": (LateLink, "copy", hurry),
    "a copy doesn't wait for computing": (LateLink, "computed", come_at_once),
    "unpacking is on a stream that waits for nothing": (LateLink, "unpack", unpack_beside),
    "a buffer is forgotten while it is copied from": (Buffer, "note_copy", forget_the_copy),
    "what is still seen is lent again": (LateMemory, "lend", watch_the_tensor),
}


ACTIVATIONS: Mapping[str, Mutation] = {
    "what comes back isn't waited for": (CopyBack, "follow", take_as_back),
    "what comes back from disk isn't waited for": (disk_store._Returning, "follow", read_as_back),
    "what goes to disk isn't waited for": (disk_store, "_write", write_at_once),
}
"""Of what models alone have."""
OF_A_FEW: Mapping[str, Mutation] = {
    "a region is given back early": (Mover, "abandon", give_back_early),
    "what was given up is forgotten by computing": (Mover, "abandon", hand_on_early),
}
"""That too few models find for a test of seconds."""


OF_PARTS, OF_MODELS = {**MUTATIONS, **OF_A_FEW}, {**MUTATIONS, **ACTIVATIONS}


@pytest.mark.parametrize("mutation", in_part(OF_PARTS))
def test_parts_find_each_mutation(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*OF_PARTS[mutation])
    assert any(of_parts(seed, tmp_path) for seed in PARTS)


@pytest.mark.parametrize("mutation", in_part(OF_MODELS))
def test_models_find_each_mutation(mutation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*OF_MODELS[mutation])
    assert any(of_models(seed, tmp_path) for seed in MODELS)
