"""How far a training is, on disk: the weights that learn, and what the optimizer keeps of each.

It is one safetensors file, written tensor by tensor, so that saving holds nothing twice, and a small sealed JSON beside
it, written after it, that says its step and what the file must be. A kill leaves the state from before or the one from
after; one that the disk has changed is set aside, and the training begins anew. After the last step it is the weights
alone: they are there until they are published as a checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict
from hashlib import sha256
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from offstage.pipeline.atomic_files import sync_folder, write_pieces
from offstage.pipeline.cache.sealed_files import DamagedError, move_aside, read_sealed, verify_listed, write_sealed
from offstage.pipeline.stage import FileEntry
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.machine.aligned_memory import byte_view

POINTER = "state.json"
_CODES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
}  # fmt: skip
"""What safetensors calls the dtypes that can learn."""

Parameters = Mapping[str, torch.Tensor]


class TrainingState:
    """The state in ``folder`` of a training of ``parameters`` by ``optimizer``, which is to take so many ``steps``."""

    def __init__(self, folder: Path, parameters: Parameters, optimizer: torch.optim.Optimizer, *, steps: int) -> None:
        self._folder, self._parameters, self._optimizer, self._steps = folder, parameters, optimizer, steps

    def load(self, steps: Collection[int]) -> int:
        """Bring back the state that was saved last, and return how many steps it had done: 0 where there is none.

        ``steps`` are those whose results are there. A state of others is no use: what it lacks can't be told again.
        """
        try:
            content = read_sealed(self._folder / POINTER)
            if content is None:
                return 0
            step, file = self._find(content, steps)
            self._bring_back(file)
        except DamagedError as damage:
            move_aside(self._folder / POINTER, damage)
            return 0
        return step

    def save(self, step: int) -> None:
        """Keep the state after so many steps, in place of the one before."""
        self._folder.mkdir(exist_ok=True)
        file = self._folder / f"state-{step}.safetensors"
        entry = _write(file, dict(self._tensors(is_last=step == self._steps)))
        write_sealed(self._folder / POINTER, {"step": step, "files": {file.name: asdict(entry)}})
        for other in self._folder.glob("state-*.safetensors"):
            if other != file:
                other.unlink(missing_ok=True)

    def _find(self, content: Any, steps: Collection[int]) -> tuple[int, Path]:
        """Return the step that a state's ``content`` says, and its file, which is as it was written."""
        match content:
            case {"step": int(step), "files": dict(listing)} if 0 < step <= self._steps and len(listing) == 1:
                (name,) = verify_listed(self._folder, listing, full=True)
            case _:
                raise DamagedError("is no state of this training")
        if not all(number in steps for number in range(step)):
            raise DamagedError(f"of the {step} steps that it is of, some have no line any more")
        return step, self._folder / name

    def _tensors(self, *, is_last: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what is kept by the name that it has in the file: ``parameter NAME``, or what the optimizer has."""
        for name, parameter in self._parameters.items():
            yield f"parameter {name}", parameter
            for kind, value in {} if is_last else self._optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    yield f"{kind} {name}", value

    def _bring_back(self, path: Path) -> None:
        with safe_open(path, framework="pt") as file:
            shapes = {f"parameter {name}": list(parameter.shape) for name, parameter in self._parameters.items()}
            keys = sorted(file.keys())
            saved_shapes = {key: file.get_slice(key).get_shape() for key in keys if key.startswith("parameter ")}
            if saved_shapes != shapes:
                raise DamagedError("is of other weights than those that learn")
            for key in keys:
                self._bring_back_one(key, file.get_tensor(key))

    def _bring_back_one(self, key: str, value: torch.Tensor) -> None:
        kind, _, name = key.partition(" ")
        parameter = self._parameters[name]
        if kind == "parameter":
            with torch.no_grad():
                parameter.copy_(value)
        else:  # the count of steps is a scalar that stays on the host
            self._optimizer.state[parameter][kind] = value.clone() if not value.dim() else value.to(parameter.device)


def _write(path: Path, tensors: Mapping[str, torch.Tensor]) -> FileEntry:
    """Write ``tensors`` to ``path`` as safetensors, one by one, and return the size and the hash of the file."""
    header, end = {}, 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        entry = {"dtype": _CODES[dtype_name(tensor.dtype)], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = sha256()
    write_pieces(path, _pieces(text, tensors.values(), digest.update))
    sync_folder(path.parent)
    return FileEntry(size=path.stat().st_size, sha256=digest.hexdigest())


def _pieces(
    header: bytes, tensors: Iterable[torch.Tensor], update: Callable[[bytes | memoryview], object]
) -> Iterator[bytes | memoryview]:
    """Yield what stands in the file, piece by piece, each once ``update`` has had it; of what lies on an accelerator
    one tensor is on the host.
    """
    begin: list[bytes | memoryview] = [len(header).to_bytes(8, "little"), header]
    for piece in chain(begin, (byte_view(tensor.detach().to("cpu").contiguous()) for tensor in tensors)):
        update(piece)
        yield piece
