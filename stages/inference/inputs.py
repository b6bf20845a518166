"""What every result of a model depends on, whatever it is asked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from pipeline.stage import Context
from stages.dispatch.dispatch_plan import FILE_NAME as DISPATCH_PLAN
from stages.empty_init.identity import text_identity
from stages.machine.kernels import choosers
from stages.plan.plan import FILE_NAME as PLAN
from stages.plan.request.batch_size import AUTO


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceInputs:
    """The results depend on the model and on how text becomes tokens, their metrics on the placement too.

    ``skeleton`` and ``weights`` are the keys of what earlier stages left, so of all that made it, the model's code too;
    ``placement`` is the hash of the dispatch plan. ``text`` has the hashes of the files that say how text becomes
    tokens and which options are the default, and ``kernels`` the variables of the environment that choose kernels;
    ``model`` is the config's node of that name.
    """

    skeleton: str
    weights: str
    placement: str
    trace: bool
    text: Mapping[str, object]
    libraries: Mapping[str, str]
    kernels: Mapping[str, str]
    model: Mapping[str, Any] = field(compare=False)


def gather_model(context: Context) -> dict[str, Any]:
    """Return the fields of ``InferenceInputs``, gathered from the run so far."""
    config = context.config
    return {
        "skeleton": context.artifact("empty_init").key,
        "weights": context.artifact("shard_load").key,
        "placement": context.artifact("dispatch").digest(DISPATCH_PLAN),
        "trace": config["trace"],
        "text": text_identity(config["model"]),
        "libraries": {name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
        "kernels": choosers(),
        "model": config["model"],
    }


def chosen_number(key: str, node: Mapping[str, Any], context: Context) -> int | None:
    """Return the number that a stage's ``node`` of the config gives for ``key``, or where that is auto, the plan."""
    given = node.get(key)
    size: int | None = context.artifact("plan").json(PLAN)[key] if given == AUTO else given
    return size
