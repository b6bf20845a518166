"""What the cache keeps: manifests and artifacts, what was measured, offload stores. Served as it was, or made again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from offstage.pipeline.cache import housekeeping
from offstage.pipeline.cache.block_sums import find_store_damage
from offstage.pipeline.cache.store import Store
from offstage.stages.machine.kept_figures import kept_figure
from offstage.stages.shard_load.offload_folder import OffloadedWeightsLoader, offload_state_dict
from offstage.stages.shard_load.offload_store import StoredTensor, open_store
from tests.fuzz.formats import RIGHT, Format, files_of, require
from tests.fuzz.mutations import BYTES, JSON
from tests.fuzz.weights import same

STAGE, KEYS = "plan", ("a" * 64, "b" * 64)
ARTIFACT = {"plan.json": b'{"main_device": "cpu"}', "pictures/plan.svg": b"<svg/>" * 50, "empty": b""}
TENSORS = {
    "a.weight": torch.arange(12.0).view(3, 4),
    "b.bias": torch.arange(5, dtype=torch.int16),
    "c": torch.ones(3).half(),
}
RATES = {"host": 10**10, "storage 64512 again": 2 * 10**9}
KERNELS = {"torch 2; x86": {"mm bfloat16": [0, 0, 2.0], "bmm bfloat16": [0.5, 1, 4]}}


def _write_artifact(folder: Path) -> None:
    for name, content in ARTIFACT.items():
        folder.joinpath(name).parent.mkdir(exist_ok=True)
        folder.joinpath(name).write_bytes(content)


def _make_artifacts(folder: Path) -> None:
    for key in KEYS:
        Store(folder).obtain(STAGE, key, _write_artifact)


def _attempt_artifacts(folder: Path, pristine: Path) -> str:
    """Find, judge, and obtain again: what is served is what was written, byte for byte."""
    for entry in housekeeping.entries(folder):
        damage = housekeeping.find_damage(entry)
        stored = Store(folder).find(STAGE, entry.key)
        require((stored is None) == (damage is not None), f"judged {damage!r}, and found {stored!r}")
    for key in KEYS:
        artifact, _, _ = Store(folder).obtain(STAGE, key, _write_artifact)
        require(artifact.files.keys() >= ARTIFACT.keys(), f"lists {sorted(artifact.files)}")
        for name, content in ARTIFACT.items():
            require(artifact.path(name).read_bytes() == content, f"{name} is another")
            require(artifact.digest(name) == _digest(pristine, key, name), f"{name} has another hash")
    return RIGHT


def _digest(pristine: Path, key: str, name: str) -> str:
    return str(json.loads((pristine / STAGE / key / "manifest.json").read_text())["files"][name]["sha256"])


def _make_figures(folder: Path) -> None:
    _figures(folder)


def _figures(folder: Path) -> dict[str, Any]:
    return {
        key: kept_figure(folder, f"{name}.json", key, lambda kept=figure: kept)
        for name, figures in (("rates", RATES), ("kernels", KERNELS))
        for key, figure in figures.items()
    }


def _attempt_figures(folder: Path, pristine: Path) -> str:
    """Ask twice: what was kept or is measured again is there, whatever became of the files."""
    require(_figures(folder) == _figures(folder) == {**RATES, **KERNELS}, "another figure")
    return RIGHT


def _stored() -> dict[str, StoredTensor]:
    return {
        name: StoredTensor(str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), (f"source.{name}",))
        for name, tensor in TENSORS.items()
    }


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes())


def _make_store(folder: Path) -> None:
    _fill(folder / "offload")


def _fill(folder: Path) -> dict[str, bytes]:
    """Find all tensors in the store, put what isn't there, and return what each comes to."""
    store, wanted = open_store(folder, "key"), _stored()
    located = store.find(wanted, full=True)
    with store.locked():
        for name in wanted.keys() - located.keys():
            store.put(name, wanted[name], [memoryview(_bytes(TENSORS[name]))])
        store.publish()
    located = store.find(wanted)
    require(located.keys() == wanted.keys(), f"after filling, only {sorted(located)}")
    return {name: at.file.path.read_bytes() for name, at in located.items() if at}


def _attempt_store(folder: Path, pristine: Path) -> str:
    """Fill the store again: what it serves is what was put, and what it didn't notice nobody harmed."""
    place = folder / "offload"
    data = {name: content for name, content in files_of(place).items() if name.endswith(".dat")}
    whole = all(data.get(f"{name}.dat") == _bytes(tensor) for name, tensor in TENSORS.items())
    same_index = (place / "index.json").read_bytes() == (pristine / "offload" / "index.json").read_bytes()
    damage = find_store_damage(place)
    require(not same_index or (damage is None) == whole, f"found {damage!r}, and the data is whole: {whole}")
    served = _fill(place)
    for name, content in served.items():
        require(content == _bytes(TENSORS[name]), f"{name}: {content!r}")
    return RIGHT


def _make_folder(folder: Path) -> None:
    offload_state_dict(folder / "offload", TENSORS)


def _attempt_folder(folder: Path, _pristine: Path) -> str:
    """Read each tensor as its index says: the bytes of its file, in that dtype and shape."""
    loader = OffloadedWeightsLoader(save_folder=folder / "offload")
    for name in loader:
        tensor, entry = loader[name], loader.index[name]
        data = (folder / "offload" / str(entry.get("file", f"{name}.dat"))).read_bytes()
        wanted = torch.frombuffer(bytearray(data or b"\0" * 16), dtype=tensor.dtype)[: tensor.numel()].view(
            tensor.shape
        )
        require(str(tensor.dtype) == f"torch.{entry['dtype']}" and same(tensor, wanted), f"{name}: {tensor!r}")
    return RIGHT


FORMATS = (
    Format("artifact", _make_artifacts, ("*/manifest.json", f"{STAGE}/*"), JSON, _attempt_artifacts),
    Format("figures", _make_figures, ("*.json",), JSON, _attempt_figures),
    Format("store", _make_store, ("offload/*.json", "offload/*.json", "offload/*.dat"), JSON, _attempt_store),
    Format("offload folder", _make_folder, ("offload/*",), (*JSON, *BYTES), _attempt_folder),
)
