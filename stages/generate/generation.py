"""One generation: prompts in, a ``Generation`` out, measured as it goes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from pipeline.atomic_files import write_text
from pipeline.errors import ConfigError, foreign
from pipeline.stage import Context
from stages.checkpoints.hub import checkpoint_folder
from stages.checkpoints.tokenizers import load_tokenizer, tokenizing
from stages.dispatch.stage import Dispatched
from stages.dispatch.transfer.carrier import Traffic
from stages.dispatch.transfer.trace import FILE_NAME as TRACE_NAME, Trace
from stages.generate import decode, options, prompts
from stages.generate.inputs import GenerateInputs
from stages.generate.metrics import Cost, Metrics

_PAD = "pad_token_id"
WORDS_UNKNOWN = 2**63
"""A bound on token ids where the model doesn't say how many words it knows."""


@dataclass(frozen=True, slots=True)
class Generation:
    """``outputs``: one ``{prompt, text, token_ids}`` a sequence; ``measured``: device → peak bytes."""

    outputs: list[dict[str, Any]]
    metrics: Metrics
    measured: dict[str, int]
    trace: Trace | None = None

    def save(self, file: Path) -> None:
        """Write ``file``, and ``trace.json`` beside it if there is a trace."""
        data = {"outputs": self.outputs, "metrics": self.metrics, "measured": self.measured}
        write_text(file, json.dumps(data, indent=1) + "\n")
        if self.trace is not None:
            self.trace.save(file.with_name(TRACE_NAME))


def perform(inputs: GenerateInputs, context: Context) -> Generation:
    """Generate what ``inputs`` ask for, on the live model of the stage dispatch."""
    tokenizer, asked = load_tokenizer(inputs.model), inputs.prompts
    encoded = prompts.encode(asked, tokenizer)
    dispatched: Dispatched = context.live("dispatch")
    _check_words(dispatched.model, encoded)
    decoding = _Decoding(dispatched, inputs, tokenizer)
    torch.manual_seed(inputs.seed)
    rows = decoding.run(encoded)
    copies = max(len(rows) // len(asked), 1)
    outputs = [
        {"prompt": asked[index // copies], "text": _decoded(tokenizer, row), "token_ids": row}
        for index, row in enumerate(rows)
    ]
    measured = _measured(context) | {str(device): peak for device, peak in dispatched.devices.peaks.items()}
    return Generation(outputs, decoding.metrics(), measured, dispatched.streamer.trace)


class _Decoding:
    """Runs the batches of one generation and sums up what they cost."""

    def __init__(self, dispatched: Dispatched, inputs: GenerateInputs, tokenizer: Any) -> None:
        self._dispatched = dispatched
        self._batch_size = inputs.options.get("batch_size")
        self._cost = Cost()
        self._options = options.given_options(inputs.options)
        self._defaults = options.checkpoint_defaults(checkpoint_folder(inputs.model))
        self._uses_transformers = decode.has_generate(dispatched.model)
        if self._uses_transformers and self._defaults is not None:
            dispatched.model.generation_config = self._defaults
        if not self._uses_transformers:
            self._options = options.plain_options(self._options, self._defaults)
        stops = self._options.get("stop_strings") or getattr(self._defaults, "stop_strings", None)
        self._call = {**self._options, "tokenizer": tokenizer} if stops else self._options
        self._ends = decode.end_tokens(
            self._options, self._defaults, getattr(dispatched.model, "generation_config", None)
        )
        pads = (self._options.get(_PAD), *(getattr(source, _PAD, None) for source in (self._defaults, tokenizer)))
        self._pad = [*(token for pad in pads for token in prompts.token_ids(_PAD, pad)), *self._ends, 0][0]

    def run(self, encoded: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return the new tokens of each prompt, in order."""
        steps = self._options.get("max_new_tokens")
        batches = self._batches(encoded)
        total = steps * len(batches) if steps else None
        rows: list[list[int]] = []
        with tqdm(total=total, desc="generate", unit="token", disable=None, leave=False) as bar:
            for batch in batches:
                rows += [decode.trim(row, self._ends) for row in self._run_batch(batch, bar)]
        return rows

    def _batches(self, encoded: Sequence[Sequence[int]]) -> list[prompts.Batch]:
        """Cut ``encoded`` into batches. The plain loop knows no masks, so there prompts of one length go together."""
        size = self._batch_size or len(encoded)
        groups: list[list[Sequence[int]]] = []
        for ids in encoded:
            full = not groups or len(groups[-1]) == size
            if full or (not self._uses_transformers and len(groups[-1][0]) != len(ids)):
                groups.append([])
            groups[-1].append(ids)
        config = getattr(self._dispatched.model, "config", None)
        side = "right" if getattr(config, "is_encoder_decoder", False) else "left"
        return [prompts.make_batch(group, pad=self._pad, side=side) for group in groups]

    def _run_batch(self, batch: prompts.Batch, bar: Any) -> list[list[int]]:
        traffic = self._dispatched.streamer.traffic
        marks: list[Traffic] = []
        clock = decode.Clock(tick=bar.update, first=lambda: marks.append(replace(traffic)))  # which goes on counting
        began = time.perf_counter()
        tokens = self._decode(batch, clock)
        if clock.times:
            self._cost.add(clock.times, began=began, sequences=len(tokens), first=marks[0], last=traffic)
        return [[int(token) for token in row] for row in tokens]

    def _decode(self, batch: prompts.Batch, clock: decode.Clock) -> torch.Tensor:
        model, device = self._dispatched.model, self._dispatched.device
        if self._uses_transformers:
            with torch.no_grad(), foreign(ConfigError, "generate: transformers' generate fails with these options"):
                return decode.decode_with_transformers(model, batch, self._call, device=device, clock=clock)
        return decode.decode_plainly(model, batch.input_ids.to(device), self._options, clock=clock)

    def metrics(self) -> Metrics:
        """Return the run record's metrics: of loading, of decoding, and of the whole generation's traffic."""
        traffic = self._dispatched.streamer.traffic
        return {
            "load_seconds": self._dispatched.load_seconds,
            **self._cost.metrics(),
            "storage_read_bytes": self._dispatched.read_bytes + traffic.storage_bytes,
            "stall_seconds": traffic.stall_seconds,
        }


def _check_words(model: Any, encoded: Sequence[Sequence[int]]) -> None:
    """Refuse token ids that the model has no embedding for, before its forward trips over them."""
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    words = getattr(text_config, "vocab_size", None) or WORDS_UNKNOWN
    largest = max(max(ids) for ids in encoded)
    if largest >= words:
        raise ConfigError(f"generate.prompts: token id {largest} is beyond the model's {words} words; give ids below")


def _decoded(tokenizer: Any, row: Sequence[int]) -> str | None:
    if tokenizer is None:
        return None
    with tokenizing(ConfigError, f"model.tokenizer: the tokenizer can't make text of {row!r}"):
        return str(tokenizer.decode(row, skip_special_tokens=True))


def _measured(context: Context) -> dict[str, int]:
    """Return the peaks so far: of the host's anonymous memory, and of every accelerator in use."""
    peaks = {"cpu": context.host_peak()}
    if torch.cuda.is_available():
        peaks |= {str(i): torch.cuda.max_memory_allocated(i) for i in range(torch.cuda.device_count())}
    return peaks
