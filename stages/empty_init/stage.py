"""The stage empty_init: config → skeleton."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.errors import CheckpointError, Fault, closest
from offstage.pipeline.interpreter import uncollected
from offstage.pipeline.stage import Artifact, Config, Context, Report, SourceFiles, Stage
from offstage.pipeline.typed_config import PATHS, absolute, fits, read, unknown_keys
from offstage.stages.calls.options import ForwardOptions, asked_of, identity as asked_identity
from offstage.stages.checkpoints.adapters import adapter_folder, read_settings
from offstage.stages.checkpoints.bounds import bounded
from offstage.stages.checkpoints.checkpoint import Checkpoint
from offstage.stages.checkpoints.model_source import ModelSource, is_hub_id, located
from offstage.stages.checkpoints.quantization import QUANTISES
from offstage.stages.checkpoints.shard_files import check_texts
from offstage.stages.checkpoints.weight_files import gguf_file
from offstage.stages.empty_init.identity import (
    MODEL_KEYS,
    WHERE_CODE_IS_FOUND,
    declared_dtype,
    declared_packed,
    has_config_alone,
    identity,
    is_plan,
    method_at_rest,
    model_sources,
    open_packed,
    pipeline_fault,
    quantises,
    quantization_fault,
    resolve_dtype,
    text_identity,
)
from offstage.stages.empty_init.skeleton import FILE_NAME, Skeleton
from offstage.stages.empty_init.source_code import find_module
from offstage.stages.machine.kernels import has_tiles
from offstage.stages.units import format_bytes

if TYPE_CHECKING:
    from offstage.stages.empty_init.declared import DeclaredCheckpoint

QUANTISED_NAME = "quantised.json"
FUSED = "fused"
"""What ``quantized.products`` says where weights are multiplied as they rest."""

_TYPES: Mapping[str, tuple[Any, str]] = {
    "path": (str | None, "is no text; give the folder that holds the checkpoint"),
    "class": (str | None, "is no text; give a class of transformers, or null"),
    "tokenizer": (str | None, "is no text; give a folder that has one, or null"),
    "adapter": (str | None, "is no text; give the folder of an adapter, or null"),
    "quantize": (str | None, f"is no text; give {', '.join(QUANTISES)}, or null"),
    "attn_implementation": (str | None, "is no text; give eager, sdpa or another of transformers' names, or null"),
    "no_split": (Sequence[str] | None, "is no list of class names; give one, or null"),
    "trust_remote_code": (bool, "is neither true nor false"),
    "allow_links": (bool, "is neither true nor false"),
}


@dataclass(frozen=True, slots=True)
class QuantizedConfig:
    """Whether weights that rest packed are unpacked before products, or multiplied as they rest; the dtype that what
    these multiply is rounded to, null: none; and whether that of bfloat16 is multiplied in a processor's tiles.
    """

    products: Literal["exact", "fused"] = "exact"
    compute_dtype: Literal["bfloat16"] | None = None
    tiles: bool = False


@dataclass(frozen=True, slots=True)
class EmptyInitConfig:
    """What the model is, the dtype of its weights, and what those that rest packed are used as."""

    model: Mapping[str, Any] = field(
        default_factory=dict, metadata={PATHS: {"path": located, "tokenizer": located, "adapter": absolute}}
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = "auto"
    quantized: QuantizedConfig = QuantizedConfig()


def multiplies_packed(config: Config) -> bool:
    """Return whether weights that rest packed are multiplied as they rest."""
    return _quantized(config).products == FUSED


def _quantized(config: Config) -> QuantizedConfig:
    return read(EmptyInitConfig, config).quantized


@dataclass(frozen=True, slots=True)
class EmptyInitInputs:
    """The skeleton depends on the model's identity and the dtype; ``node`` is the config's ``model``.

    Where a run calls the forward with something of its own, it is rehearsed with that: ``rehearsed`` says with what,
    and how it becomes the forward's arguments; ``given`` are the options that ask for it. ``headers`` are the digests
    of those of a checkpoint whose tensors rest packed, which is ``opened``; ``quantized`` says what is multiplied then.
    """

    model: Mapping[str, object]
    dtype: str
    quantized: QuantizedConfig
    headers: tuple[str, ...] | None
    rehearsed: Mapping[str, object] | None
    node: Mapping[str, Any] = field(compare=False)
    given: ForwardOptions | None = field(compare=False)
    opened: Checkpoint | None = field(compare=False)


class EmptyInitStage(Stage[EmptyInitInputs]):
    """Builds the model on the meta device and leaves ``skeleton.json``, and where tensors of the checkpoint are to be
    quantised their names in ``quantised.json``; its live half is that model.

    What needs the model's code is said as the model is built, the first work of a run.
    """

    name = "empty_init"
    doing = "imports torch and the model's code, and reads its shapes"
    version = 27
    needs: tuple[str, ...] = ()
    config_class = EmptyInitConfig

    def check(self, config: Config) -> Iterable[Fault]:
        """Yield what is wrong with the keys of ``model``, and a fault if its folder or its target isn't there."""
        model = config["model"]
        kind, target = model.get("kind"), model.get("_target_")
        if kind not in ("pretrained", "module"):
            yield Fault("model.kind", f"{kind!r} is no kind of model; give model=pretrained or model=module")
            return
        if kind == "pretrained":
            yield from unknown_keys(model, list(MODEL_KEYS), above="model.")
        faults = [
            Fault(f"model.{key}", f"{model[key]!r} {rule}")
            for key, (hint, rule) in _TYPES.items()
            if key in model and not fits(hint, model[key])
        ]
        if faults:
            yield from faults
            return
        if kind == "module" and (not isinstance(target, str) or "." not in target):
            yield Fault("model._target_", f"{target!r} is no dotted class name; give PACKAGE.MODULE.CLASS")
        elif kind == "module" and find_module(target) is None:
            yield Fault("model._target_", f"{target!r} names no importable module; {WHERE_CODE_IS_FOUND}")
        yield from _check_path(model)
        yield from _check_pipeline(model)
        yield from _check_adapter(model)
        yield from _check_attention(model.get("attn_implementation"))
        if kind == "pretrained":
            yield from _check_quantization(model)
            yield from _check_quantize(model)
        if multiplies_packed(config):
            yield from _check_products(model)
        elif (compute := _quantized(config).compute_dtype) is not None:
            yield Fault("quantized.compute_dtype", f"{compute!r} is for quantized.products={FUSED}; take null")
        yield from _check_tiles(config)

    def gather(self, context: Context) -> EmptyInitInputs:
        """Return what the model is, as far as it can be told without its code."""
        model, given = context.config["model"], asked_of(context.config)
        asked = None if given is None else {**asked_identity(given, values=False), "text": text_identity(model)}
        named, opened = identity(model), open_packed(model, plans=is_plan(context.config))
        return EmptyInitInputs(
            named,
            resolve_dtype(context.config),
            _quantized(context.config),
            headers=None if opened is None else tuple(file.digest for file in opened.files),
            rehearsed=asked,
            node=model,
            given=given,
            opened=opened,
        )

    def sources(self, inputs: EmptyInitInputs, context: Context) -> SourceFiles:
        """Return which config and which code make the model, and what an adapter says of itself."""
        return model_sources(inputs.model)

    def build(self, inputs: EmptyInitInputs, context: Context, folder: Path) -> Any:
        """Write ``skeleton.json`` and return the model on meta."""
        with uncollected():
            return self._build(inputs, folder)

    def _build(self, inputs: EmptyInitInputs, folder: Path) -> Any:
        from offstage.stages.calls.call import RehearsedCall
        from offstage.stages.empty_init.describe import describe
        from offstage.stages.empty_init.rehearsed_call import describe_call

        no_split = inputs.node.get("no_split")
        call = None if inputs.given is None else RehearsedCall(inputs.given, inputs.node)
        with _bounds(inputs.node):
            model, opened = _model(inputs)
            described = describe(model, no_split=no_split) if call is None else describe_call(model, call, no_split)
            if inputs.quantized.products == FUSED:
                from offstage.stages.empty_init.packed_modules import require_rehearsed

                require_rehearsed(model, described)
            packed = opened or _declared(inputs, model)
            if packed is not None:
                from offstage.stages.empty_init.packing import with_packed

                described = with_packed(described, model, packed, adapted=adapter_folder(inputs.node) is not None)
        described.save(folder)
        if opened is not None and opened.copy is not None:
            write_text(folder / QUANTISED_NAME, json.dumps(sorted(opened.copy.quantised), indent=1) + "\n")
        return model

    def revive(self, inputs: EmptyInitInputs, context: Context) -> Any:
        """Return the model on meta."""
        with uncollected(), _bounds(inputs.node):
            return _model(inputs)[0]

    def report(self, artifact: Artifact) -> Report:
        """Say what the model is and how large, and whether its order is that of a rehearsal."""
        skeleton = artifact.read(Skeleton, FILE_NAME)
        order = "traced" if skeleton.unrehearsed is None else "order of registration"
        size, at_rest = format_bytes(skeleton.bytes), skeleton.rest_bytes
        packed = f" ({format_bytes(at_rest)} at rest)" if at_rest != skeleton.bytes else ""
        return Report(
            f"{skeleton.model_class}, {len(skeleton.unique)} tensors, {size}{packed}, {order}",
            model={"class": skeleton.model_class, "parameters": skeleton.parameters, "bytes": skeleton.bytes},
        )


