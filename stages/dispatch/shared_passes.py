"""Several calls of one dispatched model that share each pass of its streamed weights, from Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from torch import nn

from offstage.stages.dispatch.streaming.streamer import streamer_of

Answer = TypeVar("Answer")


def lockstep(model: nn.Module, calls: Iterable[Callable[[], Answer]], *, size: int = 8) -> list[Answer]:
    """Call all of ``calls``, which call ``model``, at most ``size`` at a time; return what they return, in their order.

    ``model`` is one that ``load``, ``dispatch_model`` and their like dispatched. What it streams is brought once for
    all that are under way, used by each in turn, and let go. Each computes exactly what it computes alone, with a cache
    of its own, which is memory beside the budget; as one ends the next begins. Gradients are off, and random numbers
    are each call's own: all go on from the state that torch has now.

    The first error of a call is raised, after the others were ended. A call may have calls in lockstep itself: these
    go with all others. Raises ``ValueError`` for a model that isn't dispatched or a size below 1.

    >>> with offstage.load(checkpoint, max_memory={"cpu": "3MB"}) as loaded:
    ...     prompts = [loaded.tokenizer(text, return_tensors="pt") for text in ("If the memory", "The")]
    ...     calls = [partial(loaded.model.generate, **prompt, max_new_tokens=2) for prompt in prompts]
    ...     answers = offstage.lockstep(loaded.model, calls, size=8)
    >>> [tuple(answer.shape) for answer in answers]
    [(1, 6), (1, 4)]
    """
    if type(size) is not int or size < 1:
        raise ValueError(f"size: {size!r} is no number of calls; give a whole number from 1")
    answers: dict[int, Answer] = {}

    def answer(number: int, call: Callable[[], Answer]) -> None:
        answers[number] = call()

    tasks = (partial(answer, number, call) for number, call in enumerate(calls))
    streamer_of(model).go_together(tasks, size=size)
    return [answers[number] for number in sorted(answers)]
