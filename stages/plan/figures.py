"""The figures of the machine that plans go by, measured where they aren't known: for each plan those that it hangs on.

What a run's process holds is a part of every plan's peak. It takes a process some seconds to find out, and is begun as
soon as it is known that a plan will be made, beside this process's own imports. How fast the host reads weights, and
what its kernels take, say nothing of a model that is light: what a token of it takes is calls of modules, and those
are measured in a moment.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType

from offstage.pipeline.errors import CheckpointError, OffstageError
from offstage.pipeline.stage import MEASURED, Config
from offstage.stages.checkpoints.codec_rates import Work, codec_rates, mean_rate, product_name
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.checkpoints.quantization import quantization_of
from offstage.stages.checkpoints.weight_files import gguf_file
from offstage.stages.empty_init.identity import declared_dtype
from offstage.stages.empty_init.skeleton import TensorSpec
from offstage.stages.machine.expandable_segments import would_expand
from offstage.stages.machine.hardware import Hardware, hardware
from offstage.stages.machine.host_memory import PROCESS_BYTES
from offstage.stages.machine.kernels import NOMINAL, Kernels, local_kernels
from offstage.stages.machine.process_memory import begin_process_memory, process_memory
from offstage.stages.machine.product_probe import OF_FILES, HostWeights, Shape
from offstage.stages.machine.rates import Rates, coarse_rate, local_rates, read_rates
from offstage.stages.machine.row_products import exact_dtypes
from offstage.stages.plan.checks import require_process_room
from offstage.stages.plan.expert_slots import SINGLE
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.geometry import read_geometry
from offstage.stages.plan.request.requests import asking
from offstage.stages.plan.reserves import possible_dtypes

_LIGHT_SHARE = 1 / 3
"""The part of the time of a model's calls in which its weights are read, at the most, where it is light."""
_NOMINAL = Rates()
_CALLS_A_LAYER = 9
"""Of modules that hold weights: seven products, as most decoders have, and two norms."""
_MOST_SHAPES, _LEAST_SIDE = 16, 64
"""Of how many shapes of weights products are measured, and how small a side of them may be. What is left out is read
like the rest."""
_CACHED_BYTES = 2**26
"""Of a model of fewer bytes the processor's last cache holds much from one token to the next: how fast memory is read
says little of it."""
_TELLING_SHARE = 0.01
"""What is less of the bytes than this share says nothing of how fast they are: a GGUF file's norms, in float32."""
_MULTIPLIED_DTYPES = ("bfloat16", "float16", "float32")


def is_light(outline: Outline, config: Config) -> bool:
    """Return whether a token of ``outline`` takes calls of modules and next to no reading, by the nominal rates.

    It does where the host computes all of it. A training is no decoding, whatever the model.
    """
    return _is_light(outline.skeleton.bytes, len(outline.skeleton.calls), config)


def _is_light(size: int, calls: int, config: Config) -> bool:
    if asking(config) == "finetune" or hardware(config).accelerators:
        return False
    return size / _NOMINAL.host <= _LIGHT_SHARE * calls / _NOMINAL.calls


def prepare(config: Config, cache: Path) -> None:
    """Have the figures measured and kept that a plan under ``config`` will go by, as far as its model is known.

    That is its files' size, and how many layers its config has, which tell whether it will be light.
    """
    size = sum(path.stat().st_size for path in ModelSource.of(config["model"]).local_weights)
    calls = _CALLS_A_LAYER * read_geometry(config["model"]).layers
    light = _is_light(size, calls, config) or _fits_caches(size)
    machine_rates(config, known_machine(config, cache), cache, light=light, weights=declared_weights(config))


def _fits_caches(size: int) -> bool:
    """Return whether how fast memory is read says little of a model of ``size`` bytes, as of a light one."""
    return size < _CACHED_BYTES


def declared_weights(config: Config) -> HostWeights:
    """Return what most weights will be to products that read them, as the config says it, and the checkpoint's own."""
    folder, dtype = ModelSource.of(config["model"]).folder, str(config.get("dtype", "auto"))
    with suppress(CheckpointError):  # which the stage reports that makes the model
        dtype = str(declared_dtype(folder)) if dtype == "auto" else dtype
    return HostWeights(dtype, quantization_of(folder) is not None) if dtype in _MULTIPLIED_DTYPES else OF_FILES


