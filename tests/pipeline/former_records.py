"""Records as the release before wrote them: this one's, with every name that was another then."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

METRICS = {
    "bottleneck": "bound",
    "lower_bound_seconds_per_token": "bound_seconds_per_token",
    "repeats": "samples",
    "contended_repeats": "busy_samples",
    "transfer_stall_seconds": "link_stall_seconds",
    "transfer_bytes_per_token": "link_bytes_per_token",
    "transfer_stall_seconds_per_token": "link_stall_seconds_per_token",
    "transfer_bytes_per_forward": "link_bytes_per_forward",
    "transfer_stall_seconds_per_forward": "link_stall_seconds_per_forward",
    "predicted_bottleneck": "predicted_bound",
    "predicted_transfer_bytes_per_token": "predicted_link_bytes_per_token",
    "predicted_quantised_bytes_per_token": "predicted_packed_bytes_per_token",
    "predicted_dequantised_bytes_per_token": "predicted_unpacked_bytes_per_token",
    "predicted_device_dequantised_bytes_per_token": "predicted_device_unpacked_bytes_per_token",
}
"""What each was called, by its name of today."""
WORDS = {"host-to-device": "link", "dequantising": "unpacking"}
RATES = {"host_to_device": "link", "dequantising": "unpacking"}


def of_before(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``record``, the content of a ``run.json``, as the release before wrote it; its signature is none."""
    old = deepcopy(dict(record)) | {"schema_version": 1, "signature": None}
    old["metrics"] = _metrics(old["metrics"])
    old["metric_table"] = {_name(name): _metric(about) for name, about in old["metric_table"].items()}
    old["samples"] = [_sample(repeat) for repeat in old.pop("repeats")]
    for host in old.get("hosts", ()):
        host["metrics"] = _metrics(host["metrics"])
    old["config"] = _config(old["config"])
    return old


def _config(config: dict[str, Any]) -> dict[str, Any]:
    objective, hardware = config.get("objective"), config.get("hardware")
    if objective:
        figure = objective.pop("metric", None)
        config["objective"] = {
            "figure": figure and _name(figure),
            **{side: _metrics(at) for side, at in objective.items()},
        }
    for machine in [hardware, *((hardware or {}).get("hosts") or ())] if hardware else ():
        _machine(machine)
    return config


def _machine(machine: dict[str, Any]) -> None:
    if machine.get("rates"):
        machine["rates"] = {RATES.get(name, name): rate for name, rate in machine["rates"].items()}
    for device in machine.get("devices") or ():
        if "host_to_device" in device:
            device["link"] = device.pop("host_to_device")
        if device.get("rates"):
            device["rates"] = {RATES.get(name, name): rate for name, rate in device["rates"].items()}


def _sample(repeat: dict[str, Any]) -> dict[str, Any]:
    processor = dict(repeat.get("processor") or {})
    if "contended" in processor:
        processor["busy"] = processor.pop("contended")
    return {**repeat, "metrics": _metrics(repeat["metrics"]), "processor": processor}


def _metric(about: dict[str, Any]) -> dict[str, Any]:
    kind = {"lower_bound": "bound"}.get(about.get("kind", ""), about.get("kind"))
    of = METRICS.get(about.get("of", ""), about.get("of"))
    return {**about, **({"kind": kind} if kind else {}), **({"of": of} if of else {})}


def _metrics(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {
        _name(name): WORDS.get(value, value) if isinstance(value, str) else value for name, value in metrics.items()
    }


def _name(name: str) -> str:
    before, dot, device = name.partition(".")
    return f"{METRICS.get(before, before)}{dot}{device}"
