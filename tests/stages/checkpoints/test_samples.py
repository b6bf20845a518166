"""Which bytes of a tensor say what it is, and that they say so wherever it lies."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.stages.checkpoints.checkpoint import entries_by_file, open_checkpoint
from offstage.stages.checkpoints.samples import BLOCK_BYTES, BLOCKS, places, sample

WHOLE = BLOCKS * BLOCK_BYTES


def digests(path: Path) -> dict[str, str]:
    ((file, entries),) = entries_by_file(open_checkpoint(path))
    return dict(zip(entries, sample(file, entries).tensors, strict=True))


@pytest.mark.parametrize("size", [0, 1, WHOLE - 1, WHOLE, WHOLE + 1, 10 * WHOLE + 3, 10**9])
def test_samples_lie_in_the_tensor_its_first_and_last_bytes_among_them(size: int) -> None:
    spans = places(size)
    assert spans[0][0] == 0
    assert spans[-1][0] + spans[-1][1] == size
    assert sum(count for _, count in spans) == min(size, WHOLE)
    assert all(begin + count <= after for (begin, count), (after, _) in pairwise(spans))


def test_a_tensor_has_one_digest_wherever_it_lies(tmp_path: Path) -> None:
    large, small = torch.randn(300, 400), torch.arange(7)
    save_file({"a": large, "z": small}, tmp_path / "one.safetensors")
    save_file({"m": torch.ones(999), "z": small, "a": large}, tmp_path / "other.safetensors")
    first, second = digests(tmp_path / "one.safetensors"), digests(tmp_path / "other.safetensors")
    assert {name: second[name] for name in first} == first
    save_file({"a": large.reshape(400, 300), "z": small.to(torch.int32)}, tmp_path / "one.safetensors")
    assert digests(tmp_path / "one.safetensors").items().isdisjoint(first.items()), "another shape, another dtype"


@pytest.mark.parametrize(("place", "seen"), [(0, True), (-1, True), (BLOCK_BYTES, False)])
def test_a_changed_byte_is_seen_where_a_sample_lies(tmp_path: Path, place: int, seen: bool) -> None:
    path = tmp_path / "x.safetensors"
    save_file({"a": torch.zeros(10 * WHOLE, dtype=torch.uint8)}, path)
    ((_, entries),) = entries_by_file(open_checkpoint(path))
    before, data = digests(path), bytearray(path.read_bytes())
    data[place if place < 0 else entries["a"].begin + place] ^= 1
    path.write_bytes(data)
    assert (digests(path) != before) is seen


def test_a_file_that_tells_no_tensors_is_sampled_over_all_of_it(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    torch.save({"a": torch.zeros(1000)}, path, _use_new_zipfile_serialization=False)
    ((file, entries),) = entries_by_file(open_checkpoint(path))
    assert entries == {}
    before, data = sample(file, entries), bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    ((file, _),) = entries_by_file(open_checkpoint(path))
    assert sample(file, {}).digest != before.digest