def _model(inputs: EmptyInitInputs) -> tuple[Any, Checkpoint | None]:
    """Return the model on meta, its linear layers as they are to multiply, and its checkpoint if that rests packed."""
    from offstage.stages.empty_init.model import build_model

    model, opened, kind = build_model(inputs.node, inputs.dtype), inputs.opened, quantises(inputs.node)
    if opened is not None and kind is not None:
        from offstage.stages.empty_init.quantisable import as_quantised

        opened = as_quantised(model, opened, kind, adapted=adapter_folder(inputs.node) is not None)
    if inputs.quantized.products == FUSED and opened is not None:
        from offstage.stages.empty_init.packed_modules import keep_packed

        keep_packed(model, opened, inputs.quantized.compute_dtype, tiles=inputs.quantized.tiles)
    return model, opened


def _declared(inputs: EmptyInitInputs, model: Any) -> DeclaredCheckpoint | None:
    """Return the checkpoint of which no weights are here, if the config declares it quantised, or it is to be; else
    null.
    """
    kind, quantization = quantises(inputs.node), declared_packed(inputs.node)
    if not has_config_alone(inputs.node) or not (kind or quantization):
        return None
    from offstage.stages.empty_init.declared import declared_checkpoint, declared_copy

    folder, adapted = ModelSource.of(inputs.node).folder, adapter_folder(inputs.node) is not None
    if kind is not None or quantization is None:
        return declared_copy(model, folder, str(kind), adapted=adapted)
    dtype = declared_dtype(folder) or inputs.dtype
    return declared_checkpoint(model, folder, quantization, dtype=dtype, adapted=adapted)