def begin_measuring(config: Config, cache: Path) -> None:
    """Have what ``known_machine`` waits for be looked for and measured from now on, beside what this process does; so
    are the loops compiled that unpack a checkpoint of this machine's.

    A ``BudgetError`` where a limit leaves the process of a run no room to.
    """
    machine = hardware(config)
    if not host_is_described(config):
        require_process_room(machine.host)
        if _rests_packed(config):
            _loops().begin_building()
    accelerator = _asked_of(machine, config)
    if accelerator is not None:
        begin_process_memory(cache / MEASURED, accelerator=accelerator)


def _rests_packed(config: Config) -> bool:
    """Return whether a checkpoint of this machine says that it is quantised. One that can't be read says so later, and
    the Hub isn't asked yet.
    """
    source = ModelSource.of(config["model"])
    with suppress(OffstageError, OSError):
        if not source.is_on_hub:
            return gguf_file(Path(source.path)) is not None or quantization_of(source.folder) is not None
    return False


def _loops() -> ModuleType:
    from offstage.stages.checkpoints.codecs import loops  # a run that has nothing packed needs no numpy to plan

    return loops


def known_machine(config: Config, cache: Path) -> Hardware:
    """Return the machine that ``config`` describes; this one with what the process of a run was measured to hold.

    Of another host nothing is measured here: what its process holds is the nominal figure. An accelerator that is
    there has less for weights by the context, and by the workspaces of the threads that compute: a backward pass has
    one of its own. Each accelerator beyond the first is taken to cost the host as much as that one.
    """
    machine = hardware(config)
    accelerator = _asked_of(machine, config)
    if accelerator is None:
        return machine
    measured = process_memory(cache / MEASURED, accelerator=accelerator)
    machine = hardware(config, process_bytes=measured.host)  # once more: what is measured holds memory meanwhile
    threads = 2 if asking(config) == "finetune" else 1
    real = [device for device in machine.accelerators if not device.simulated]
    accelerators = (
        replace(
            device,
            free_bytes=max(0, device.free_bytes - (0 if device.has_context else measured.context)),
            process_bytes=measured.device * threads,
            expands=would_expand(can=measured.expands),
        )
        for device in real
    )
    if real:
        machine = replace(machine, accelerators=tuple(accelerators))
    if host_is_described(config):
        return machine
    process = measured.host + max(0, len(real) - 1) * max(0, measured.host - PROCESS_BYTES)
    return replace(machine, host=replace(machine.host, process_bytes=process))


def _asked_of(machine: Hardware, config: Config) -> str | None:
    """Return the name of the accelerator that a run's process is measured with, empty without one; null where it is
    another machine's process.
    """
    name = next((device.name for device in machine.accelerators if not device.simulated), "")
    return None if host_is_described(config) and not name else name


def known_machine_and_kernels(config: Config, cache: Path, *, light: bool) -> tuple[Hardware, Kernels]:
    """Return the machine, and what its kernels take. Where neither is known a process measures each, side by side.

    For a ``light`` model that is at first the most that any were found to take.
    """
    begin_measuring(config, cache)
    kernels = NOMINAL if light else host_kernels(config, cache)
    return known_machine(config, cache), kernels


def host_is_described(config: Config) -> bool:
    """Return whether the host is the config's to describe, which isn't asked then, nor is this one for it."""
    return (config.get("hardware") or {}).get("host") is not None


def machine_rates(
    config: Config,
    machine: Hardware,
    cache: Path,
    outline: Outline | None = None,
    *,
    light: bool = False,
    weights: HostWeights = OF_FILES,
) -> Rates:
    """Return the rates that the config gives, the others as they are measured on the checkpoint's largest file.

    Those of a machine that is described and isn't this one are nominal where they aren't given. Those of dequantising
    are of the codecs which tensors of ``outline`` rest in, those of multiplying of its products with what stays packed;
    where that isn't known, the host reads such ``weights``. Of the host only calls are measured for a ``light`` model,
    and for one that is small.
    """
    described = config.get("hardware") or {}
    if described.get("devices") is not None:
        return read_rates(described)
    files = ModelSource.of(config["model"]).local_weights
    sample = max(files, key=lambda path: path.stat().st_size, default=None)
    names = [accelerator.name for accelerator in machine.accelerators]
    pinned = described.get("rates") or {}
    host = partial(local_rates, cache / MEASURED, sample, names, pinned=pinned)
    if outline is None:
        return host(light=light, weights=weights)
    light, weights = light or _fits_caches(outline.skeleton.bytes), _host_weights(outline)
    asked: dict[str, tuple[Work, Mapping[str, float]]] = {
        "dequantising": ("unpacking", _bytes_by_codec(outline)),
        "multiplying": ("multiplying", _bytes_by_product(outline, weights.dtype)),
    }
    if any(every for _, every in asked.values()):
        _loops().build()  # now: a compiler that goes on beside them would disturb what is measured
    rates = host(light=light, weights=weights, read={} if light else _read_bytes(outline, weights))
    means = {rate: getattr(rates, rate) for rate in asked}
    for rate, (work, every) in asked.items():
        least = _TELLING_SHARE * sum(every.values())
        sizes = {name: size for name, size in every.items() if size >= least and rate not in pinned}
        measured, disturbed = codec_rates(cache / MEASURED, work, sizes)
        rates = replace(rates, disturbed=rates.disturbed or disturbed)
        known = {name: size for name, size in sizes.items() if work == "unpacking" or name in measured}
        mean = mean_rate(measured, known)
        means |= {} if mean is None else {rate: coarse_rate(mean)}
    return replace(rates, dequantising=means["dequantising"], multiplying=means["multiplying"])


