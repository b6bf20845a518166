"""The stage shard_load: a plan and a checkpoint → weights in their places."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.errors import CheckpointError, Fault, StorageError
from offstage.pipeline.memory_monitor import held_bytes
from offstage.pipeline.peers import peers
from offstage.pipeline.stage import Artifact, Config, Context, Report, SourceFiles, Stage, model_name
from offstage.pipeline.typed_config import PATHS, absolute, read
from offstage.stages.checkpoints.adapters import adapter_folder, open_adapter
from offstage.stages.checkpoints.checkpoint import (
    Checkpoint,
    Depth,
    entries_by_file,
    identity,
    looks_at,
    small_files,
)
from offstage.stages.checkpoints.hashes import check_hashes, hash_files, hold, whole_digests
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.shard_files import hub_digest, hub_place
from offstage.stages.empty_init import skeleton as skeletons
from offstage.stages.empty_init.identity import quantises
from offstage.stages.empty_init.stage import QUANTISED_NAME
from offstage.stages.plan import plan as plans
from offstage.stages.units import CPU, DeviceId, format_bytes

if TYPE_CHECKING:
    from offstage.stages.hosts.stand_ins import Borders
    from offstage.stages.shard_load.checkpoint_match import Load
    from offstage.stages.shard_load.offload_store import OffloadStore
    from offstage.stages.shard_load.place import PlacedWeights
    from offstage.stages.shard_load.sources import Sources

INDEX_NAME = "offload_index.json"
REPORT_NAME = "load_report.json"


@dataclass(frozen=True, slots=True)
class ShardLoadConfig:
    """Where weights go that can't be read from the checkpoint as they are, and how much is checked.

    With ``offload_state_dict`` weights bound for the host wait on disk meanwhile: of what is kept that changes nothing.
    """

    offload_folder: str | None = field(default=None, metadata={PATHS: {"": absolute}})
    offload_state_dict: bool = field(default=False, compare=False)
    strict: bool = True
    check_finite: bool = False
    verify: Literal["index", "headers", "full"] = "headers"

    @property
    def depth(self) -> Depth:
        """How deep the checkpoint is looked at to tell which it is."""
        return "index" if self.verify == "index" else "headers"


@dataclass(frozen=True, slots=True)
class ShardLoadInputs:
    """The weights depend on the checkpoint, on what the model is, where each tensor goes, and what fits there.

    ``skeleton`` is the key of that artifact, so of all that made the model, its code too; ``device_map`` is the hash of
    that file of the ``plan``, ``ledgers`` are what the plan has of simulated devices. ``model`` is the config's node of
    that name; ``opened`` is the checkpoint as deep as ``verify`` says, which ``checkpoint`` identifies by its content,
    and ``digests`` by the SHA-256 of every file where that is asked for. Where only the index is looked at, ``place``
    is where it lies: files that were unpacked with times of their own may look alike in two places. ``opened_adapter``
    is the adapter, which ``adapter`` identifies by its bytes, if there is one.
    """

    config: ShardLoadConfig
    checkpoint: Mapping[str, object]
    place: str | None
    digests: Mapping[str, str] | None
    adapter: Mapping[str, str] | None
    skeleton: str
    device_map: str
    loading: plans.LoadPlan
    ledgers: Mapping[DeviceId, int]
    plan: plans.Plan = field(compare=False)
    model: Mapping[str, Any] = field(compare=False)
    opened: Checkpoint = field(compare=False)
    opened_adapter: Checkpoint | None = field(compare=False)


class ShardLoadStage(Stage[ShardLoadInputs]):
    """Leaves where each offloaded tensor is read from; its live half is the model with its weights in place.

    The names of the checkpoint are held against the model as it is loaded.
    """

    name = "shard_load"
    doing = "reads what stays in memory"
    version = 6
    needs: tuple[str, ...] = ("empty_init",)
    config_class = ShardLoadConfig

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the offload keys, and with the checkpoint's files as far as ``verify`` looks."""
        given, model = read(ShardLoadConfig, config), config["model"]
        yield from _check_checkpoint(model, given.depth)
        adapter = adapter_folder(model)
        if adapter is not None and adapter.is_dir():  # where it isn't, the model's own check says so
            yield from _faults_of("model.adapter", lambda: _open_adapter(model))
        if given.offload_folder is not None:
            yield from _check_offload_folder(given.offload_folder, model)

    def gather(self, context: Context) -> ShardLoadInputs:
        """Return which checkpoint it is, what the model is, where each tensor goes, and what is checked."""
        given, model = read(ShardLoadConfig, context.config), context.config["model"]
        skeleton, plan = context.artifact("empty_init"), context.artifact("plan")
        content = plan.read(plans.Plan, plans.FILE_NAME)
        opened, adapter = _open_weights(model, depth=given.depth), _open_adapter(model)
        if given.verify == "full":
            opened, adapter = hold(opened), hold(adapter) if adapter is not None else None
        named = identity(opened)
        if content.partition is not None:
            peers().require_same(_told_by_file(named, adapter))
        return ShardLoadInputs(
            config=given,
            checkpoint=named,
            place=opened.place if given.depth == "index" else None,
            digests=whole_digests(opened) if given.verify == "full" else None,
            adapter=None if adapter is None else hash_files(adapter),
            skeleton=skeleton.key,
            device_map=plan.digest(plans.MAP_NAME),
            loading=content.loading,
            ledgers={name: one.simulated for name, one in content.devices.items() if one.simulated is not None},
            plan=content,
            model=model,
            opened=opened,
            opened_adapter=adapter,
        )

    def sources(self, inputs: ShardLoadInputs, context: Context) -> SourceFiles:
        """Return what the checkpoint is by the content of its files, and the adapter, whose files have their SHA-256.

        Of files that weren't hashed whole the Hub may have said it, where they lie in its cache.
        """
        checkpoint, digests = inputs.opened, inputs.digests or {}
        files: list[dict[str, Any]] = []
        tensors: dict[str, dict[str, list[Any]]] = {}
        for (file, extents), look in zip(entries_by_file(checkpoint), looks_at(checkpoint), strict=True):
            named = hub_digest(file.path)
            files.append(
                {
                    "name": file.name,
                    "size": file.size,
                    "header": look.header if look else None,
                    "sampled": look.sampled if look else None,
                    "sha256": digests.get(file.name, named),
                    "sha256_from": "bytes" if file.name in digests else "hub" if named else None,
                }
            )
            if look is not None and extents:
                entries = zip(extents.items(), look.tensors, strict=True)
                tensors[file.name] = {
                    name: [entry.dtype, list(entry.shape), digest] for (name, entry), digest in entries
                }
        place = hub_place(checkpoint.files[0].path)
        hub = {"id": place[0], "revision": place[1]} if place else None
        weights = {**small_files(checkpoint), "verify": inputs.config.verify, "hub": hub, "files": files}
        adapter = {} if inputs.adapter is None else {"adapter": inputs.adapter}
        return SourceFiles({"weights": weights, **adapter}, tensors)

    def build(self, inputs: ShardLoadInputs, context: Context, folder: Path) -> Any:
        """Fill the offload store; write ``offload_index.json`` and ``load_report.json``."""
        from offstage.stages.shard_load.sources import check_served, describe_index, describe_load

        tables = _prepare(inputs, context)
        for load, sources in tables:
            load.check_twins()
            if load.check_finite:
                check_served(load, sources)
        filled = [(load, _fill_store(inputs, context, load, sources)) for load, sources in tables]
        index = {name: entry for load, sources in filled for name, entry in describe_index(load, sources).items()}
        write_text(folder / INDEX_NAME, json.dumps(index, indent=1) + "\n")
        hashes = {} if inputs.digests is None else {**inputs.digests, **(inputs.adapter or {})}
        write_text(folder / REPORT_NAME, json.dumps({**describe_load(filled), "sha256": hashes}, indent=1) + "\n")

    def revive(self, inputs: ShardLoadInputs, context: Context) -> PlacedWeights:
        """Return the model with its resident weights in place; what the offload store lacks by now is made again.

        With ``verify=full`` the files must still have the bytes that they had when the artifact was made.
        """
        from offstage.stages.machine.devices import Devices
        from offstage.stages.machine.expandable_segments import turn_on
        from offstage.stages.shard_load.place import host_block, joined, place

        tables, plan = _prepare(inputs, context), inputs.plan
        devices = Devices(inputs.ledgers, expands=plan.expandable)
        if plan.expandable and any(isinstance(one, int) and one not in inputs.ledgers for one in plan.devices):
            turn_on()  # before the first weight lies there
        borders = _divide(context.live("empty_init"), inputs.plan)
        base_bytes = held_bytes()
        for load, _ in tables if inputs.config.verify == "full" else ():
            check_hashes(load.checkpoint, context.artifact(self.name).json(REPORT_NAME)["sha256"])
        filled = [(load, _fill_store(inputs, context, load, sources)) for load, sources in tables]
        spill = Path(inputs.config.offload_folder or context.cache / "offload")
        spill_folder = spill if inputs.config.offload_state_dict else None
        placed: list[PlacedWeights] = []
        for load, sources in filled:
            # What lies on the host of the checkpoint itself is streamed from there, where it isn't used there.
            host = host_block(sources) if not placed and inputs.plan.main_device != CPU else None
            placed.append(place(load, sources, devices=devices, host=host, spill_folder=spill_folder))
        return replace(joined(placed), base_bytes=base_bytes, borders=borders)

    def report(self, artifact: Artifact) -> Report:
        """Say how many files there are, and how much is served from them and from the store."""
        loaded = artifact.json(REPORT_NAME)
        files = f"{len(loaded['files'])} file{'s' * (len(loaded['files']) != 1)}"
        served, stored = (format_bytes(loaded[kind]["bytes"]) for kind in ("served", "stored"))
        packed = loaded["packed"]
        sizes = " to ".join(format_bytes(packed[size]) for size in ("bytes", "rest_bytes"))
        return Report(
            f"{files}, {served} stream from there, {stored} copied{f', {sizes} compressed' * bool(packed['tensors'])}"
        )


