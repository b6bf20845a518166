import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from offstage.pipeline.errors import CheckpointError
from offstage.stages.checkpoints.safetensors_header import DTYPES, MAX_HEADER_BYTES, read_header
from tests.stages.shard_load.checkpoints import entry, raw_safetensors

A = entry([2, 2], 0, 16)
DATA = bytes(16)

REFUSED = {
    "a file of less than a length": (b"abc", "too few"),
    "a header longer than the file": (raw_safetensors(b"{}", length=1000), "header of 1000 bytes in a file of"),
    "a header over 100 MB": (raw_safetensors(b"{}", length=MAX_HEADER_BYTES + 1), "at most 100000000"),
    "a header that is mostly padding": (raw_safetensors(json.dumps({"a": A}).encode() + b" " * 9000, DATA), "padding"),
    "a header that is not JSON": (raw_safetensors(b'{"a": '), "not valid JSON"),
    "a header nested without end": (raw_safetensors(b'{"a":' + b"[" * 200_000), "not valid JSON"),
    "a header with a number of 5000 digits": (raw_safetensors(b'{"a":' + b"1" * 5000 + b"}"), "not valid JSON"),
    "a header that is not an object": (raw_safetensors([1, 2]), "not a JSON object"),
    "a header that is not UTF-8": (raw_safetensors(b'{"\xff\xfe": 1}'), "not UTF-8"),
    "an empty header": (raw_safetensors(b""), "not a JSON object"),
    "no tensors": (raw_safetensors({"__metadata__": {}}), "no tensors"),
    "metadata that is not of strings": (raw_safetensors({"__metadata__": {"a": 1}, "a": A}, DATA), "__metadata__"),
    "a zip": (b"PK\x03\x04" + bytes(60), "a pickle"),
    "an old pickle": (b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19." + bytes(60), "a pickle"),
    "overlapping tensors": (raw_safetensors({"a": A, "b": entry([2, 2], 8, 24)}, bytes(24)), "'b' overlaps 'a'"),
    "a gap": (raw_safetensors({"a": A, "b": entry([1], 20, 24)}, bytes(24)), "gap of 4 bytes before tensor 'b'"),
    "a gap at the start": (raw_safetensors({"a": entry([1], 4, 8)}, bytes(8)), "gap of 4 bytes"),
    "bytes that belong to no tensor": (raw_safetensors({"a": A}, bytes(20)), "4 bytes after the last tensor, 'a'"),
    "a truncated file": (raw_safetensors({"a": A}, bytes(15)), "truncated: tensor 'a'"),
    "reversed offsets": (raw_safetensors({"a": entry([2, 2], 16, 0)}, DATA), "'a': reversed offsets"),
    "negative offsets": (raw_safetensors({"a": entry([2, 2], -16, 0)}, DATA), "'a': data_offsets"),
    "three offsets": (raw_safetensors({"a": {**A, "data_offsets": [0, 8, 16]}}, DATA), "'a': data_offsets"),
    "offsets that are not whole": (raw_safetensors({"a": {**A, "data_offsets": [0, 16.0]}}, DATA), "data_offsets"),
    "a shape that is not the bytes": (raw_safetensors({"a": entry([2, 3], 0, 16)}, DATA), "'a': shape [2, 3]"),
    "a negative shape": (raw_safetensors({"a": entry([-2, -2], 0, 16)}, DATA), "'a': shape"),
    "a shape of booleans": (raw_safetensors({"a": entry([True, 4], 0, 16)}, DATA), "'a': shape"),
    "a shape that overflows": (raw_safetensors({"a": entry([0, 2**40, 2**40], 0, 0)}), "'a': shape"),
    "an unknown dtype": (raw_safetensors({"a": {**A, "dtype": "F4"}}, DATA), "'a': unknown dtype 'F4'"),
    "a field too many": (raw_safetensors({"a": {**A, "more": 1}}, DATA), "'a': an entry has"),
    "a field too few": (raw_safetensors({"a": {"dtype": "F32"}}, DATA), "'a': an entry has"),
    "a duplicate name": (
        raw_safetensors(f'{{"a": {json.dumps(A)}, "a": {json.dumps(A)}}}'.encode(), DATA), "duplicate name 'a'",
    ),
    "an empty name": (raw_safetensors({"": A}, DATA), "an empty name"),
    "a name without end": (raw_safetensors({"a" * 10_000: A}, DATA), "more than 1024 letters"),
    "a name with NUL": (raw_safetensors({"a\0b": A}, DATA), "NUL"),
    "a name with a path": (raw_safetensors({"../../etc/passwd": A}, DATA), "a path in it"),
    "a name that is no text": (raw_safetensors(b'{"\\ud800": %s}' % json.dumps(A).encode(), DATA), "not text"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_bad_file_is_refused_by_name(tmp_path: Path, case: str) -> None:
    content, words = REFUSED[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def test_over_a_million_tensors_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offstage.stages.checkpoints.safetensors_header.MAX_TENSORS", 2)
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw_safetensors({f"t{i}": entry([1], 4 * i, 4 * i + 4) for i in range(3)}, bytes(12)))
    with pytest.raises(CheckpointError, match="3 tensors; at most 2"):
        read_header(path)


def test_every_dtype_is_read_as_the_library_wrote_it(tmp_path: Path) -> None:
    tensors = {f"t_{name}": torch.zeros(3, 5).to(getattr(torch, name)) for name in DTYPES.values()}
    path = tmp_path / "a.safetensors"
    save_file(tensors, path, metadata={"format": "pt"})
    file, entries = read_header(path)
    assert {name: (e.dtype, e.shape) for name, e in entries.items()} == {
        name: (str(t.dtype).removeprefix("torch."), (3, 5)) for name, t in tensors.items()
    }
    assert max(e.end for e in entries.values()) == file.size


def test_empty_and_scalar_tensors_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_file({"scalar": torch.tensor(3.0), "empty": torch.zeros(0, 4), "b": torch.ones(2)}, path)
    _, entries = read_header(path)
    assert (entries["scalar"].shape, entries["empty"].shape) == ((), (0, 4))


def test_a_header_aligned_to_a_page_is_fine(tmp_path: Path) -> None:
    text = json.dumps({"a": A}).encode()
    path = tmp_path / "a.safetensors"
    path.write_bytes(raw_safetensors(text.ljust(4096 - 8), DATA))
    assert read_header(path)[1]["a"].begin == 4096
