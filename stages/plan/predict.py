"""What each device will hold at its peak, and how long a token will take.

Decoding is bound by the movement of weights: each token reads the resident weights once from the memory they lie in,
and the streamed ones once from where they wait. Reading ahead overlaps these, so a token takes as long as the slowest
of storage, link and memory (the roofline argument, with bytes in place of operations).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from stages.plan.geometry import Geometry, Request
from stages.plan.outline import Outline
from stages.plan.placement import Placement, streamed_bytes
from stages.plan.plan import Plan
from stages.plan.rates import Rates
from stages.units import CPU, DISK, DTYPE_BYTES, DeviceId, in_tier_order

PROCESS_BYTES = 280 * 10**6
"""What the process holds on the host beside weights: Python, torch and transformers, imported and warm."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a request takes on the device that computes a layer, in bytes: keys and values, and activations."""

    cache_bytes: int
    activation_bytes: int


def work(outline: Outline, geometry: Geometry, request: Request) -> Work:
    """Return what ``request`` takes beside weights: the cache of all layers, and the activations of the widest moment.

    Activations: for each token of the prompt the residual stream, the attention's four projections and two
    intermediate rows; then the logits of the last position, in the model's dtype and twice in float32.
    """
    width = int(DTYPE_BYTES[compute_dtype(outline)])
    cache = geometry.layers * geometry.cached * request.tokens * width
    rows = request.tokens * (6 * geometry.hidden + 2 * geometry.intermediate) * width
    logits = request.sequences * geometry.vocabulary * (width + 2 * 4)
    return Work(cache, max(rows, logits))


def compute_dtype(outline: Outline) -> str:
    """Return the floating dtype that most of the model's bytes have."""
    count: Counter[str] = Counter()
    for tensor in outline.skeleton.unique:
        if tensor.dtype.startswith(("float", "bfloat")):
            count[tensor.dtype] += tensor.bytes
    return max(count, key=lambda dtype: count[dtype], default="float32")


def predict(outline: Outline, plan: Plan, needs: Work, rates: Rates) -> Plan:
    """Return ``plan`` with what is predicted of it: each device's peak by its parts, and the seconds of a token."""
    placement = Placement(
        {tensor.name: plan.homes[tensor.name] for tensor in outline.skeleton.unique}, plan.main_device
    )
    forecast = _forecast(outline, plan, placement, rates)
    return replace(plan, predicted=_peaks(outline, plan, needs), forecast=forecast)


def _peaks(outline: Outline, plan: Plan, needs: Work) -> dict[DeviceId, dict[str, int]]:
    """Return the bytes of each device at its peak, by what they are for.

    While the host is filled, the largest tensor is there twice for a moment; later its second place is used otherwise.
    """
    layers = [layer.name for layer in outline.layers if layer.name in outline.blocks] or [""]
    computing = [_computes(outline, plan, name) for name in layers]
    largest = max((size for name, size in outline.sizes.items() if plan.homes[name] == CPU), default=0)
    peaks: dict[DeviceId, dict[str, int]] = {}
    for device in in_tier_order([*plan.resident_bytes, plan.main_device, CPU]):
        held = {"weights": plan.resident_bytes.get(device, 0)}
        if device != DISK:
            held["reserve"] = plan.reserve_bytes if device == plan.main_device else 0
            held["cache"] = needs.cache_bytes * computing.count(device) // len(computing)
            held["activations"] = needs.activation_bytes if device in plan.execution.values() else 0
        if device == CPU:
            held["process"] = PROCESS_BYTES
            held["loading"] = max(0, largest - sum(held[part] for part in ("reserve", "cache", "activations")))
        peaks[device] = held
    return peaks


def _computes(outline: Outline, plan: Plan, name: str) -> DeviceId:
    inside = (plan.execution.get(tensor.rpartition(".")[0]) for tensor in outline.below(name))
    return next((device for device in inside if device is not None), plan.main_device)


def _forecast(outline: Outline, plan: Plan, placement: Placement, rates: Rates) -> dict[str, float | int | str]:
    """Return the bytes streamed and the seconds of a token, and which of storage, link and memory bounds it."""
    streamed = streamed_bytes(outline, placement)
    total = sum(streamed.values())
    held = plan.resident_bytes
    memory = {"host memory": held.get(CPU, 0) + total if plan.main_device == CPU else 0}
    memory["device memory"] = sum(count for device, count in held.items() if isinstance(device, int))
    seconds: Mapping[str, float] = {
        "storage": streamed.get(DISK, 0) / rates.storage,
        "link": total / rates.link if plan.main_device != CPU else 0.0,
        "host memory": memory["host memory"] / rates.host,
        "device memory": (memory["device memory"] + (total if plan.main_device != CPU else 0)) / rates.device,
    }
    bound = max(seconds, key=lambda name: seconds[name])
    return {"streamed_bytes_per_token": total, "seconds_per_token": seconds[bound], "bound": bound}
