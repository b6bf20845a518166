"""Trains the embedded model on rows of tokens; it goes on where it was after a kill, to the same weights.

A step's gradient is the mean over small batches, each computed by one thread and summed in their order: the weights
don't depend on how many threads there are, and threads that other work keeps from running delay nobody inside an
operation. What is drawn depends on the step's number alone: a state is the weights, the optimizers' moments and the
step.

Matrices of the layers learn with Muon (orthogonalised momentum; Jordan et al. 2024), which needs fewer tokens than
AdamW; embeddings and norms with AdamW. The schedule is warm-up and cosine down to nothing, by steps; a limit in minutes
shortens it, so that it still ends at nothing, at the price that the weights then depend on the machine's speed.
"""

from __future__ import annotations

import functools
import logging
import math
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

SAVE_SECONDS, LOG_STEPS = 120.0, 20
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Recipe:
    """How long and how fast the model learns."""

    steps: int
    minutes: float = math.inf
    batches: int = 2
    """Small batches a step; each is one thread's work."""
    rows: int = 16
    context: int = 128
    """Tokens a row."""
    matrix_rate: float = 5e-3
    vector_rate: float = 3e-3
    warm_up: float = 0.03
    """The share of the training in which the rates rise."""
    weight_decay: float = 0.1
    longest_gradient: float = 1.0
    seed: int = 20


@dataclass(slots=True)
class Progress:
    """How far a training is."""

    step: int = 0
    seconds: float = 0.0

    def share(self, recipe: Recipe) -> float:
        """Return the share of the training that is done, by steps or by the clock, whichever is further."""
        return min(1.0, max(self.step / recipe.steps, self.seconds / 60 / recipe.minutes))


def train(model: torch.nn.Module, tokens: torch.Tensor, recipe: Recipe, *, state: Path) -> Progress:
    """Train ``model``, a causal language model, in place on ``tokens``, a long row of token ids.

    The file ``state`` is written every few minutes and at the end; where it exists, training goes on from it.
    """
    optimizers = _optimizers(model, recipe)
    progress = _resume(model, optimizers, state)
    saved_at = time.monotonic()
    with _single_threads(recipe.batches) as threads:
        while progress.share(recipe) < 1:
            started = time.monotonic()
            factor = rate_factor(progress.share(recipe), recipe.warm_up)
            loss = _mean_gradient(model, draw_rows(tokens, recipe, progress.step).chunk(recipe.batches), threads)
            torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.longest_gradient)
            _update(optimizers, factor)
            progress.step += 1
            progress.seconds += time.monotonic() - started
            done = progress.share(recipe) >= 1
            if progress.step % LOG_STEPS == 0 or done:
                logger.info("step %d (%.1f%%): loss %.3f", progress.step, 100 * progress.share(recipe), loss)
            if time.monotonic() - saved_at > SAVE_SECONDS or done:
                _save(model, optimizers, progress, state)
                saved_at = time.monotonic()
    return progress


@contextmanager
def _single_threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Give threads whose operations, and those of this thread meanwhile, are each computed by one thread alone."""
    usual = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,)) as threads:
            yield threads
    finally:
        torch.set_num_threads(usual)


def rate_factor(share: float, warm_up: float) -> float:
    """Return what the learning rates are multiplied by when ``share`` of the training is done."""
    if share < warm_up:
        return (share + 1e-3) / (warm_up + 1e-3)
    return 0.5 + 0.5 * math.cos(math.pi * (share - warm_up) / (1 - warm_up))


def draw_rows(tokens: torch.Tensor, recipe: Recipe, step: int) -> torch.Tensor:
    """Return the rows of one step (rows, context + 1): each round over the text takes every row once, in a new order.

    Each round cuts the text elsewhere, so that no passage is always broken at one place.
    """
    wanted = recipe.batches * recipe.rows
    total = len(tokens) // recipe.context - 2
    drawn = []
    for position in range(step * wanted, (step + 1) * wanted):
        epoch, place = divmod(position, total)
        order = _order(total, recipe.seed + epoch)
        start = int(order[place]) * recipe.context + epoch * 37 % recipe.context
        drawn.append(tokens[start : start + recipe.context + 1])
    return torch.stack(drawn).long()


@functools.lru_cache(maxsize=2)
def _order(total: int, seed: int) -> torch.Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(seed))


def _mean_gradient(model: torch.nn.Module, batches: Sequence[torch.Tensor], threads: ThreadPoolExecutor) -> float:
    """Give each parameter the mean of its gradients over ``batches``; return their mean loss."""
    parameters = list(model.parameters())

    def gradients(batch: torch.Tensor) -> tuple[float, tuple[torch.Tensor, ...]]:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = next_token_loss(model, batch)
        return loss.item(), torch.autograd.grad(loss, parameters)

    losses, found = zip(*threads.map(gradients, batches), strict=True)
    for parameter, parts in zip(parameters, zip(*found, strict=True), strict=True):
        parameter.grad = torch.stack(parts).mean(0)
    mean: float = sum(losses) / len(losses)
    return mean


def _update(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["full_rate"] * factor
        optimizer.step()


def next_token_loss(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Return the mean loss, in nats a token, of predicting each row's tokens but the first from those before."""
    logits: torch.Tensor = model(input_ids=rows[:, :-1]).logits
    return cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())


def held_out_loss(model: torch.nn.Module, tokens: torch.Tensor, context: int) -> float:
    """Return the mean loss of ``tokens`` in nats a token, in rows of ``context`` that don't overlap."""
    count = (len(tokens) - 1) // context
    rows = torch.stack([tokens[start * context : (start + 1) * context + 1] for start in range(count)]).long()
    total = 0.0
    with torch.no_grad():
        for first in range(0, count, 16):
            part = rows[first : first + 16]
            total += next_token_loss(model, part).item() * len(part)
    return total / count


def _optimizers(model: torch.nn.Module, recipe: Recipe) -> list[torch.optim.Optimizer]:
    matrices: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        (matrices if parameter.ndim == 2 and ".layers." in name else others).append(parameter)
    muon = torch.optim.Muon(
        matrices, lr=recipe.matrix_rate, weight_decay=recipe.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    adam = torch.optim.AdamW(others, lr=recipe.vector_rate, betas=(0.9, 0.95), weight_decay=0.0)
    for optimizer in (muon, adam):
        for group in optimizer.param_groups:
            group["full_rate"] = group["lr"]
    return [muon, adam]


def _save(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], progress: Progress, path: Path) -> None:
    state = {
        "model": model.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "progress": [progress.step, progress.seconds],
    }
    torch.save(state, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _resume(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer], path: Path) -> Progress:
    if not path.exists():
        return Progress()
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    return Progress(*state["progress"])
