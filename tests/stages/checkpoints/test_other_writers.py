"""Weights files as others write them: read as ``torch.load`` and safetensors read them, or refused by name."""

from __future__ import annotations

import json
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from safetensors.torch import load_file, save

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.readers import open_reader

few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.uint8, torch.int16, torch.int32,
    torch.int64, torch.bool, torch.complex64,
)  # fmt: skip
SHAPES = st.lists(st.integers(0, 5), max_size=4)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda tensor: tensor,
    "flipped axes": lambda tensor: tensor.permute(tuple(reversed(range(tensor.dim())))),
    "offset": lambda tensor: tensor[1:] if tensor.dim() else tensor,
    "every other": lambda tensor: tensor[..., ::2] if tensor.dim() else tensor,
    "expanded": lambda tensor: tensor.unsqueeze(0).expand(3, *tensor.shape),
    "parameter": lambda tensor: torch.nn.Parameter(tensor, requires_grad=False),
}


def filled(shape: list[int], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    count = torch.Size(shape).numel()
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return (data % 2 if dtype is torch.bool else data).view(dtype).reshape(shape)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors are of one shape and dtype and have the same bits, nan or not."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    both = [tensor.detach().clone(memory_format=torch.contiguous_format) for tensor in (one, other) if tensor.numel()]
    bits = [tensor.view(-1).view(torch.uint8) for tensor in both]
    return alike and (not bits or torch.equal(*bits))


@st.composite
def states(draw: st.DrawFn) -> dict[str, torch.Tensor]:
    """Tensors by name: of any dtype and shape, several views of one storage among them."""
    state = {}
    for index in range(draw(st.integers(1, 4))):
        base = filled(draw(SHAPES), draw(st.sampled_from(DTYPES)), draw(st.integers(0, 99)))
        for kind in draw(st.lists(st.sampled_from(sorted(VIEWS)), min_size=1, max_size=3)):
            state[f"t{index}.{kind}.{len(state)}"] = VIEWS[kind](base)
    return state


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@few
@given(states(), st.booleans(), st.sampled_from([2, 3, 4, 5]))
def test_any_bin_is_read_as_torch_reads_it(
    tmp_path: Path, state: dict[str, torch.Tensor], zipped: bool, protocol: int
) -> None:
    path = tmp_path / "m.bin"
    torch.save(state, path, pickle_protocol=protocol, _use_new_zipfile_serialization=zipped)
    if protocol > 3:  # torch reads these only where it lets code run
        with pytest.raises(CheckpointError, match=r"m\.bin: not a file of tensors alone"):
            open_reader(open_checkpoint(path))
        return
    wanted = torch.load(path, weights_only=False)
    reader = open_reader(open_checkpoint(path))
    assert reader.entries.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same(reader.borrow(name), tensor), name
        assert same(reader.read(name, tensor.dtype), tensor), name


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@few
@given(states(), st.integers(0, 63), st.randoms())
def test_any_safetensors_is_read_as_safetensors_reads_it(
    tmp_path: Path, state: dict[str, torch.Tensor], padding: int, chance: object
) -> None:
    packed = save({name: tensor.clone().contiguous() for name, tensor in state.items()}, {"by": "another writer"})
    size = int.from_bytes(packed[:8], "little")
    header = list(json.loads(packed[8 : 8 + size]).items())
    chance.shuffle(header)  # type: ignore[attr-defined]
    text = json.dumps(dict(header), indent=padding % 3).encode() + b" " * padding
    path = tmp_path / "m.safetensors"
    path.write_bytes(len(text).to_bytes(8, "little") + text + packed[8 + size :])
    reader = open_reader(open_checkpoint(path))
    wanted = load_file(path)
    assert reader.entries.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert same(reader.borrow(name), tensor), name
        assert same(reader.read(name, tensor.dtype), tensor), name


def packed_again(path: Path, method: int, *, only: str = "") -> None:
    """Pack the zip ``path`` again, the entries whose names hold ``only`` with another compression."""
    with zipfile.ZipFile(path) as archive:
        entries = [(entry.filename, archive.read(entry)) for entry in archive.infolist()]
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries:
            archive.writestr(name, data, compress_type=method if only in name else zipfile.ZIP_STORED)


@pytest.mark.parametrize("method", [zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
@pytest.mark.parametrize("only", ["", "data/0", "data.pkl"])
def test_a_compressed_entry_is_refused_by_name(tmp_path: Path, method: int, only: str) -> None:
    path = tmp_path / "m.bin"
    torch.save({"a": torch.ones(1000)}, path)
    packed_again(path, method, only=only)
    with pytest.raises(CheckpointError, match=r"m\.bin: its entry '.*' is compressed"):
        open_checkpoint(path)


def test_a_zip_packed_again_without_compression_is_read(tmp_path: Path) -> None:
    path, tensor = tmp_path / "m.bin", torch.arange(1000.0)
    torch.save({"a": tensor}, path)
    packed_again(path, zipfile.ZIP_STORED)
    assert same(open_reader(open_checkpoint(path)).borrow("a"), tensor)


def test_two_entries_of_one_name_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    torch.save({"a": torch.ones(4)}, path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("m/data/0", b"\0" * 16)
    with pytest.raises(CheckpointError, match="two entries 'm/data/0'"):
        open_checkpoint(path)


def test_a_pickle_of_numpy_arrays_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "m.bin"
    path.write_bytes(pickle.dumps({"a": torch.ones(4).numpy()}))
    with pytest.raises(CheckpointError, match=r"m\.bin"):
        open_reader(open_checkpoint(path))
