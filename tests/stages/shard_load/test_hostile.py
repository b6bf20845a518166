"""Bytes flipped, cut out and put in: either the right tensors or a typed error, never anything else.

A flip inside the data can't be seen by the format, so there the tensors must be what the bytes say.
"""

import os
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.checkpoint import open_checkpoint
from offstage.stages.checkpoints.readers import open_reader
from tests.long_form import LONG_FORM

TENSORS = {"a.weight": torch.arange(24.0).view(4, 6), "a.bias": torch.arange(4).int(), "b": torch.ones(3).half()}
ROUNDS, BINS = (3000, 400) if os.environ.get(LONG_FORM) else (600, 100)


def flip(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(len(content))] ^= 1 << chance.randrange(8)


def replace(content: bytearray, chance: random.Random) -> None:
    content[chance.randrange(len(content))] = chance.choice(b'0123456789-,:[]{}"\\ \x00\xff')


def truncate(content: bytearray, chance: random.Random) -> None:
    del content[chance.randrange(len(content)) :]


def splice(content: bytearray, chance: random.Random) -> None:
    begin, source = chance.randrange(len(content)), chance.randrange(len(content))
    content[begin : begin + chance.randrange(4)] = content[source : source + chance.randrange(20)]


def write_anew(path: Path, content: bytes) -> None:
    """Write another file: one that is written over is waited for, until storage has what was in it."""
    path.unlink()
    path.write_bytes(content)


def read_all(path: Path) -> dict[str, torch.Tensor]:
    reader = open_reader(open_checkpoint(path))
    return {name: reader.read(name, getattr(torch, entry.dtype)) for name, entry in reader.entries.items()}


def read_or_refuse(path: Path) -> dict[str, torch.Tensor] | None:
    """Return the tensors, or null after a typed error that names the file; any other error fails the test."""
    try:
        return read_all(path)
    except CheckpointError as error:
        words = str(error)
    assert str(path) in words
    return None


@pytest.mark.parametrize("damage", [flip, replace, truncate, splice])
def test_a_damaged_safetensors_file_gives_its_tensors_or_a_typed_error(tmp_path: Path, damage: object) -> None:
    chance = random.Random(0)
    whole = save(TENSORS)
    data_begins = 8 + int.from_bytes(whole[:8], "little")
    path = tmp_path / "m.safetensors"
    path.touch()
    refused = 0
    for _ in range(ROUNDS):
        content = bytearray(whole)
        for _ in range(chance.choice([1, 1, 1, 3])):
            if content:
                damage(content, chance)
        write_anew(path, content)
        outcome = read_or_refuse(path)
        if outcome is None:
            refused += 1
        elif content[:data_begins] == whole[:data_begins]:
            assert outcome.keys() == TENSORS.keys()
            assert len(content) == len(whole)
            for name, tensor in outcome.items():
                assert (tensor.shape, tensor.dtype) == (TENSORS[name].shape, TENSORS[name].dtype)
    assert refused > ROUNDS // 10


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("old", [False, True])
def test_a_damaged_bin_gives_its_tensors_or_a_typed_error(tmp_path: Path, old: bool) -> None:
    chance = random.Random(0)
    path = tmp_path / "m.bin"
    torch.save(TENSORS, path, _use_new_zipfile_serialization=not old)
    whole = path.read_bytes()
    for _ in range(BINS):
        content = bytearray(whole)
        chance.choice([flip, flip, truncate, splice])(content, chance)
        write_anew(path, content)
        outcome = read_or_refuse(path)
        assert outcome is None or all(isinstance(tensor, torch.Tensor) for tensor in outcome.values())
