"""Copies of large tensors lie in a file, and bring back every bit."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from offstage.pipeline.errors import StorageError
from offstage.stages.dispatch.streaming import tensor_copies
from offstage.stages.dispatch.streaming.tensor_copies import LargeCopies, is_large

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64, torch.float8_e4m3fn)


def drawn(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    size = torch.empty(shape, dtype=dtype).nbytes
    values = torch.randint(0, 2 if dtype == torch.bool else 100, (size,), dtype=torch.uint8)
    return values.view(dtype).view(shape)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


@pytest.mark.parametrize("dtype", DTYPES)
def test_tensors_come_back_however_they_lie(dtype: torch.dtype) -> None:
    pool = drawn(dtype, 2048, 1030)
    tensors = [
        drawn(dtype, 3_000_001), drawn(dtype, 1, 1, 1500, 1500).transpose(2, 3), pool[3:-2:2, 5:], pool[:, ::3]
    ]  # fmt: skip
    assert all(map(is_large, tensors[:1]))
    copies, before = LargeCopies(), [bits(tensor).clone() for tensor in tensors]
    copies.keep(tensors)
    for tensor in tensors:
        tensor.zero_()
    for tensor in tensors:
        copies.put_back(tensor)
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip(tensors, before, strict=True))


def test_only_what_was_written_since_is_copied_again(monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []
    first, second = torch.ones(1 << 20), torch.ones(1 << 19)
    copies = LargeCopies()
    write = tensor_copies.write_into

    def count(tensor: torch.Tensor, values: torch.Tensor) -> None:
        written.extend([values.nbytes] if tensor is not first and tensor is not second else [])
        write(tensor, values)

    monkeypatch.setattr(tensor_copies, "write_into", count)
    copies.keep([first, second])
    assert sum(written) == first.nbytes + second.nbytes
    first.zero_()
    copies.put_back(first)
    copies.keep([first, second])
    assert sum(written) == first.nbytes + second.nbytes, "as it was again"
    second.add_(1)
    copies.keep([first, second])
    assert sum(written) == first.nbytes + 2 * second.nbytes
    second.zero_()
    copies.put_back(second)
    assert bool((second == 2).all())
    third = torch.zeros(1 << 20)
    copies.keep([third])
    third.add_(1)
    copies.put_back(third)
    assert not third.any()


def test_a_disk_without_room_is_named_once_a_copy_is_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    copies, tensor = LargeCopies(), torch.ones(1 << 20)
    copies.keep([tensor])
    tensor.zero_()
    with pytest.raises(StorageError, match=r"gone: .* 4194304 bytes .* TMPDIR"):
        copies.put_back(tensor)
    monkeypatch.undo()
    copies.keep([tensor])
    tensor.add_(1)
    copies.put_back(tensor)
    assert not tensor.any()


def test_no_file_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    copies = LargeCopies()
    copies.keep([torch.ones(1 << 20)])
    assert not [*tmp_path.iterdir()]
    assert len(open_in(tmp_path)) == 1
    del copies
    assert not open_in(tmp_path)


def open_in(folder: Path) -> list[str]:
    """Return the files of ``folder`` that this process has open."""
    links = [os.path.realpath(number) for number in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(str(folder))]