def _opened(inputs: ShardLoadInputs) -> Checkpoint:
    """Return the checkpoint of the inputs with its headers; one whose files have changed since is refused."""
    if inputs.config.verify != "index":
        return inputs.opened
    deeper = _open_weights(inputs.model)
    for then, now in zip(inputs.opened.files, deeper.files, strict=False):
        if (then.name, then.size, then.mtime_ns) != (now.name, now.size, now.mtime_ns):
            raise CheckpointError(f"{now.path}: changed since the run began; run again when it is complete")
    return deeper


def _told_by_file(named: Mapping[str, Any], adapter: Checkpoint | None) -> dict[str, str]:
    """Return a short digest of each file of the checkpoint that is ``named`` so, and of the ``adapter``."""
    files = {name: digests for name, *digests in named["files"]}
    small = {"config.json": named["config"], "the index": named["index"], "the format": named["format"]}
    own = {} if adapter is None else hash_files(adapter)
    both = ((small | files, "the checkpoint"), (own, "the adapter"))
    return {f"{name} of {whose}": fingerprint(digests)[:16] for group, whose in both for name, digests in group.items()}


def _prepare(inputs: ShardLoadInputs, context: Context) -> list[tuple[Load, Sources]]:
    """Return the load of the checkpoint, and that of the adapter if there is one, and what their tensors come from."""
    from offstage.stages.shard_load.checkpoint_match import prepare, prepare_adapted
    from offstage.stages.shard_load.sources import find_sources

    skeleton = inputs.plan.share(context.artifact("empty_init").read(skeletons.Skeleton, skeletons.FILE_NAME))
    model, strict = context.live("empty_init"), inputs.config.strict

    def loads_of(checkpoint: Checkpoint) -> list[Load]:
        adapter = inputs.opened_adapter
        if adapter is None:
            return [prepare(model, skeleton, checkpoint=checkpoint, strict=strict)]
        return prepare_adapted(model, skeleton, checkpoint=checkpoint, adapter=adapter, strict=strict)

    checkpoint = _to_be_quantised(inputs, context)
    loads = loads_of(checkpoint)  # which refuses a checkpoint that isn't the model's before it is quantised
    if checkpoint.copy is not None:
        loads = loads_of(_fill_copy(inputs, context, checkpoint, loads))
    loads = [replace(load, check_finite=inputs.config.check_finite) for load in loads]
    return [(load, find_sources(load, inputs.loading)) for load in loads]