def _bytes_by_codec(outline: Outline) -> Mapping[str, float]:
    """Return the bytes in use of what rests packed in ``outline``, by codec."""
    sizes: Counter[str] = Counter()
    for name, packed in outline.packed.items():
        sizes[packed.codec] += outline.sizes[name]
    return sizes


def _bytes_by_product(outline: Outline, dtype: str) -> Mapping[str, float]:
    """Return what a token of ``dtype`` reads of what ``outline`` multiplies as it rests, by the products that read most
    of it.
    """
    read: dict[str, float] = defaultdict(float)
    for products in outline.skeleton.products:
        own = {outline.skeleton.leader(name) for name in products.tensors}
        name = product_name(products.matrix_text, products.parts, products.compute or dtype, tiles=products.tiles)
        read[name] += sum(outline.sizes[each] * SINGLE.share(outline.routed.get(each)) for each in own)
    return dict(Counter(read).most_common(_MOST_SHAPES))


def _host_weights(outline: Outline) -> HostWeights:
    """Return what most weights of ``outline`` are to products that read them as numbers."""
    sizes: Counter[HostWeights] = Counter()
    for spec in _numbers(outline):
        sizes[_as_read(spec)] += spec.bytes
    return max(sizes, key=sizes.__getitem__, default=OF_FILES)


def _read_bytes(outline: Outline, weights: HostWeights) -> dict[Shape, float]:
    """Return what a token reads of such ``weights`` of ``outline``, by the shape of those that it multiplies by."""
    read: Counter[Shape] = Counter()
    for spec in _numbers(outline):
        if _as_read(spec) == weights and _is_matrix(spec.shape):
            share, (rows, columns) = SINGLE.share(outline.routed.get(spec.name)), spec.shape[-2:]
            together = round(math.prod(spec.shape[:-2]) * share)  # of experts those of a token, by one operator
            read[together * rows, columns] += spec.bytes * share  # type: ignore[assignment]
    return dict(read.most_common(_MOST_SHAPES))


def _as_read(spec: TensorSpec) -> HostWeights:
    """Return what the tensor is to products that read it: what rests packed is dequantised for them."""
    return HostWeights(spec.dtype, spec.packed is not None)


def _is_matrix(shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of ``shape`` is a matrix or stacked ones, of experts; no kernel of a convolution is."""
    return len(shape) in (2, 3) and min(shape[-2:]) >= _LEAST_SIDE


def _numbers(outline: Outline) -> Iterator[TensorSpec]:
    """Return the tensors of ``outline`` that products read as numbers."""
    multiplied = (spec for spec in outline.skeleton.unique if spec.name not in outline.tables)
    return (spec for spec in multiplied if spec.dtype in _MULTIPLIED_DTYPES and spec.name not in outline.multiplied)


def host_kernels(config: Config, cache: Path) -> Kernels:
    """Return what this machine's kernels take beside their operands; nominal figures where the host is another one."""
    return NOMINAL if host_is_described(config) else local_kernels(cache / MEASURED)


def with_row_blocks(outline: Outline, config: Config, cache: Path, machine: Hardware) -> Outline:
    """Return ``outline`` with what says in which dtypes products by blocks of rows have the same bits as whole ones.

    It is known of this host's kernels alone, and not of an accelerator's that is really there. A training is never
    computed so: what autograd saves is whole weights.
    """
    elsewhere = host_is_described(config) or not all(device.simulated for device in machine.accelerators)
    dtypes = possible_dtypes(outline)
    if elsewhere or asking(config) == "finetune" or not dtypes:
        return outline
    return replace(outline, exact=lru_cache(partial(exact_dtypes, cache / MEASURED, dtypes)))
