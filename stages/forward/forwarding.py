"""The forwards of one run: calls in, a ``Forwarded`` out, measured as it goes."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tqdm import tqdm

from offstage.pipeline.atomic_files import write_text
from offstage.pipeline.errors import ConfigError, foreign, named
from offstage.pipeline.regular_files import read_object
from offstage.pipeline.stage import Context
from offstage.stages.calls.arguments import Tensors, calls
from offstage.stages.calls.call import answer
from offstage.stages.calls.options import ForwardOptions, count_rows, read_texts
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.checkpoints.hub import checkpoint_folder
from offstage.stages.dispatch.stage import Dispatched
from offstage.stages.dispatch.transfer.trace import FILE_NAME as TRACE_NAME, Trace
from offstage.stages.forward.inputs import OUTPUTS, ForwardInputs
from offstage.stages.forward.joined import Joined
from offstage.stages.forward.labels import say
from offstage.stages.inference.cost import ForwardCost, Metrics, expert_uses, run_metrics
from offstage.stages.inference.pass_meter import PassMeter, storage_rate
from offstage.stages.inference.repeats import Outputs, Pass
from offstage.stages.inference.timed_samples import TimedSample
from offstage.stages.machine.aligned_memory import byte_view
from offstage.stages.plan import plan as plans


@dataclass(frozen=True, slots=True)
class Forwarded:
    """``tensors`` are the outputs by name, ``labels`` what they say; ``together`` the rows that shared each call.

    ``measured``: device → peak bytes; ``experts``: layer → what its experts came to; ``sample``: how the time went.
    """

    tensors: Tensors
    labels: Mapping[str, list[Any]]
    together: list[list[int]]
    metrics: Metrics
    measured: dict[str, int]
    experts: dict[str, dict[str, int]]
    sample: TimedSample
    trace: Trace | None = None

    def save(self, file: Path) -> None:
        """Write ``file``, the outputs beside it, and ``trace.json`` if there is a trace."""
        with named(file.with_name(OUTPUTS)):
            save_file(self.tensors, file.with_name(OUTPUTS))
        data = {
            "outputs": _told_all(self.tensors),
            "labels": self.labels,
            "together": self.together,
            "metrics": self.metrics,
            "measured": self.measured,
            "experts": self.experts,
            "sample": self.sample.stored(),
        }
        write_text(file, json.dumps(data, indent=1) + "\n")
        if self.trace is not None:
            self.trace.save(file.with_name(TRACE_NAME))


class ForwardSession:
    """The placed model and what it is given, to be called as often as is wanted; ``passes`` counts."""

    def __init__(self, inputs: ForwardInputs, context: Context) -> None:
        self.inputs, self._context = inputs, context
        plan = context.artifact("plan").read(plans.Plan, plans.FILE_NAME)
        self._storage_rate = storage_rate(inputs, plan)  # before the weights take the memory that is planned
        self.dispatched: Dispatched = context.live("dispatch")
        self.passes = 0

    def run(self, *, title: str = "forward") -> tuple[Tensors, list[list[int]], TimedSample]:
        """Call the model with all that is given; return its outputs, the rows of each call, and how the time went."""
        meter = PassMeter(self._context, self.dispatched, passes=self.passes)
        cost, joined, together = self._call(title)
        self.passes += 1
        metrics: Metrics = {
            "forward_seconds": cost.seconds,
            "forwards": cost.forwards,
            "rows": sum(map(len, together)),
            "rows_per_second": cost.results_per_second,
            **cost.metrics(),
        }
        return joined.tensors(), together, meter.sample(metrics, storage_rate=self._storage_rate)

    @contextmanager
    def repeating(self) -> Iterator[Pass]:
        """Yield what calls it with all of that again."""

        def call_again(title: str) -> tuple[TimedSample, Outputs]:
            tensors, _, sample = self.run(title=title)
            return sample, _told_all(tensors)

        yield call_again

    def _call(self, title: str) -> tuple[ForwardCost, Joined, list[list[int]]]:
        given, model = self.inputs.given, self.dispatched.model
        cost, joined, together = ForwardCost(self.dispatched.streamer.traffic), Joined(), []
        with tqdm(total=count_rows(given) or None, desc=title, unit="row", disable=None, leave=False) as bar:
            for call in calls(given, self.inputs.model):
                began = time.perf_counter()
                with foreign(ConfigError, f"{call.key}: {type(model).__name__}'s forward fails with these inputs"):
                    joined.add(call, answer(model, call, given, device=self.dispatched.device))
                cost.add(time.perf_counter() - began, results=len(call.rows))
                together.append(list(call.rows))
                bar.update(len(call.rows))
        return cost, joined, together


def perform(session: ForwardSession) -> Forwarded:
    """Call the model of ``session`` with all that it is given, and say what came out."""
    inputs, dispatched = session.inputs, session.dispatched
    tensors, together, sample = session.run()
    return Forwarded(
        tensors,
        say(tensors, _config(inputs.model), _texts(inputs.given)),
        together,
        run_metrics(dispatched, dict(sample.metrics)),
        dict(sample.peaks),
        expert_uses(dispatched),
        sample,
        dispatched.streamer.trace,
    )


def _config(model: Mapping[str, Any]) -> dict[str, Any]:
    return read_object(checkpoint_folder(model) / "config.json")


def _texts(given: ForwardOptions) -> list[str]:
    texts = read_texts(given) if given.texts or given.texts_file else {}
    return [text if isinstance(text, str) else " | ".join(text) for text in texts.values()]


def _told_all(tensors: Tensors) -> list[dict[str, Any]]:
    return [_told(name, tensor) for name, tensor in tensors.items()]


def _told(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return what the record has of an output: its name, dtype and shape, and the SHA-256 of its bytes in hex."""
    digest = hashlib.sha256(byte_view(tensor) if tensor.numel() else b"").hexdigest()
    return {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "sha256": digest}
