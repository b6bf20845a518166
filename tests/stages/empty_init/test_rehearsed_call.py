"""A rehearsal with what a model will be called with: its peak is that of the real forward, whatever the model takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from offstage.stages.calls.arguments import calls
from offstage.stages.calls.call import RehearsedCall, answer
from offstage.stages.calls.options import ForwardOptions
from offstage.stages.empty_init.init import init_empty_weights
from offstage.stages.empty_init.rehearsed_call import describe_call
from tests.e2e import checkpoints_of_kinds as kinds
from tests.stages.empty_init.test_activation_peaks import Counting

GIVEN = {
    "bert": ("BertModel", kinds.bert, {"input_ids": np.ones((3, 20), np.int64)}),
    "vit": ("ViTModel", kinds.vit, {"pixel_values": np.ones((3, 3, 16, 16), np.float32)}),
    "wav2vec2": ("Wav2Vec2Model", kinds.wav2vec2, {"input_values": np.ones((2, 3000), np.float32)}),
}


@pytest.mark.parametrize("name", GIVEN)
def test_the_peak_of_a_call_is_foretold(name: str, tmp_path: Path) -> None:
    kind, config, arrays = GIVEN[name]
    np.savez(tmp_path / "in.npz", **arrays)
    given, node = ForwardOptions(inputs=str(tmp_path / "in.npz")), {"path": str(tmp_path), "kind": "pretrained"}
    with init_empty_weights():
        meta = getattr(transformers, kind)(config()).eval()
    described = describe_call(meta, RehearsedCall(given, node), None)
    assert described.unrehearsed is None
    foretold = max(moment.activations[0] for moment in described.moments)
    model = getattr(transformers, kind)(config()).eval()
    (call,) = calls(given, node)
    counting = Counting()
    for tensor in [*model.parameters(), *model.buffers(), *call.arguments.values()]:
        counting.meet(tensor.untyped_storage(), counts=False)
    with torch.no_grad(), counting:
        kept = answer(model, call, given)
    resident = sum(tensor.nbytes for tensor in kept.values()) + sum(value.nbytes for value in call.arguments.values())
    assert foretold == pytest.approx(counting.peak + resident, rel=0.02)
