"""The stage shard_load: a plan and a checkpoint → weights in their places."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.errors import CheckpointError, Fault
from offstage.pipeline.memory_monitor import held_bytes
from offstage.pipeline.stage import Artifact, Config, Context, Report, SourceFiles, Stage, model_name
from offstage.pipeline.typed_config import read
from offstage.stages.checkpoints.adapters import weights_identity
from offstage.stages.checkpoints.checkpoint import Checkpoint, identity
from offstage.stages.checkpoints.hashes import check_hashes, hold, whole_digests
from offstage.stages.empty_init import skeleton as skeletons
from offstage.stages.plan import plan as plans
from offstage.stages.plan.serving import routed
from offstage.stages.shard_load.config import ShardLoadConfig, faults, open_adapter_of, open_weights
from offstage.stages.shard_load.offload_store import open_store
from offstage.stages.shard_load.sources import weight_sources
from offstage.stages.units import CPU, DeviceId, format_bytes

if TYPE_CHECKING:
    from offstage.stages.checkpoints.packed import AtRest
    from offstage.stages.machine.devices import Devices
    from offstage.stages.shard_load.load import Load
    from offstage.stages.shard_load.placed_weights import PlacedWeights

INDEX_NAME = "offload_index.json"
REPORT_NAME = "load_report.json"


@dataclass(frozen=True, slots=True)
class ShardLoadInputs:
    """The weights depend on the checkpoint, on what the model is, where each tensor goes, and what fits there.

    ``skeleton`` is the key of that artifact, so of all that made the model, its code too; ``device_map`` is the hash of
    that file, ``ledgers`` are the plan's. ``spills`` says whether weights bound for the host wait on disk; ``model`` is
    the config's node of that name; ``opened`` is the checkpoint as deep as ``verify`` says, which ``checkpoint``
    identifies by its content, and ``digests`` by the SHA-256 of every file where that is asked for. Where only the
    index is looked at, ``place`` is where it lies: files that were unpacked with times of their own may look alike in
    two places. ``opened_adapter`` is the adapter, which ``adapter`` identifies by its bytes, if there is one.
    ``routed`` has the tensors of which single experts are read from disk, ``packed`` those that wait on the host as
    they rest on disk, and ``packs`` those that rest packed in the offload store.
    """

    checkpoint: Mapping[str, object]
    place: str | None
    digests: Mapping[str, str] | None
    adapter: Mapping[str, str] | None
    skeleton: str
    device_map: str
    routed: tuple[str, ...]
    packed: tuple[str, ...]
    packs: tuple[str, ...]
    ledgers: Mapping[DeviceId, int]
    offload_folder: str | None
    strict: bool
    check_finite: bool
    verify: str
    spills: bool = field(compare=False)
    model: Mapping[str, Any] = field(compare=False)
    opened: Checkpoint = field(compare=False)
    opened_adapter: Checkpoint | None = field(compare=False)
    plan: plans.Plan = field(compare=False)


class ShardLoadStage(Stage[ShardLoadInputs]):
    """Leaves where each offloaded tensor is read from; its live half is the model with its weights in place.

    The names of the checkpoint are held against the model as it is loaded.
    """

    name = "shard_load"
    version = 5
    needs: tuple[str, ...] = ("empty_init",)
    config_class = ShardLoadConfig

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the offload keys, and with the checkpoint's files as far as ``verify`` looks."""
        yield from faults(read(ShardLoadConfig, config), config["model"])

    def gather(self, context: Context) -> ShardLoadInputs:
        """Return which checkpoint it is, what the model is, where each tensor goes, and what is checked."""
        given, model = read(ShardLoadConfig, context.config), context.config["model"]
        skeleton, plan = context.artifact("empty_init"), context.artifact("plan")
        found = plans.from_json(plan.json(plans.FILE_NAME))
        opened, adapter = open_weights(model, depth=given.depth), open_adapter_of(model)
        if given.verify == "full":
            opened, adapter = hold(opened), hold(adapter) if adapter is not None else None
        return ShardLoadInputs(
            checkpoint=identity(opened),
            place=opened.place if given.depth == "index" else None,
            digests=whole_digests(opened) if given.verify == "full" else None,
            adapter=None if adapter is None else weights_identity(adapter),
            skeleton=skeleton.key,
            device_map=plan.digest(plans.MAP_NAME),
            routed=routed(found.serving),
            packed=found.packed_on_host,
            packs=found.packs,
            ledgers=found.ledgers,
            offload_folder=given.offload_folder,
            strict=given.strict,
            check_finite=given.check_finite,
            verify=given.verify,
            spills=given.offload_state_dict,
            model=model,
            opened=opened,
            opened_adapter=adapter,
            plan=found,
        )

    def sources(self, inputs: ShardLoadInputs, context: Context) -> SourceFiles:
        """Return which weights these are, by file and by tensor, and which adapter's."""
        return weight_sources(inputs.opened, inputs.digests or {}, inputs.adapter, verify=inputs.verify)

    def build(self, inputs: ShardLoadInputs, context: Context, folder: Path) -> Any:
        """Fill the offload store; write ``offload_index.json`` and ``load_report.json``."""
        from offstage.stages.shard_load.load import check_twins
        from offstage.stages.shard_load.placed_weights import refuse_infinite_served

        loads = _prepare(inputs, context)
        index: dict[str, object] = {}
        hashes = {} if inputs.digests is None else {**inputs.digests, **(inputs.adapter or {})}
        for load in loads:
            check_twins(load)
            if inputs.check_finite:
                refuse_infinite_served(load)
        stored = [_fill_store(inputs, context, load) for load in loads]
        for load, own in zip(loads, stored, strict=True):
            index |= _index(load, own)
        write_text(folder / INDEX_NAME, json.dumps(index, indent=1) + "\n")
        report = {**_load_report(loads, stored), "sha256": hashes}
        write_text(folder / REPORT_NAME, json.dumps(report, indent=1) + "\n")

    def revive(self, inputs: ShardLoadInputs, context: Context) -> PlacedWeights:
        """Return the model with its resident weights in place; what the offload store lacks by now is made again.

        With ``verify=full`` the files must still have the bytes that they had when the artifact was made.
        """
        from offstage.stages.machine.devices import Devices
        from offstage.stages.shard_load.placed_weights import joined

        loads, devices = _prepare(inputs, context), Devices(inputs.ledgers)
        base_bytes = held_bytes()
        if inputs.plan.main_device != CPU:  # what lies on the host is streamed from there
            loads[0] = replace(loads[0], host=loads[0].host_block())
        for load in loads if inputs.verify == "full" else ():
            check_hashes(load.checkpoint, context.artifact(self.name).json(REPORT_NAME)["sha256"])
        stored = [_fill_store(inputs, context, load) for load in loads]
        placed = [_place(inputs, context, load, own, devices) for load, own in zip(loads, stored, strict=True)]
        return replace(joined(placed), base_bytes=base_bytes)

    def report(self, artifact: Artifact) -> Report:
        """Say how many files there are, and how much is served from them and from the store."""
        found = artifact.json(REPORT_NAME)
        files = f"{len(found['files'])} file{'s' * (len(found['files']) != 1)}"
        served, stored = (format_bytes(found[kind]["bytes"]) for kind in ("served", "stored"))
        packed = found["packed"]
        sizes = " to ".join(format_bytes(packed[size]) for size in ("bytes", "rest_bytes"))
        return Report(
            f"{files}, {served} read in place, {stored} stored{f', {sizes} packed' * bool(packed['tensors'])}"
        )


