"""The state of a training on disk: what is brought back is what was saved, or nothing is."""

from __future__ import annotations

from pathlib import Path

import torch

from stages.finetune.training_state import TrainingState


def test_a_state_that_the_disk_has_changed_is_not_gone_on_with(tmp_path: Path) -> None:
    weight = torch.nn.Parameter(torch.randn(3, 5))
    optimizer = torch.optim.AdamW([weight], foreach=False)
    weight.square().sum().backward()
    optimizer.step()
    state = TrainingState(tmp_path, {"weight": weight}, optimizer)
    state.save(4)
    kept = {kind: value.clone() for kind, value in optimizer.state[weight].items()}
    before = weight.detach().clone()
    fresh = torch.nn.Parameter(torch.zeros(3, 5))
    other = torch.optim.AdamW([fresh], foreach=False)
    again = TrainingState(tmp_path, {"weight": fresh}, other)
    assert again.load() == 4
    assert torch.equal(fresh, before)
    assert all(torch.equal(other.state[fresh][kind], value) for kind, value in kept.items())
    (file,) = tmp_path.glob("state-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert again.load() == 0
