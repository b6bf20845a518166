"""What is noted of one pass over the placed model: when it began, who had the processor, how the machine was."""

from __future__ import annotations

import os
from collections.abc import Sequence
from datetime import UTC, datetime

import torch

from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.hub import local_weights
from offstage.stages.dispatch.stage import Dispatched
from offstage.stages.inference.cost import Metrics
from offstage.stages.inference.inputs import InferenceInputs
from offstage.stages.inference.measured import measured_peaks
from offstage.stages.inference.timed_samples import TimedSample
from offstage.stages.machine.probes import read_speed
from offstage.stages.machine.processor import ProcessorMeter
from offstage.stages.plan.plan import Plan
from offstage.stages.units import DISK


class PassMeter:
    """Begins with a pass over the model that was ``dispatched``, which had made so many ``passes`` before."""

    def __init__(self, context: Context, dispatched: Dispatched, *, passes: int) -> None:
        self._context, self._dispatched, self._passes = context, dispatched, passes
        self._began, self._load = datetime.now(UTC), os.getloadavg()
        self._meter = ProcessorMeter()

    def sample(
        self, metrics: Metrics, *, storage_rate: int | None, is_whole: bool = True,
        first_token_seconds: Sequence[float] = (), token_seconds: Sequence[float] = (),
    ) -> TimedSample:  # fmt: skip
        """Return how the pass went, which has just ended; the arguments are as in ``TimedSample``."""
        use = self._meter.use()
        return TimedSample(
            measured=self._began.isoformat(timespec="milliseconds"),
            passes_before=self._passes,
            is_whole=is_whole,
            metrics={
                "load_seconds": self._dispatched.load_seconds,
                "base_host_bytes": self._dispatched.base_bytes,
                **metrics,
            },
            first_token_seconds=first_token_seconds,
            token_seconds=token_seconds,
            processor=use.told(),
            machine={
                "load_average": list(self._load),
                "threads": torch.get_num_threads(),
                "interop_threads": torch.get_num_interop_threads(),
                "storage_bytes_per_second": storage_rate,
            },
            peaks=measured_peaks(self._context, self._dispatched),
        )


def storage_rate(inputs: InferenceInputs, plan: Plan) -> int | None:
    """Return the bytes a second at which the storage gives weights now; null where none are read from it."""
    files = local_weights(inputs.model) if any(line.home == DISK for line in plan.tensors.values()) else []
    return read_speed(max(files, key=lambda path: path.stat().st_size)) if files else None
