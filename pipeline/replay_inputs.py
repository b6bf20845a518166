"""The files that a replay works on, held against those of the run that it repeats: by what is in them.

Times and places have no part in it. What differs ends the replay with an error that names the file, and of weights the
tensor. What is other and no matter is returned as a line to say.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offstage.pipeline.cache.sealed_files import DamagedError, read_sealed
from offstage.pipeline.decoding import decode, encode
from offstage.pipeline.errors import CheckpointError
from offstage.pipeline.run_schema import Run, RunInputs
from offstage.pipeline.stage import TENSORS, SourceFiles

_SHOWN = 3
_LACKS_DIGESTS = "That run recorded no digests of its weights, so that they were compared with nothing."
_BY_INDEX = "The weights were compared by names and sizes alone (verify=index)."
_SHARDED_ANEW = (
    "The weights lie in other files than in that run, and all tensors are the same by name, dtype, shape and samples."
)

Entries = Mapping[str, Mapping[str, Sequence[Any]]]
"""File → tensor → dtype, shape and digest."""


def _read_tensors(path: Path) -> Entries:
    """Return what ``path`` holds of each tensor; nothing where it isn't there, or not as a run writes it."""
    kind: Any = Mapping[str, Mapping[str, tuple[Any, Any, Any]]]
    entries: Entries = {}
    with suppress(DamagedError, OSError, ValueError):
        entries = decode(kind, read_sealed(path))
    return entries


def hold(now: SourceFiles, then: Run, config: Mapping[str, Any]) -> list[str]:
    """Hold the files ``now`` of a stage against those of the run ``then``; return what to say of them.

    A ``CheckpointError`` names what isn't the same; ``config`` says where the files are.
    """
    noted = then.inputs or RunInputs()
    earlier = {**noted.whole, **encode(noted)}
    model, adapter = config.get("model") or {}, earlier.get("adapter")
    if "adapter" in now.inputs and isinstance(adapter, Mapping):
        other = [name for name, digest in now.inputs["adapter"].items() if name in adapter and adapter[name] != digest]
        _refuse(model.get("adapter"), [f"{name} has other bytes than in that run" for name in other])
    if "weights" not in now.inputs:
        return []
    if not earlier.get("weights"):
        return [_LACKS_DIGESTS]
    tensors = _read_tensors(then.folder / TENSORS)
    return _hold_weights(model.get("path"), earlier["weights"], now.inputs["weights"], tensors, now.tensors)


def _hold_weights(
    path: object, then: Mapping[str, Any], now: Mapping[str, Any], tensors_then: Entries, tensors_now: Entries
) -> list[str]:
    if then.get("config") != now["config"]:
        _refuse(path, ["config.json has other bytes than in that run"])
    before, files = {file["name"]: file for file in then["files"]}, {file["name"]: file for file in now["files"]}
    if any(file["sampled"] is None for file in (*before.values(), *files.values())):
        _refuse(path, _other_files(before, files, ("size",)))
        return [_BY_INDEX]
    others = list(_other_files(before, files, ("size", "header", "sampled", "sha256")))
    if not others:
        return []
    named = list(_other_tensors(tensors_then, tensors_now)) if tensors_then and tensors_now else None
    if named:
        _refuse(path, named)
    if then.get("verify") == "full" or named is None or _is_beside_samples(before, files):
        why = "; all its samples are the same" if named == [] else ""
        _refuse(path, [f"{other}{why}" for other in others])
    return [_SHARDED_ANEW]


def _other_files(then: Mapping[str, Any], now: Mapping[str, Any], parts: Sequence[str]) -> Iterator[str]:
    """Yield which files differ in one of ``parts``, are missing, or are new."""
    for name, file in now.items():
        if name not in then:
            yield f"{name} is no file of that run"
        elif not _is_same(then[name], file, parts):
            yield f"{name} has other bytes than in that run"
    yield from (f"{name} is missing" for name in then if name not in now)


def _is_beside_samples(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Whether a file differs in its SHA-256 and in nothing else that is known: what changed lies beside the samples."""
    both = [(then[name], now[name]) for name in now if name in then]
    return any(
        _is_same(was, now_is, ("size", "header")) and not _is_same(was, now_is, ("sha256",)) for was, now_is in both
    )


def _is_same(then: Mapping[str, Any], now: Mapping[str, Any], parts: Sequence[str]) -> bool:
    """Whether two files are the same in ``parts``; what one of the two doesn't know isn't held against the other."""
    pairs = [(then.get(part), now.get(part)) for part in parts]
    return all(was == now_is for was, now_is in pairs if was is not None and now_is is not None)


def _other_tensors(then: Entries, now: Entries) -> Iterator[str]:
    """Yield how each tensor differs that does, wherever it lies, with the file that it lies in."""
    before = {name: (file, entry) for file, tensors in then.items() for name, entry in tensors.items()}
    here = {name: (file, entry) for file, tensors in now.items() for name, entry in tensors.items()}
    for name, (file, entry) in here.items():
        difference = _difference(before[name][1], entry) if name in before else "wasn't there in that run"
        if difference:
            yield f"{file}: {name} {difference}"
    yield from (f"{file}: {name} is missing" for name, (file, _) in before.items() if name not in here)


def _difference(then: Sequence[Any], now: Sequence[Any]) -> str | None:
    """Return in words what a tensor is now, where that isn't what it was then."""
    for part, was, now_is in zip(("dtype", "shape"), then, now, strict=False):
        if was != now_is:
            return f"is of {part} {now_is}, and was of {was} in that run"
    return "has other bytes than in that run" if then[2] != now[2] else None


def _refuse(path: object, differences: Sequence[str] | Iterator[str]) -> None:
    """Raise a ``CheckpointError`` where there are ``differences`` in what ``path`` is."""
    listed = list(differences)
    if listed:
        more = f"; and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else ""
        message = "; ".join(listed[:_SHOWN])
        raise CheckpointError(f"{path}: {message}{more}; restore the files to replay it, or run anew with these")