def _opened(inputs: ShardLoadInputs) -> Checkpoint:
    """Return the checkpoint of the inputs with its headers; one whose files have changed since is refused."""
    if inputs.verify != "index":
        return inputs.opened
    deeper = open_weights(inputs.model)
    for then, now in zip(inputs.opened.files, deeper.files, strict=False):
        if (then.name, then.size, then.mtime_ns) != (now.name, now.size, now.mtime_ns):
            raise CheckpointError(f"{now.path}: changed since the run began; run again when it is complete")
    return deeper


def _prepare(inputs: ShardLoadInputs, context: Context) -> list[Load]:
    """Return the load of the checkpoint, and that of the adapter if there is one."""
    from offstage.stages.shard_load.adapter import prepare_adapted
    from offstage.stages.shard_load.load import prepare

    skeleton = skeletons.from_json(context.artifact("empty_init").json(skeletons.FILE_NAME))
    model, homes = context.live("empty_init"), inputs.plan.homes
    checkpoint = _opened(inputs)
    if inputs.opened_adapter is None:
        loads = [prepare(model, skeleton, homes=homes, checkpoint=checkpoint, strict=inputs.strict)]
    else:
        adapter, strict = inputs.opened_adapter, inputs.strict
        loads = prepare_adapted(model, skeleton, homes=homes, checkpoint=checkpoint, adapter=adapter, strict=strict)
    return [replace(load, routed=inputs.routed, packed=inputs.packed, packs=inputs.packs) for load in loads]


