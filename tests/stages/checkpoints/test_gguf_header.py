import struct
from pathlib import Path

import numpy as np
import pytest

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.gguf_header import MAX_HEADER_BYTES, read_gguf_header
from tests.stages.checkpoints.ggufs import KEYS, STRING, key, raw_gguf, settings, tensor, text

A = tensor("a", [4, 2])
DATA = bytes(32)
HUGE = 2**63
ENDLESS = text("k") + struct.pack("<IIQ", 9, STRING, 999)
LISTS = [text(name) + struct.pack("<IIQ", 9, 0, 2_500_000) + bytes(2_500_000) for name in ("j", "k")]

REFUSED = {
    "an empty name of a format": (b"GGML" + bytes(60), "not a GGUF file"),
    "a file of less than a head": (b"GGUF\3", "truncated"),
    "version 1": (raw_gguf([A], data=DATA, version=1), "version 1"),
    "version 4": (raw_gguf([A], data=DATA, version=4), "version 4"),
    "a big-endian file": (b"GGUF" + struct.pack(">IQQ", 3, 1, 1) + bytes(99), "big-endian"),
    "no tensors": (raw_gguf([]), "no tensors"),
    "a huge count of tensors": (raw_gguf([A], data=DATA, counts=(HUGE, 1)), "at most 1000000"),
    "a huge count of keys": (raw_gguf([A], data=DATA, counts=(1, HUGE)), "at most 1000000"),
    "more tensors than there are": (raw_gguf([A], data=DATA, counts=(900_000, 1)), "an empty name"),
    "a key beyond the end": (raw_gguf([A], [struct.pack("<Q", HUGE)], DATA), "a key would end at byte"),
    "a text beyond the end": (raw_gguf([A], [text("k") + struct.pack("<IQ", 8, 999)], DATA), "'k' would end at"),
    "a list beyond the end": (raw_gguf([A], [text("k") + struct.pack("<IIQ", 9, 12, 999)]), "'k' would end at"),
    "a list of texts beyond the end": (raw_gguf([A], [ENDLESS], DATA), "'k' would end at byte"),
    "a list of more than there can be": (raw_gguf([A], [text("k") + struct.pack("<IIQ", 9, 0, HUGE)]), "'k' is a list"),
    "lists of too much together": (raw_gguf([A], LISTS, bytes(9_000_000)), "of 4000000 in all"),
    "a list of lists": (raw_gguf([A], [text("k") + struct.pack("<IIQ", 9, 9, 1)], DATA), "a list of type 9"),
    "a type that there isn't": (raw_gguf([A], [text("k") + struct.pack("<I", 99)], DATA), "of type 99"),
    "a key twice": (raw_gguf([A], settings(KEYS) * 2, DATA), "'general.architecture' twice"),
    "a key that is no text": (raw_gguf([A], [struct.pack("<Q", 2) + b"\xff\xfe"], DATA), "not UTF-8"),
    "no architecture": (raw_gguf([A], [], DATA), "no general.architecture"),
    "an architecture that is a number": (raw_gguf([A], [key("general.architecture", 1)], DATA), "no general.arch"),
    "one of several files": (raw_gguf([A], settings({**KEYS, "split.count": 3}), DATA), "one of 3 files"),
    "an alignment of zero": (raw_gguf([A], settings({**KEYS, "general.alignment": 0}), DATA), "alignment is 0"),
    "an alignment of 3": (raw_gguf([A], settings({**KEYS, "general.alignment": 3}), DATA), "power of two"),
    "an alignment that is a text": (raw_gguf([A], settings({**KEYS, "general.alignment": "8"}), DATA), "power of"),
    "an alignment of two GB": (raw_gguf([A], settings({**KEYS, "general.alignment": 2**31}), DATA), "truncated"),
    "an unaligned offset": (raw_gguf([tensor("a", [4], offset=4)], data=DATA), "'a': the offset 4"),
    "a truncated file": (raw_gguf([A], data=bytes(31)), "truncated: tensor 'a'"),
    "an offset beyond the end": (raw_gguf([tensor("a", [4], offset=2**62)], data=DATA), "truncated: tensor 'a'"),
    "overlapping tensors": (raw_gguf([A, tensor("b", [4])], data=DATA), "'a' overlaps 'b'|'b' overlaps 'a'"),
    "a tensor twice": (raw_gguf([A, A], data=DATA), "tensor 'a' twice"),
    "a name without end": (raw_gguf([tensor("a" * 10_000, [4])], data=DATA), "more than 1024 letters"),
    "a name with a path": (raw_gguf([tensor("../a", [4])], data=DATA), "a path in it"),
    "no dimensions": (raw_gguf([tensor("a", [])], data=DATA), "'a' has 0 dimensions"),
    "many dimensions": (raw_gguf([text("a") + struct.pack("<I", 2**31)], data=DATA), "dimensions; one to 4"),
    "a size of zero": (raw_gguf([tensor("a", [0, 4])], data=DATA), "'a': shape"),
    "sizes that overflow": (raw_gguf([tensor("a", [2**40, 2**40])], data=DATA), "'a': shape"),
    "a type that isn't served": (raw_gguf([tensor("a", [256], code=28)], data=DATA), "F64, which isn't served"),
    "a type that nobody knows": (raw_gguf([tensor("a", [4], code=99)], data=DATA), "type 99, which isn't served"),
    "rows that are no whole blocks": (raw_gguf([tensor("a", [48], code=8)], data=DATA), "no multiple of the 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_file_is_refused_in_one_line(tmp_path: Path, case: str) -> None:
    content, words = REFUSED[case]
    path = tmp_path / "model.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=words) as caught:
        read_gguf_header(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_header_that_never_ends_is_refused_before_it_is_read(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(raw_gguf([A], [text("k") + struct.pack("<IQ", 8, 2**40)], DATA))
    with path.open("r+b") as file:
        file.truncate(2**41)
    with pytest.raises(CheckpointError, match=f"at most {MAX_HEADER_BYTES}"):
        read_gguf_header(path)


def test_it_says_where_each_tensor_lies(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    table = [tensor("a", [4, 2]), tensor("b", [64, 3, 5], code=8, offset=32)]
    keys = settings({"general.alignment": 32, **KEYS, "tokens": ["a", "", "ß"]})
    path.write_bytes(raw_gguf(table, keys, DATA + bytes(15 * 68)))
    header = read_gguf_header(path)
    start = path.stat().st_size - 32 - 15 * 68
    assert header.architecture == "llama"
    a, b = header.tensors["a"], header.tensors["b"]
    assert (a.kind, a.shape, a.extent.begin, a.extent.shape) == ("f32", (2, 4), start, (2, 16))
    assert (b.kind, b.shape, b.extent.begin, b.extent.shape) == ("q8_0", (5, 3, 64), start + 32, (15, 68))


def test_its_digest_is_that_of_the_head_alone(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"

    def digest(data: bytes, name: str = "a") -> str:
        path.write_bytes(raw_gguf([tensor(name, [4, 2])], data=data))
        return read_gguf_header(path).file.digest

    assert digest(bytes(32)) == digest(bytes([1] * 32)) != digest(bytes(32), "b")


def test_the_package_of_the_format_writes_what_is_read(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    path = tmp_path / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_merges(["a b"] * 9)
    writer.add_float32("llama.x", 0.5)
    writer.add_array("llama.sections", [1, 2, 3])
    writer.add_tensor("plain", np.arange(12, dtype=np.float32).reshape(3, 4))
    packed = gguf.quants.quantize(np.ones((3, 64), np.float32), gguf.GGMLQuantizationType.Q4_0)
    writer.add_tensor("packed", packed, raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    theirs = {read.name: read for read in gguf.GGUFReader(path).tensors}
    for name, ours in read_gguf_header(path).tensors.items():
        assert (ours.extent.begin, ours.extent.bytes) == (theirs[name].data_offset, theirs[name].n_bytes)
        assert ours.shape == tuple(reversed(theirs[name].shape.tolist()))
