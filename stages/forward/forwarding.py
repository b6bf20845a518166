"""The forwards of one run: calls in, a ``Forwarded`` out, measured as it goes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from pipeline.atomic_files import write_text
from pipeline.errors import ConfigError, foreign, named
from pipeline.regular_files import read_object
from pipeline.stage import Context
from stages.calls.arguments import Tensors, calls
from stages.calls.call import answer
from stages.calls.options import ForwardOptions, count_rows, read_texts
from stages.checkpoints.dtypes import dtype_name
from stages.checkpoints.hub import checkpoint_folder
from stages.dispatch.stage import Dispatched
from stages.dispatch.transfer.trace import FILE_NAME as TRACE_NAME, Trace
from stages.forward.inputs import OUTPUTS, ForwardInputs
from stages.forward.joined import Joined
from stages.forward.labels import say
from stages.inference.cost import ForwardCost, Metrics, expert_uses, run_metrics
from stages.inference.measured import measured_peaks
from stages.machine.aligned_memory import byte_view


@dataclass(frozen=True, slots=True)
class Forwarded:
    """``tensors`` are the outputs by name, ``labels`` what they say; ``together`` the rows that shared each call.

    ``measured``: device → peak bytes; ``experts``: layer → what its experts came to.
    """

    tensors: Tensors
    labels: Mapping[str, list[Any]]
    together: list[list[int]]
    metrics: Metrics
    measured: dict[str, int]
    experts: dict[str, dict[str, int]]
    trace: Trace | None = None

    def save(self, file: Path) -> None:
        """Write ``file``, the outputs beside it, and ``trace.json`` if there is a trace."""
        with named(file.with_name(OUTPUTS)):
            save_file(self.tensors, file.with_name(OUTPUTS))
        data = {
            "outputs": [_told(name, tensor) for name, tensor in self.tensors.items()],
            "labels": self.labels,
            "together": self.together,
            "metrics": self.metrics,
            "measured": self.measured,
            "experts": self.experts,
        }
        write_text(file, json.dumps(data, indent=1) + "\n")
        if self.trace is not None:
            self.trace.save(file.with_name(TRACE_NAME))


def perform(inputs: ForwardInputs, context: Context) -> Forwarded:
    """Call the live model of the stage dispatch with all that ``inputs`` give."""
    dispatched: Dispatched = context.live("dispatch")
    given, model = inputs.given, dispatched.model
    cost, joined, together = ForwardCost(dispatched.streamer.traffic), Joined(), []
    with tqdm(total=count_rows(given) or None, desc="forward", unit="row", disable=None, leave=False) as bar:
        for call in calls(given, inputs.model):
            began = time.perf_counter()
            with foreign(ConfigError, f"{call.key}: {type(model).__name__}'s forward fails with these inputs"):
                joined.add(call, answer(model, call, given, device=dispatched.device))
            cost.add(time.perf_counter() - began, results=len(call.rows))
            together.append(list(call.rows))
            bar.update(len(call.rows))
    tensors = joined.tensors()
    own = {
        "forward_seconds": cost.seconds,
        "forwards": cost.forwards,
        "rows_per_second": cost.results_per_second,
        **cost.metrics(),
    }
    labels = say(tensors, _config(inputs.model), _texts(given))
    return Forwarded(
        tensors,
        labels,
        together,
        run_metrics(dispatched, own),
        measured_peaks(context, dispatched),
        expert_uses(dispatched),
        dispatched.streamer.trace,
    )


def _config(model: Mapping[str, Any]) -> dict[str, Any]:
    return read_object(checkpoint_folder(model) / "config.json")


def _texts(given: ForwardOptions) -> list[str]:
    texts = read_texts(given) if given.texts or given.texts_file else {}
    return [text if isinstance(text, str) else " | ".join(text) for text in texts.values()]


def _told(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return what the record has of an output: its name, dtype and shape, and the SHA-256 of its bytes in hex."""
    digest = hashlib.sha256(byte_view(tensor) if tensor.numel() else b"").hexdigest()
    return {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "sha256": digest}
