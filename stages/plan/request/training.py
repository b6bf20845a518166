"""What a training takes beside the model's weights: gradients, what is kept of each weight, activations.

Those activations that are offloaded go from an accelerator to the host, or to disk. Where the host computes, only disk
is elsewhere.

Only the model's code knows what it saves for the backward pass, and how much that is hangs on how the model is trained.
So a step is rehearsed once, at the very shape of the request, before the plan is made, and what it showed is kept
beside the figures of the machine: a run that is served from the cache rehearses nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offstage.pipeline.cache.fingerprint import fingerprint
from offstage.pipeline.decoding import decode
from offstage.pipeline.stage import MEASURED, Config
from offstage.pipeline.typed_config import read
from offstage.stages.checkpoints.adapters import adapter_folder
from offstage.stages.empty_init.step_peaks import TrainingPeaks
from offstage.stages.inputs.finetune_options import FinetuneOptions
from offstage.stages.machine.hardware import Hardware
from offstage.stages.machine.host_memory import TRAINING_BYTES
from offstage.stages.machine.kept_figures import kept_figure
from offstage.stages.machine.kernels import Kernels
from offstage.stages.plan.budgets import rooms
from offstage.stages.plan.memory_needs import MemoryNeeds, compute_dtype
from offstage.stages.plan.options import PlanConfig
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.geometry import Geometry, Request, geometry_of, read_geometry
from offstage.stages.plan.request.requests import read_request, what_learns
from offstage.stages.units import CPU, DTYPE_BYTES, DeviceId, parse_size

if TYPE_CHECKING:
    from torch import nn

Parameters = dict[str, "nn.Parameter"]

FILE_NAME = "training.json"
VERSION = 2
"""Raised by hand where what is rehearsed changes."""

_KEPT = {"adamw": 2, "sgd": 0}
"""How many tensors an optimizer keeps of each weight, of the weight's own size."""
_MADE = {"adamw": 3, "sgd": 1}
"""How many it makes to change a weight."""
_GROWN = 2
"""How many times what lies in it the memory on the host may have grown to: it doubles, and is registered whole."""


@dataclass(frozen=True, slots=True)
class TrainingDemand:
    """What a step of training holds: the ``peaks`` of its forward and backward, and what stays from step to step.

    Of each weight so many tensors of its size are ``kept``, the optimizer's and the weight itself where its adapter is
    new. So many are ``made`` while it is changed, one weight after the other, the largest of ``largest_bytes``.
    """

    peaks: TrainingPeaks
    largest_bytes: int
    kept: int = 0
    made: int = 0

    @property
    def kept_bytes(self) -> int:
        """What is there from step to step."""
        return self.kept * self.peaks.gradient_bytes

    def step_bytes(self, ratio: float) -> int:
        """Return the most that a step holds beside weights and what is kept, at that ratio of activation offload."""
        return max(self.peaks.peak(ratio), self.peaks.gradient_bytes + self.made * self.largest_bytes)


def training_demand(config: Config, cache: Path, *, skeleton: str, live: Callable[[], nn.Module]) -> TrainingDemand:
    """Return what a step of the config's ``finetune`` takes.

    ``skeleton`` is the key of the model, and ``live`` returns it on meta. Raises ``ConfigError`` for an adapter that
    has no place in the model.
    """
    options, model = read(FinetuneOptions, config["finetune"]), config["model"]
    window = options.sequence(read_geometry(model).context)
    adapted = adapter_folder(model) is not None
    shaping = ("batch_size", "checkpointing", "lora")
    asked = {name: value for name, value in asdict(options).items() if name in shaping}
    asked |= {"accumulates": options.gradient_accumulation > 1, "window": window, "adapted": adapted}
    key = fingerprint([VERSION, asked, skeleton])
    probe = partial(_rehearse, options, live, window=window, adapted=adapted)
    figure = kept_figure(cache / MEASURED, FILE_NAME, key, probe) or probe()
    kept = _KEPT[options.optimizer] + (options.lora is not None)
    return replace(decode(TrainingDemand, figure), kept=kept, made=_MADE[options.optimizer])


