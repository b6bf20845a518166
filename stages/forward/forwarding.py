"""The forwards of one run: calls in, their outputs out, measured as it goes."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import torch
from tqdm import tqdm

from offstage.pipeline.errors import ConfigError, foreign
from offstage.pipeline.regular_files import read_object
from offstage.stages.calls.arguments import calls
from offstage.stages.calls.call import answer
from offstage.stages.calls.options import count_rows, read_texts
from offstage.stages.checkpoints.dtypes import dtype_name
from offstage.stages.checkpoints.model_source import ModelSource
from offstage.stages.forward.inputs import OUTPUTS, ForwardInputs
from offstage.stages.forward.joined import Joined
from offstage.stages.forward.labels import say
from offstage.stages.inference.cost import ForwardCost, Metrics
from offstage.stages.inference.progress import Progress
from offstage.stages.inference.session import ModelSession, PassResult
from offstage.stages.machine.aligned_memory import byte_view


class ForwardSession(ModelSession[ForwardInputs]):
    """The placed model and the calls that are made of it. Its outputs lie by name beside the artifact's file.

    The artifact has what they are, the ``labels`` that they say, and the rows that went ``together`` in each call.
    """

    task = "forward"

    @property
    def count(self) -> int:
        """How many rows are given."""
        return count_rows(self.inputs.given)

    def answer(self, progress: Progress, title: str) -> PassResult:
        """Call the model with all that is given."""
        cost, joined, together = self._call(title)
        tensors = joined.tensors()
        described = [_told(name, tensor) for name, tensor in tensors.items()]
        config = read_object(ModelSource.of(self.inputs.model).folder / "config.json")
        texts = [text if isinstance(text, str) else " | ".join(text) for text in read_texts(self.inputs.given).values()]
        rows: Metrics = {"rows": sum(map(len, together)), "rows_per_second": cost.results_per_second}
        return PassResult(
            outputs=described,
            metrics={"forward_seconds": cost.seconds, "forwards": cost.forwards, **rows, **cost.metrics()},
            content={
                "outputs": described,
                "labels": say(tensors, config, texts),
                "together": together,
            },
            files={OUTPUTS: tensors},
        )

    def _call(self, title: str) -> tuple[ForwardCost, Joined, list[list[int]]]:
        given, model = self.inputs.given, self.dispatched.model
        cost, joined, together = ForwardCost(self.dispatched.streamer.traffic), Joined(), []
        with tqdm(total=count_rows(given) or None, desc=title, unit="row", disable=None, leave=False) as bar:
            for call in calls(given, self.inputs.model, self.inputs.asked):
                began = time.perf_counter()
                with foreign(ConfigError, f"{call.key}: {type(model).__name__}'s forward fails with these inputs"):
                    joined.add(call, answer(model, call, given, device=self.dispatched.device))
                cost.add(time.perf_counter() - began, results=len(call.rows))
                together.append(list(call.rows))
                bar.update(len(call.rows))
        return cost, joined, together


def _told(name: str, tensor: torch.Tensor) -> dict[str, Any]:
    """Return what the record has of an output: its name, dtype and shape, and the SHA-256 of its bytes in hex."""
    digest = hashlib.sha256(byte_view(tensor) if tensor.numel() else b"").hexdigest()
    return {"name": name, "dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape), "sha256": digest}