def _place(
    inputs: ShardLoadInputs, context: Context, load: Load, stored: Mapping[str, AtRest], devices: Devices
) -> PlacedWeights:
    from offstage.stages.shard_load.placed_weights import place

    # Only a pickle's file is held while its tensors are placed: spilling for safetensors would lower no peak.
    spills = inputs.spills and load.checkpoint.format == "bin"
    return place(
        load,
        stored,
        devices=devices,
        spill_folder=Path(inputs.offload_folder or context.cache / "offload") if spills else None,
        check_finite=inputs.check_finite,
    )


def _fill_store(inputs: ShardLoadInputs, context: Context, load: Load) -> dict[str, AtRest]:
    """Return what is in the offload store and where; none is opened where nothing must be."""
    from offstage.stages.shard_load.stored_weights import fill_store

    wanted = {**load.stored, **load.packable}
    if not wanted:
        return {}
    key, needed = load.store_key, sum(tensor.bytes for tensor in wanted.values())
    folder, model = Path(inputs.offload_folder or context.cache / "offload" / key), model_name(context.config)
    store = open_store(folder, key, needed_bytes=needed, model=model)
    return fill_store(load, store, check_finite=inputs.check_finite, full=inputs.verify == "full")


def _index(load: Load, stored: Mapping[str, AtRest]) -> dict[str, object]:
    """Return where each tensor on disk is: its place in a file, or the tensors that it is in the checkpoint."""
    from offstage.stages.shard_load.placed_weights import extents

    whole: dict[str, object] = {
        name: {
            "source": "checkpoint" if source.file.mtime_ns is not None else "store",
            "file": source.file.name,
            "dtype": source.dtype,
            "shape": list(source.shape),
            **_offsets(source),
        }
        for name, source in extents(load, stored).items()
    }
    specs = load.skeleton.by_name
    return whole | {
        load.outer_name(name): {
            "source": "checkpoint",
            "tensors": list(sources),
            "dtype": specs[name].dtype,
            "shape": list(specs[name].shape),
        }
        for name, sources in load.served_by_row.items()
        if name not in stored
    }


def _offsets(source: AtRest) -> dict[str, object]:
    """Return where in its file a tensor lies; of one that rests packed where each of its parts does, and the codec."""
    from offstage.stages.checkpoints.packed import PackedTensor

    if isinstance(source, PackedTensor):
        parts = [{"file": part.file.name, "offsets": [part.begin, part.end]} for part in source.parts]
        return {"codec": source.codec.name, "parts": parts}
    return {"offsets": [source.begin, source.end]}


def _load_report(loads: Sequence[Load], stored: Sequence[Mapping[str, AtRest]]) -> dict[str, object]:
    from offstage.stages.checkpoints.packed import PackedTensor, rest_bytes

    tiers: dict[str, dict[str, int]] = {}
    for load in loads:
        for spec in (*load.resident, *load.on_disk):
            tier = tiers.setdefault(str(load.homes[spec.name]), {"tensors": 0, "bytes": 0})
            tier["tensors"] += 1
            tier["bytes"] += spec.bytes
    for load, own in zip(loads, stored, strict=True):
        for name, sources in load.packed_on_host(own).items():
            tier = tiers.setdefault(str(load.homes[name]), {"tensors": 0, "bytes": 0})
            tier["tensors"] += 1
            tier["bytes"] += sum(map(rest_bytes, sources))
    kept = {name: source for own in stored for name, source in own.items()}
    packed = [source for source in kept.values() if isinstance(source, PackedTensor)]
    plain = [source.bytes for source in kept.values() if not isinstance(source, PackedTensor)]
    served = [spec.bytes for load in loads for spec in load.on_disk if spec.name not in kept]
    return {
        "format": loads[0].checkpoint.format,
        "files": [file.name for load in loads for file in load.checkpoint.files],
        "checkpoint_bytes": sum(load.checkpoint.bytes for load in loads),
        "tiers": tiers,
        "served": {"tensors": len(served), "bytes": sum(served)},
        "stored": {"tensors": len(plain), "bytes": sum(plain)},
        "packed": {
            "tensors": len(packed),
            "bytes": sum(source.bytes for source in packed),
            "rest_bytes": sum(map(rest_bytes, packed)),
        },
    }
