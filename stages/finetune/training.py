"""One training: a text in, tuned weights out, measured as it goes."""

from __future__ import annotations

import math
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.stage import Context
from offstage.stages.checkpoints.adapters import adapter_folder
from offstage.stages.dispatch.stage import Dispatched
from offstage.stages.finetune.accelerator_memory import same_random_numbers
from offstage.stages.finetune.cpu_offload import CPUOffload
from offstage.stages.finetune.inputs import CHECKPOINT, STATE, STEPS, FinetuneInputs
from offstage.stages.finetune.sequences import make_sequences
from offstage.stages.finetune.steps import Trainer, make_optimizer, prepare
from offstage.stages.finetune.training_state import TrainingState
from offstage.stages.finetune.tuned import save_adapter, save_model
from offstage.stages.inference.cost import ForwardCost, Metrics, run_metrics
from offstage.stages.inference.progress import Progress, Row, say_earlier
from offstage.stages.inference.session import held_now, measured_peaks, save_result
from offstage.stages.inference.tokens import check_words
from offstage.stages.inputs.finetune_options import TEXT
from offstage.stages.plan import plan as plans
from offstage.stages.plan.request.training import Parameters
from offstage.stages.units import DeviceId

_TAG = "finetune"
"""What the offload of activations calls a step."""

Offload = CPUOffload | nullcontext[None]


def perform(inputs: FinetuneInputs, context: Context, file: Path) -> None:
    """Train what ``inputs`` ask for, on the live model of the stage dispatch; leave the weights beside ``file``, which
    says what it came to.

    A training that was killed is gone on with from the state that it saved last, which is there too; one that had
    taken its last step saves the weights alone.
    """
    folder = file.parent
    sequences = make_sequences(inputs.content, inputs.model, window=inputs.window)
    dispatched: Dispatched = context.live("dispatch")
    check_words(dispatched.model, [[int(sequences.max())]], key=TEXT)
    plan = context.artifact("plan").read(plans.Plan, plans.FILE_NAME)
    devices = {name: dispatched.devices.torch_device(device) for name, device in plan.execution.items()}
    has_adapter = adapter_folder(inputs.model) is not None
    parameters = prepare(dispatched.model, inputs.options, adapted=has_adapter, devices=devices)
    offload = _offload(inputs, plan.main_device, dispatched, folder)
    cost = _run(inputs, dispatched, parameters, sequences=sequences, offload=offload, folder=folder)
    adapted = has_adapter or inputs.options.lora is not None
    (save_adapter if adapted else save_model)(dispatched.model, inputs.model, folder / CHECKPOINT)
    own: Metrics = {
        "trained_parameters": sum(parameter.numel() for parameter in parameters.values()),
        "sequences": len(sequences),
        "taken_steps": cost.forwards,
        **say_earlier(inputs.options.steps - cost.forwards, inputs.options.steps, "steps"),
        "train_seconds": cost.seconds,
        "trained_tokens_per_second": cost.results_per_second,
        **cost.metrics(),
        **_offload_metrics(inputs, offload if cost.forwards else None),
    }
    peaks = measured_peaks(context, dispatched)
    save_result(file, dispatched, metrics=run_metrics(dispatched, own), measured=peaks)


def _offload(inputs: FinetuneInputs, main: DeviceId, dispatched: Dispatched, folder: Path) -> Offload:
    """Return the context of each forward: activations that go to disk go to files without names in ``folder``."""
    if not inputs.offload_ratio:
        return nullcontext()
    target = inputs.options.activation_offload.target
    return CPUOffload(
        inputs.offload_ratio,
        _TAG,
        target=target,
        folder=folder if target == "disk" else None,
        devices=dispatched.devices,
        device=main,
        trace=dispatched.streamer.trace,
    )


def _offload_metrics(inputs: FinetuneInputs, offload: Offload | None) -> Metrics:
    """Return the ratio that was asked for, and the bytes that the last forward saved: those that stayed and went."""
    if not isinstance(offload, CPUOffload):
        return {"offload_ratio": inputs.offload_ratio}
    (traffic,) = offload.traffic.values()
    return {
        "offload_ratio": inputs.offload_ratio,
        "kept_activation_bytes": traffic.kept_bytes,
        "offloaded_activation_bytes": traffic.offloaded_bytes,
    }


def _run(
    inputs: FinetuneInputs,
    dispatched: Dispatched,
    parameters: Parameters,
    *,
    sequences: torch.Tensor,
    offload: Offload,
    folder: Path,
) -> ForwardCost:
    """Take all steps that the state in ``folder`` lacks, each with a line of its own; return what they cost."""
    options, progress = inputs.options, Progress(folder / STEPS)
    optimizer = make_optimizer(options, parameters.values())
    state = TrainingState(folder / STATE, parameters, optimizer, steps=options.steps)
    cost = ForwardCost(dispatched.streamer.traffic)
    held_bytes: dict[str, int] = {}
    trainer = Trainer(
        dispatched.model,
        parameters.values(),
        optimizer,
        sequences=sequences,
        options=options,
        device=dispatched.device,
        offload=offload,
        watch=lambda: held_bytes.update(held_now(dispatched)),
    )
    begin = state.load(progress.done)
    progress.keep(range(begin))
    with (
        same_random_numbers(),
        tqdm(total=options.steps, desc="finetune", unit="step", disable=None, leave=False) as bar,
    ):
        bar.update(begin)
        for step in range(begin, options.steps):
            began = time.perf_counter()
            result = trainer.take(step)
            seconds = time.perf_counter() - began
            if not math.isfinite(result.loss) or not math.isfinite(result.gradient_norm):
                raise _diverged(step, result.loss, result.gradient_norm)
            cost.add(seconds, results=options.gradient_accumulation * options.batch_size * inputs.window)
            progress.add([_row(step, result.loss, result.gradient_norm, seconds=seconds, held_bytes=held_bytes)])
            bar.update()
            if (step + 1) % options.save_every == 0 or step + 1 == options.steps:
                state.save(step + 1)
    progress.settle()
    return cost


def _row(step: int, loss: float, norm: float, *, seconds: float, held_bytes: dict[str, int]) -> Row:
    """Return what is told of a step: ``held_bytes`` are those of each device when a forward had saved all it saves."""
    fields = {"loss": loss, "gradient_norm": norm, "seconds": seconds, "held_bytes": dict(held_bytes)}
    return {"index": step, "batch": step, "rows": 1, **fields}


def _diverged(step: int, loss: float, norm: float) -> ConfigError:
    return ConfigError(
        f"finetune.learning_rate: the loss of step {step + 1} is {loss}, the norm of its gradient {norm}: no training "
        "goes on from there; lower the rate, set finetune.clip_norm, or take a dtype with more range"
    )