def _to_be_quantised(inputs: ShardLoadInputs, context: Context) -> Checkpoint:
    """Return the checkpoint, with the copy that it is to have where ``model.quantize`` asks for one."""
    opened, kind = _opened(inputs), quantises(inputs.model)
    if kind is None:
        return opened
    from offstage.stages.checkpoints.quantised_copy import with_copy
    from offstage.stages.empty_init.quantisable import plain_entries

    weights = context.artifact("empty_init").json(QUANTISED_NAME)
    return with_copy(opened, plain_entries(opened), weights, kind)


def _fill_copy(inputs: ShardLoadInputs, context: Context, checkpoint: Checkpoint, loads: list[Load]) -> Checkpoint:
    """Return ``checkpoint`` with what ``loads`` bring of its copy where an offload store has it: quantised now if it
    wasn't there.
    """
    from offstage.stages.shard_load.quantised_store import copy_key, files_for, fill_copy

    files = files_for(checkpoint, loads)
    store = _open_store(inputs, context, copy_key(checkpoint), sum(one.file.size for one in files))
    return fill_copy(checkpoint, files, store, full=inputs.config.verify == "full")


def _divide(model: Any, plan: plans.Plan) -> Borders | None:
    """Put stand-ins into ``model`` for what other hosts compute by ``plan``; null where it has one host."""
    from offstage.stages.hosts.stand_ins import stand_in
    from offstage.stages.hosts.wire import Wire

    if plan.partition is None:
        return None
    wire = Wire(peers(), shares=any(host.streamed_bytes for host in plan.hosts))
    return stand_in(model, plan.partition, wire, plan.host)


