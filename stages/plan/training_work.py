"""What a training takes beside weights on the devices of a plan, and the share of its activations that must go.

Activations that are offloaded go from an accelerator to the host, or to disk. Where the host computes, only disk is
elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from offstage.stages.machine.hardware import Hardware
from offstage.stages.machine.host_memory import TRAINING_BYTES
from offstage.stages.machine.kernels import Kernels
from offstage.stages.plan.budgets import rooms
from offstage.stages.plan.outline import Outline
from offstage.stages.plan.request.geometry import Geometry, Request
from offstage.stages.plan.request.training import ActivationOffload
from offstage.stages.plan.request.training_demand import TrainingDemand
from offstage.stages.plan.work import Work, compute_dtype
from offstage.stages.units import CPU, DTYPE_BYTES, DeviceId, parse_size

_GROWN = 2
"""How many times what lies in it the memory on the host may have grown to: it doubles, and is registered whole."""


@dataclass(frozen=True, slots=True)
class TrainingWork:
    """A training on ``machine``: what a step is in ``demand`` of, and which activations are ``asked`` to go.

    ``whole`` says that all weights learn, so that all are resident; ``max_memory`` are the budgets that were given.
    """

    demand: TrainingDemand
    asked: ActivationOffload
    machine: Hardware
    whole: bool
    max_memory: Mapping[str, str]

    def ratio(self, outline: Outline, *, beside: int) -> float:
        """Return the share of the activations that goes; where that is left open, the least with which a step fits.

        It fits in the memory of the device that computes, beside the weights that are resident there, the optimizer,
        and ``beside`` bytes. Raises ``BudgetError`` where no share is enough.
        """
        if self.asked.ratio != "auto":
            return float(self.asked.ratio)
        if not self._leaves_its_device:
            return 0.0
        main: DeviceId = 0 if self.machine.accelerators else CPU
        held = outline.skeleton.bytes
        if not self.whole:
            largest = max((layer.bytes for layer in outline.layers), default=0)
            held = min(held, parse_size(self.max_memory.get(str(main), largest), of=held))
        process = self.machine.host.process_bytes + TRAINING_BYTES if main == CPU else 0
        room = rooms(self.machine, leaves=True)[main] - held - self.demand.kept_bytes - process - beside
        return self.demand.peaks.least_ratio(room)

    def at(self, ratio: float, *, scratch: int) -> Work:
        """Return what the training takes at that ``ratio``; the host's kernels take ``scratch`` beside."""
        to_host = self._leaves_its_device and self.asked.target == "host"
        return Work(
            activation_bytes=self.demand.step_bytes(ratio if self._leaves_its_device else 0.0),
            scratch_bytes=scratch,
            library_bytes=TRAINING_BYTES,
            learning_bytes=self.demand.kept_bytes,
            offloaded_bytes=round(_GROWN * ratio * self.demand.peaks.saved_bytes) if to_host else 0,
        )

    @property
    def _leaves_its_device(self) -> bool:
        return bool(self.machine.accelerators) or self.asked.target == "disk"


def product_bytes(outline: Outline, geometry: Geometry, request: Request, kernels: Kernels) -> int:
    """Return the most that the host's kernels take beside a product of a step.

    Its widest matrix is the logits of all positions, or the largest weight, whose gradient is a product too.
    """
    dtype = compute_dtype(outline)
    widest = max(geometry.hidden, geometry.intermediate, geometry.vocabulary) * int(DTYPE_BYTES[dtype])
    matrices = (tensor.bytes for tensor in outline.skeleton.unique if len(tensor.shape) == 2)
    product = max(request.sequences * request.prompt * widest, *matrices)
    return round(max(kernels.get(f"mm {dtype}", (0,))) * product)
