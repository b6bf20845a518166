"""What of a model learns, and one step of its training: sequences in, gradients, an update.

A step sees its sequences in small batches one after the other, whose gradients add up; each counts the same, since all
have one length. Whatever draws at random (dropout) begins each batch with a seed that follows from the step's number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.pipeline.kept_memory import return_heap
from offstage.stages.checkpoints.adapters import is_added
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor
from offstage.stages.empty_init.skeleton import parent
from offstage.stages.finetune.sequences import derive, pick
from offstage.stages.inputs.finetune_options import FinetuneOptions
from offstage.stages.plan.request.training import Parameters, adapt, choose_learning

_NORM_ELEMENTS = 2**16
"""How much of a gradient is copied at a time for its norm."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """The mean ``loss`` of a step's tokens in nats, and the norm of its gradient before it was clipped."""

    loss: float
    gradient_norm: float


class Trainer:
    """What a training goes on with: the ``model`` on ``device``, what of it learns, the optimizer, the sequences.

    Each forward runs in ``offload``, and ``watch`` is called when it has saved what its backward pass will want.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[nn.Parameter],
        optimizer: torch.optim.Optimizer,
        *,
        sequences: torch.Tensor,
        options: FinetuneOptions,
        device: torch.device,
        offload: AbstractContextManager[Any],
        watch: Callable[[], None],
    ) -> None:
        self._model, self._parameters, self._optimizer = model, list(parameters), optimizer
        self._sequences, self._options, self._device = sequences, options, device
        self._offload, self._watch = offload, watch

    def take(self, step: int) -> StepResult:
        """Take the step of that number, the first is 0, and return what it came to; gradients are gone afterwards."""
        count = self._options.gradient_accumulation
        losses = [self._learn(step * count + index, share=1 / count) for index in range(count)]
        if self._device.type == "cpu":
            return_heap()  # small activations lay there; what follows takes memory of its own
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        norm = total_norm(gradients)
        if self._options.clip_norm is not None and norm > self._options.clip_norm:
            for gradient in gradients:
                gradient.mul_(self._options.clip_norm / norm)
        del gradients
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(sum(losses) / count, norm)

    def _learn(self, batch: int, *, share: float) -> float:
        """Add the gradient of the batch of that number, times ``share``, and return its loss."""
        size, seed = self._options.batch_size, self._options.seed
        ids = pick(self._sequences, seed=seed, begin=batch * size, count=size).to(self._device)
        torch.manual_seed(derive(seed, "dropout", batch))
        with self._offload:
            loss = self._model(input_ids=ids, labels=ids, use_cache=False).loss
        self._watch()
        (loss * share).backward()
        return float(loss.detach())


def prepare(
    model: nn.Module, options: FinetuneOptions, *, adapted: bool, devices: Mapping[str, torch.device]
) -> Parameters:
    """Make ``model`` one that trains, and return what of it learns by name.

    ``adapted`` says that it has an adapter, which learns then. A new one lies, module by module, on the one of
    ``devices`` where the module computes that it is added to.
    """
    adapt(model, options)
    if options.lora is not None:
        _fill(model, seed=options.seed, devices=devices)
    learning = choose_learning(model, adapter=adapted or options.lora is not None)
    for name, weight in learning.items():
        if isinstance(weight, WaitingTensor):
            raise ConfigError(f"device_map: {name!r} is streamed, and what is streamed can't learn; see finetune.lora")
    return learning


def _fill(model: nn.Module, *, seed: int, devices: Mapping[str, torch.device]) -> None:
    """Give the new adapter of ``model`` its weights: it changes nothing yet, since one of its factors is zero.

    The other is drawn as peft draws it.
    """
    for name, empty in list(model.named_parameters()):
        if not is_added(name):
            continue
        weight = torch.zeros(empty.shape, dtype=empty.dtype)
        if ".lora_A." in name:
            generator = torch.Generator().manual_seed(derive(seed, "lora", name))
            nn.init.kaiming_uniform_(weight, a=math.sqrt(5), generator=generator)
        module, place = model.get_submodule(parent(name)), devices[name.partition(".lora_")[0]]
        setattr(module, name.rpartition(".")[2], nn.Parameter(weight.to(place)))


def total_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the norm of all ``gradients`` as one vector, summed in float32 whatever they are."""
    norms = norms_on_host(gradients)
    return float(torch.linalg.vector_norm(norms)) if norms.numel() else 0.0


def norms_on_host(gradients: Iterable[torch.Tensor]) -> torch.Tensor:
    """Return the norm of each of ``gradients`` in their order (float32), on the host.

    An accelerator is waited for once, however many gradients lie there: each wait would leave it idle until the next
    norm is asked for.
    """
    norms, places = dict[torch.device, list[torch.Tensor]](), dict[torch.device, list[int]]()
    for place, gradient in enumerate(gradients):
        norms.setdefault(gradient.device, []).append(_norm(gradient))
        places.setdefault(gradient.device, []).append(place)
    all_norms = torch.empty(sum(map(len, places.values())))
    for device, of_device in norms.items():
        all_norms[places[device]] = torch.stack(of_device).to("cpu")
    return all_norms


def _norm(gradient: torch.Tensor) -> torch.Tensor:
    """Return the norm of ``gradient`` in float32. One in half precision is copied for that on the host, and torch's sum
    of its many squares is a thousandth off: piece by piece it is neither.
    """
    at_once = not gradient.is_cpu or gradient.dtype == torch.float32
    pieces = (gradient,) if at_once else torch.split(gradient.reshape(-1), _NORM_ELEMENTS)
    norms: list[torch.Tensor] = [torch.linalg.vector_norm(piece, dtype=torch.float32) for piece in pieces]
    return norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))


def make_optimizer(options: FinetuneOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's own optimizer of the options, over ``parameters``.

    It goes through them one by one: what torch does over all of them at once takes the memory of all once more.
    """
    given: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay, "foreach": False}
    kind: Any = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.SGD
    optimizer: torch.optim.Optimizer = kind(list(parameters), **given)
    return optimizer