def _bounds(model: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Return the bounds of what is built from a checkpoint's config; the user's own module has none."""
    pretrained = model["kind"] == "pretrained"
    return bounded(str(ModelSource.of(model).folder / "config.json")) if pretrained else nullcontext()


def _check_path(model: Mapping[str, Any]) -> Iterable[Fault]:
    path, revision = model.get("path"), model.get("revision")
    if not path:
        yield Fault("model.path", f"{path!r} is no checkpoint; give the folder that holds it")
    elif is_hub_id(path):
        reason = ModelSource.of(model).fault_offline()
        if reason:
            yield Fault("model.path", reason, CheckpointError)
    elif model["kind"] == "pretrained" and not Path(path).is_dir() and gguf_file(Path(path)) is None:
        yield Fault("model.path", f"{path!r} is no folder; give a checkpoint folder or a .gguf file", CheckpointError)
    for key in ("path", "tokenizer"):
        yield from _check_texts(f"model.{key}", model.get(key))
    if revision is not None and (not isinstance(revision, str) or not revision):
        yield Fault("model.revision", f"{revision!r} is no revision; give a branch, a tag or a commit, or null")
    elif revision is not None and path and not is_hub_id(path):
        yield Fault("model.revision", f"{revision!r} is of no use: {path!r} is on this machine; leave it null")


def _check_adapter(model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield what is wrong with the adapter, as far as it says it of itself, and a fault where nothing can apply it."""
    folder = adapter_folder(model)
    if folder is None:
        return
    if model["kind"] != "pretrained":
        yield Fault(
            "model.adapter", f"{str(folder)!r} has no place in model=module; an adapter is for model=pretrained"
        )
        return
    if find_spec("peft") is None:
        yield Fault("model.adapter", "peft isn't installed, which applies it: pip install 'offstage-pipeline[adapter]'")
    try:
        read_settings(folder)
    except CheckpointError as error:
        yield Fault("model.adapter", str(error), CheckpointError)


def _check_attention(name: str | None) -> Iterable[Fault]:
    """Yield a fault where ``name`` is that of a kernel that transformers would fetch; others it judges itself."""
    if name is not None and "/" in name:
        yield Fault(
            "model.attn_implementation",
            f"{name!r} is code of the Hub, which isn't fetched; give eager, sdpa or another of transformers' own",
        )


def _check_pipeline(model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield a fault where the folder holds several models, none of which is named."""
    path = model.get("path")
    reason = pipeline_fault(Path(path)) if path and model["kind"] == "pretrained" and not is_hub_id(path) else None
    if reason:
        yield Fault("model.path", reason)


def _check_quantization(model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield a fault where the config declares quantised weights; one that isn't here yet is looked at when it is."""
    try:
        source = ModelSource.of(model)
        reason = quantization_fault(source.folder) if source.is_here() else None
    except CheckpointError:
        return  # said of the folder, or of its config as the model is built
    if reason:
        yield Fault("model.path", reason, CheckpointError)


def _check_quantize(model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield why the checkpoint can't be quantised, as far as its config tells it."""
    kind, path = model.get("quantize"), model.get("path")
    if kind is None or not path:
        return
    if kind not in QUANTISES:
        yield Fault("model.quantize", f"{kind!r} is none of {', '.join(QUANTISES)}{closest(kind, QUANTISES)}")
    try:
        method = method_at_rest(model) if ModelSource.of(model).is_here() else None
    except CheckpointError:
        return  # said of the folder, or of its config as the model is built
    if method is not None:
        yield Fault(
            "model.quantize",
            f"{kind!r} is for plain weights, and those of {path!r} are quantised already ({method}); leave it null, or "
            "give the plain checkpoint as model.path",
        )


def _check_products(model: Mapping[str, Any]) -> Iterable[Fault]:
    """Yield why weights of ``model`` can't be multiplied as they rest."""
    rests = quantises(model) is not None
    if not rests and model["kind"] == "pretrained" and model.get("path"):
        try:
            rests = ModelSource.of(model).is_here() and method_at_rest(model) is not None
        except CheckpointError:
            rests = True  # said of the folder, or of its config as the model is built
    if not rests:
        yield Fault(
            "quantized.products",
            f"{FUSED!r} is for quantised checkpoints and model.quantize, and the model is none; take 'exact'",
        )
    if adapter_folder(model) is not None:
        yield Fault(
            "quantized.products", f"{FUSED!r} takes no adapter: its layers stand on dequantised ones; take 'exact'"
        )


def _check_tiles(config: Config) -> Iterable[Fault]:
    """Yield why products can't be made in tiles; for another machine's plan it isn't asked what this one has."""
    tiles = _quantized(config).tiles
    if tiles and not multiplies_packed(config):
        yield Fault("quantized.tiles", f"true is for quantized.products={FUSED}; take false")
    elif tiles and not is_plan(config) and not has_tiles():
        yield Fault("quantized.tiles", "true needs AMX, and this machine's processor has none; take false")


def _check_texts(key: str, folder: object) -> Iterable[Fault]:
    """Yield a fault where a file of ``folder``, if it is one of this machine, would hold up who opens it."""
    if not isinstance(folder, str) or is_hub_id(folder) or not Path(folder).is_dir():
        return
    try:
        check_texts(Path(folder))
    except CheckpointError as error:
        yield Fault(key, str(error), CheckpointError)