def training_needs(
    demand: TrainingDemand, outline: Outline, config: Config, machine: Hardware, kernels: Kernels, *, library: int
) -> tuple[MemoryNeeds, float]:
    """Return what the config's ``finetune`` takes on ``machine``, and the share of its activations that goes.

    Where that is left open, it is the least with which a step fits in the memory of the device that computes, beside
    the weights that are resident there, the optimizer, what ``kernels`` take and ``library`` bytes. Raises
    ``BudgetError`` where no share is enough.
    """
    asked = read(FinetuneOptions, config["finetune"]).activation_offload
    scratch = _product_bytes(outline, read_geometry(config["model"]), read_request(config), kernels)
    main: DeviceId = 0 if machine.accelerators else CPU
    goes = main != CPU or asked.target == "disk"
    if asked.ratio != "auto":
        ratio = float(asked.ratio)
    elif not goes:
        ratio = 0.0
    else:
        weights = outline.skeleton.bytes
        if what_learns(config) != "all":
            given = read(PlanConfig, config).max_memory or {}
            largest = max((layer.bytes for layer in outline.layers), default=0)
            weights = min(weights, parse_size(given.get(str(main), largest), of=weights))
        process = machine.process_bytes[main] + (TRAINING_BYTES if main == CPU else 0)
        room = rooms(machine, leaves=True)[main] - weights - demand.kept_bytes - process - scratch - library
        ratio = demand.peaks.least_ratio(room)
    needs = MemoryNeeds(
        activation_bytes=demand.step_bytes(ratio if goes else 0.0),
        scratch_bytes=scratch,
        library_bytes=TRAINING_BYTES + library,
        learning_bytes=demand.kept_bytes,
        offloaded_bytes=round(_GROWN * ratio * demand.peaks.saved_bytes) if goes and asked.target == "host" else 0,
    )
    return needs, ratio


def _product_bytes(outline: Outline, geometry: Geometry, request: Request, kernels: Kernels) -> int:
    """Return the most that the host's kernels take beside a product of a step.

    Its widest matrix is the logits of all positions, or the largest weight, whose gradient is a product too.
    """
    dtype = compute_dtype(outline)
    widest = max(geometry.hidden, geometry.intermediate, geometry.vocabulary) * int(DTYPE_BYTES[dtype])
    matrices = (tensor.bytes for tensor in outline.skeleton.unique if len(tensor.shape) == 2)
    product = max(request.sequences * request.prompt * widest, *matrices)
    return round(max(kernels.get(f"mm {dtype}", (0,))) * product)


def _rehearse(options: FinetuneOptions, live: Callable[[], nn.Module], *, window: int, adapted: bool) -> dict[str, Any]:
    """Return the figure of one step, rehearsed on a copy of the model."""
    import torch

    from offstage.stages.empty_init.fake_weights import RefusedError
    from offstage.stages.empty_init.training_peaks import rehearse_step

    model: Any = copy.deepcopy(live())
    adapt(model, options)
    learning = choose_learning(model, adapter=adapted or options.lora is not None)

    def call(model: nn.Module) -> object:
        ids = torch.ones((options.batch_size, window), dtype=torch.long)
        return model(input_ids=ids, labels=ids, use_cache=False)

    sizes = [weight.nbytes for weight in learning.values()]
    try:
        peaks = rehearse_step(model, call, accumulates=options.gradient_accumulation > 1).peaks
    except RefusedError:
        geometry = geometry_of(model.config.to_dict())
        peaks = bound_peaks(geometry, tokens=options.batch_size * window, gradient_bytes=sum(sizes))
    return {"peaks": asdict(peaks), "largest_bytes": max(sizes)}


def bound_peaks(geometry: Geometry, *, tokens: int, gradient_bytes: int) -> TrainingPeaks:
    """Return the most that a step over so many ``tokens`` holds, for a model whose code can't be rehearsed.

    All in float32: what a layer's modules take and give, and logits with what a loss makes of them. No offload of
    activations is known to lower it.
    """
    layer = 20 * geometry.hidden + 4 * geometry.intermediate + 4 * geometry.cached
    saved = 4 * tokens * (geometry.layers * layer + 5 * geometry.vocabulary)
    every = saved + gradient_bytes
    return TrainingPeaks(saved, gradient_bytes, ((saved, saved, saved),), ((every, saved, saved),))


def adapt(model: nn.Module, options: FinetuneOptions) -> None:
    """Put into ``model`` what the options ask for: a new adapter, on meta, and checkpointing of its layers.

    It is made one that trains here for a rehearsal on meta and for the training itself alike.
    """
    from offstage.stages.empty_init.adapted_model import add_new_adapter

    if options.lora is not None:
        add_new_adapter(model, options.lora.settings, key="finetune.lora")
    if options.checkpointing:
        enable: Any = model.gradient_checkpointing_enable
        enable(gradient_checkpointing_kwargs={"use_reentrant": False})


def choose_learning(model: nn.Module, *, adapter: bool) -> Parameters:
    """Have the floating parameters of ``model`` learn, or only those of its ``adapter``; return them by name.

    Tied ones are there once. The model is in training mode then, so that dropout drops what its config says.
    """
    from offstage.stages.empty_init.adapted_model import without_adapter

    added = set(without_adapter(model).added.values()) if adapter else set()
    chosen = {
        name: weight
        for name, weight in model.named_parameters()
        if (name in added if adapter else weight.is_floating_point())
    }
    model.requires_grad_(False)
    for weight in chosen.values():
        weight.requires_grad_(True)
    model.train()
    return chosen