def _fill_store(inputs: ShardLoadInputs, context: Context, load: Load, sources: Sources) -> Sources:
    """Return ``sources`` with where the offload store has them; none is opened where nothing must be there."""
    from offstage.stages.shard_load.stored_weights import fill_store

    needed = [source.spec.bytes for source in sources.values() if source.wants_store]
    if not needed:
        return sources
    store = _open_store(inputs, context, load.store_key, sum(needed))
    return fill_store(load, sources, store, full=inputs.config.verify == "full")


def _open_store(inputs: ShardLoadInputs, context: Context, key: str, needed: int) -> OffloadStore:
    from offstage.stages.shard_load.offload_store import open_store

    folder = Path(inputs.config.offload_folder or context.cache / "offload" / key)
    return open_store(folder, key, needed_bytes=needed, model=model_name(context.config))


def _open_weights(model: Mapping[str, Any], *, depth: Depth = "headers") -> Checkpoint:
    """Open the checkpoint of the config's ``model``: to tell which it is, or to load it, with all its headers."""
    return ModelSource.of(model).open(depth=depth)


def _open_adapter(model: Mapping[str, Any]) -> Checkpoint | None:
    """Open the adapter of the config's ``model``, with its headers; null where none is given."""
    folder = adapter_folder(model)
    return None if folder is None else open_adapter(folder, allow_links=bool(model.get("allow_links")))


def _check_checkpoint(model: Mapping[str, Any], depth: Depth) -> Iterable[Fault]:
    path = model.get("path")
    if not isinstance(path, str) or not path:
        yield Fault("model.path", f"{path!r}: the weights' folder or file belongs here", CheckpointError)
        return
    source = ModelSource.of(model)
    if not source.is_here(weights=True):
        reason = source.fault_offline(weights=True)
        if reason:
            yield Fault("model.path", reason, CheckpointError)
        return  # fetched when the inputs are gathered, once the whole config is known to be sound
    yield from _faults_of("model.path", lambda: _open_weights(model, depth=depth))


def _faults_of(key: str, opening: Callable[[], object]) -> Iterable[Fault]:
    try:
        opening()
    except (CheckpointError, StorageError) as error:
        yield Fault(key, str(error), type(error))


def _check_offload_folder(given: str, model: Mapping[str, Any]) -> Iterable[Fault]:
    if not given:
        yield Fault("offload_folder", "'' is no path of a folder; give one, or null for the cache")
        return
    folder, path = Path(given), Path(str(model.get("path")))  # a Hub's cache is nobody's offload folder
    own = path if path.is_dir() else path.parent
    if folder.exists() and not folder.is_dir():
        yield Fault("offload_folder", f"{given!r} is a file; give a folder, or null for the cache")
    elif folder.exists() and own.exists() and folder.samefile(own):
        yield Fault("offload_folder", f"{given!r} is the checkpoint's own folder; give another, or null for the cache")
