"""How far a training is, on disk: the weights that learn, and what the optimizer keeps of each.

It is one safetensors file, written tensor by tensor, so that saving holds nothing twice, and a small JSON beside it,
written after it, that names it with its checksum. A kill leaves the state from before or the one from after; one that
the disk has changed is as if it weren't there, and the training begins anew.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import torch
from safetensors import safe_open

from pipeline.atomic_files import TEMPORARY, replace_file, sync_folder
from pipeline.errors import named
from pipeline.regular_files import open_regular, read_object
from stages.checkpoints.dtypes import dtype_name
from stages.machine.aligned_memory import byte_view

POINTER = "state.json"
_CHUNK = 2**22
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
}  # fmt: skip
"""What safetensors calls the dtypes that can learn."""

Parameters = Mapping[str, torch.Tensor]


class TrainingState:
    """The state in ``folder`` of a training of ``parameters`` by ``optimizer``."""

    def __init__(self, folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer) -> None:
        self._folder, self._parameters, self._optimizer = folder, parameters, optimizer

    def load(self) -> int:
        """Bring back the state that was saved last, and return how many steps it had done: 0 where there is none."""
        told = read_object(self._folder / POINTER)
        step, name, crc = (told.get(key) for key in ("step", "file", "crc32"))
        if not isinstance(step, int) or not isinstance(name, str) or Path(name).name != name:
            return 0
        if not (self._folder / name).is_file() or _crc(self._folder / name) != crc:
            return 0
        with safe_open(self._folder / name, framework="pt") as file:
            for key in sorted(file.keys()):
                self._bring_back(key, file.get_tensor(key))
        return step

    def save(self, step: int) -> None:
        """Keep the state after so many steps, in place of the one before."""
        file = self._folder / f"state-{step}.safetensors"
        crc = _write(file, dict(self._tensors()))
        replace_file(self._folder / POINTER, json.dumps({"step": step, "file": file.name, "crc32": crc}) + "\n")
        self._remove_all_but(file)

    def remove(self) -> None:
        """Remove the state: the training is at its end."""
        (self._folder / POINTER).unlink(missing_ok=True)
        self._remove_all_but(None)

    def _remove_all_but(self, kept: Path | None) -> None:
        for file in self._folder.glob("state-*.safetensors"):
            if file != kept:
                file.unlink(missing_ok=True)

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is kept by the name that it has in the file: ``parameter NAME``, or what the optimizer has."""
        for name, parameter in self._parameters.items():
            yield f"parameter {name}", parameter
            for kind, value in self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{kind} {name}", value

    def _bring_back(self, key: str, value: torch.Tensor) -> None:
        kind, _, name = key.partition(" ")
        parameter = self._parameters[name]
        if kind == "parameter":
            with torch.no_grad():
                parameter.copy_(value)
        else:  # the count of steps is a scalar that stays on the host
            self._optimizer.state[parameter][kind] = value.clone() if not value.dim() else value.to(parameter.device)


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> int:
    """Write ``tensors`` to ``path`` as safetensors, one by one, and return the checksum of the file."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entry = {"dtype": _CODES[dtype_name(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    written, crc = path.with_name(f"{TEMPORARY}{path.name}"), 0
    try:
        with named(path), written.open("wb") as file:
            for piece in _pieces(text, tensors.values()):
                file.write(piece)
                crc = zlib.crc32(piece, crc)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
        sync_folder(path.parent)
    finally:
        with suppress(OSError):
            written.unlink(missing_ok=True)
    return crc


def _pieces(header: bytes, tensors: Iterable[torch.Tensor]) -> Iterator[bytes | memoryview]:
    """Yield what stands in the file, piece by piece; of what lies on an accelerator one tensor is on the host."""
    yield len(header).to_bytes(8, "little")
    yield header
    for tensor in tensors:
        yield byte_view(tensor.detach().to("cpu").contiguous())


def _crc(path: Path) -> int:
    crc = 0
    with named(path), os.fdopen(open_regular(path), "rb") as file:
        while chunk := file.read(_CHUNK):
            crc = zlib.crc32(chunk, crc)
    return crc
