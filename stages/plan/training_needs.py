"""What a training takes beside weights on the devices of a plan, and the share of its activations that must go.

Activations that are offloaded go from an accelerator to the host, or to disk. Where the host computes, only disk is
elsewhere.
"""

from __future__ import annotations

from offstage.pipeline.stage import Config
from offstage.pipeline.typed_config import read
from offstage.stages.machine.hardware import Hardware
from offstage.stages.machine.host_memory import TRAINING_BYTES
from offstage.stages.machine.kernels import Kernels
from offstage.stages.plan.budgets import rooms
from offstage.stages.plan.memory_needs import MemoryNeeds, compute_dtype
from offstage.stages.plan.options import PlanConfig
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.geometry import Geometry, Request, read_geometry
from offstage.stages.plan.request.requests import read_request, what_learns
from offstage.stages.plan.request.training import FinetuneOptions
from offstage.stages.plan.request.training_demand import TrainingDemand
from offstage.stages.units import CPU, DTYPE_BYTES, DeviceId, parse_size

_GROWN = 2
"""How many times what lies in it the memory on the host may have grown to: it doubles, and is registered whole."""


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
        held = outline.skeleton.bytes
        if what_learns(config) != "all":
            given = read(PlanConfig, config).max_memory or {}
            largest = max((layer.bytes for layer in outline.layers), default=0)
            held = min(held, parse_size(given.get(str(main), largest), of=held))
        process = machine.host.process_bytes + TRAINING_BYTES if main == CPU else 0
        room = rooms(machine, leaves=True)[main] - held - demand.kept_bytes - process - scratch - library
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
