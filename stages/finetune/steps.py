"""One step of a training: sequences in, gradients, an update of what learns.

A step sees its sequences in small batches one after the other, whose gradients add up; each counts the same, since all
have one length. Whatever draws at random (dropout) begins each batch with a seed that follows from the step's number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from offstage.stages.finetune.sequences import derive, pick
from offstage.stages.inputs.finetune_options import FinetuneOptions


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


def total_norm(gradients: Iterable[torch.Tensor]) -> float:
    """Return the norm of all ``gradients`` as one vector, summed in float32 whatever they are."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float32).to("cpu") for gradient in gradients]
    return float(torch.linalg.vector_norm(torch.stack(norms))) if norms else 0.0


def make_optimizer(options: FinetuneOptions, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return torch's own optimizer of the options, over ``parameters``.

    It goes through them one by one: what torch does over all of them at once takes the memory of all once more.
    """
    given: dict[str, Any] = {"lr": options.learning_rate, "weight_decay": options.weight_decay, "foreach": False}
    kind: Any = torch.optim.AdamW if options.optimizer == "adamw" else torch.optim.SGD
    made: torch.optim.Optimizer = kind(list(parameters), **given)
    return made
