"""Named tensors from files: the same as were saved, and nothing that a stranger may have put there instead."""

from __future__ import annotations

import io
import os
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import ConfigError
from offstage.stages.inputs.tensor_files import TensorHead, read_heads, read_tensors

NAMED = {"input_ids": torch.arange(6).reshape(2, 3), "scale": torch.tensor([0.5, 2.0]), "flag": torch.tensor(True)}


def save(file: Path) -> Path:
    if file.suffix == ".npz":
        np.savez_compressed(file, **{name: tensor.numpy() for name, tensor in NAMED.items()})
    else:
        save_file(NAMED, file)
    return file


@pytest.mark.parametrize("name", ["a.npz", "a.safetensors"])
def test_tensors_come_back_as_they_were_saved(name: str, tmp_path: Path) -> None:
    file = save(tmp_path / name)
    tensors, heads = read_tensors("forward.inputs", file), read_heads("forward.inputs", file)
    assert tensors.keys() == NAMED.keys() == heads.keys()
    for key, tensor in NAMED.items():
        assert torch.equal(tensors[key], tensor)
        assert heads[key] == TensorHead(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))


def test_arrays_of_another_order_are_read(tmp_path: Path) -> None:
    array = np.arange(6, dtype=">f4").reshape(2, 3)
    np.savez(tmp_path / "a.npz", big=array, columns=np.asfortranarray(array.astype("<f4")))
    tensors = read_tensors("forward.inputs", tmp_path / "a.npz")
    assert torch.equal(tensors["big"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(tensors["columns"], torch.arange(6.0).reshape(2, 3))


class Harm:
    """Pickled, this would make a folder as it is loaded."""

    def __reduce__(self) -> tuple[Callable[[str], None], tuple[str]]:
        return os.mkdir, ("harm-was-done",)


def objects() -> bytes:
    out = io.BytesIO()
    np.savez(out, input_ids=np.array([Harm()], dtype=object))
    return out.getvalue()


def zipped(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name.replace("__", "."), data)
    return out.getvalue()


def npy(shape: str, descr: str = "<f4", data: bytes = b"") -> bytes:
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode() + data


BAD = {
    "a pickle of objects": (objects(), "has dtype object"),
    "a pickle in an array's place": (zipped(a__npy=b"\x80\x04cos\nsystem\n"), "magic string"),
    "no zip": (b"PK\x03\x04junk", "is no .npz of plain arrays: BadZipFile"),
    "an empty file": (b"", "is no .npz of plain arrays"),
    "an empty zip": (zipped(), "it holds no arrays"),
    "another file in it": (zipped(a__txt=b"text"), "is no array"),
    "more than is there": (zipped(a__npy=npy("(1000000000000,)")), "takes another number"),
    "a structure": (zipped(a__npy=npy("(1,)", "|V4", b"abcd")), "none of numbers that torch has"),
    "a negative size": (zipped(a__npy=npy("(-1,)")), "another number|shape"),
    "a head that is code": (zipped(a__npy=npy("__import__('os').getcwd()")), "is no .npz of plain arrays"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_hostile_npz_is_refused_in_one_line(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, words = BAD[case]
    file = tmp_path / "bad.npz"
    file.write_bytes(data)
    monkeypatch.chdir(tmp_path)
    for read in (read_heads, read_tensors):
        with pytest.raises(ConfigError, match=words) as caught:
            read("forward.inputs", file)
        assert str(caught.value).startswith("forward.inputs: ")
        assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == [file]


def test_what_unpacks_to_too_much_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offstage.stages.inputs.tensor_files.MOST_BYTES", 1000)
    np.savez_compressed(tmp_path / "zeros.npz", a=np.zeros(10_000))
    with pytest.raises(ConfigError, match="at most 1000 are accepted"):
        read_heads("forward.inputs", tmp_path / "zeros.npz")


def test_a_hostile_safetensors_file_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "bad.safetensors"
    for data, words in ((b"", "an empty file"), ((2**60).to_bytes(8, "little") + b"{}", "header of")):
        file.write_bytes(data)
        with pytest.raises(ConfigError, match=f"forward.inputs: .*{words}"):
            read_heads("forward.inputs", file)
    for name in ("a.pt", "a.pkl"):
        with pytest.raises(ConfigError, match=r"no \.safetensors or .npz file"):
            read_heads("forward.inputs", tmp_path / name)
    for name in ("none.npz", "none.safetensors"):
        with pytest.raises(ConfigError, match=r"can't be read|no such file"):
            read_heads("forward.inputs", tmp_path / name)
