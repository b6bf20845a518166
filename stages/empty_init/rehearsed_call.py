"""The skeleton of a model that is rehearsed with what it will be called with: its order, and its peak at that shape.

What the rehearsal shows to be wrong with the inputs is said here, before a weight is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.calls.call import RehearsedCall
from offstage.stages.empty_init.activation_peaks import weigh_call
from offstage.stages.empty_init.describe import describe
from offstage.stages.empty_init.skeleton import Moment, Skeleton

_REFUSALS = re.compile(
    r"ValueError: |RuntimeError: .*(shape|size|dtype|scalar type|channel|dimension|same type|reduction dim|broadcast)"
)
"""How an error reads that the inputs are to blame for; what else a rehearsal meets may be about fake tensors alone."""
_FAKE = re.compile(r"fake|meta |data.dependent|dynamic.*shape", re.IGNORECASE)


def describe_call(model: nn.Module, call: RehearsedCall, no_split: Iterable[str] | None) -> Skeleton:
    """Return the skeleton of ``model`` as ``call`` calls it; ``no_split`` as in ``describe``.

    Raises a ``ConfigError`` where the forward doesn't take what it is called with. What is kept of all calls is held
    beside the weights, so each moment of the skeleton counts it.
    """
    described = describe(model, no_split=no_split, call=call)
    reason = described.unrehearsed
    if reason is not None and _REFUSALS.match(reason) and not _FAKE.search(reason):
        about = f"{call.key}: {described.model_class}'s forward can't be called with these inputs"
        raise ConfigError(f"{about}: {reason}{_advice(model, call)}")
    if reason is not None:
        return described
    weighed = weigh_call(model, () if call.has_every_layer else described.no_split, call)
    lasting = call.results_bytes + weighed.left_bytes
    return replace(described, moments=tuple(_lifted(moment, lasting) for moment in weighed.moments))


def _advice(model: nn.Module, call: RehearsedCall) -> str:
    """Return what is likely to mend a call that a model refuses; empty where nothing is known."""
    two_halves = getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    if not two_halves or any(name.startswith("decoder_") for name in call.names):
        return ""
    return "; give decoder_input_ids too, in the file of forward.inputs, or set model.class to its encoder"


def _lifted(moment: Moment, lasting: int) -> Moment:
    """Return ``moment`` with so many bytes more that are held all the time."""
    constant, *others = moment.activations
    return replace(moment, activations=(constant + lasting, *others))
