"""Arguments held against what a forward takes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from offstage.pipeline.errors import ConfigError
from offstage.stages.calls.signature import Signature, fitted


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = nn.Linear(2, 2, dtype=torch.bfloat16)

    def forward(self, left: Any, right: Any, scale: Any = None) -> None:
        """Take two tensors."""


class Open(nn.Module):
    def forward(self, **given: Any) -> None:
        """Take anything."""


X = torch.zeros(1)


def test_floats_get_the_models_dtype_and_what_a_tokenizer_made_beside_is_left_out() -> None:
    given = {"left": X, "right": X.long(), "token_type_ids": X.long(), "pixel_mask": X}
    taken = fitted(Net(), given, made=("token_type_ids", "pixel_mask"), key="forward.texts")
    assert {name: value.dtype for name, value in taken.items()} == {"left": torch.bfloat16, "right": torch.int64}


@pytest.mark.parametrize(
    ("given", "made", "words"),
    [
        ({"left": X, "rihgt": X}, [], r"takes no 'rihgt' \(did you mean 'right'\?\); it takes left, right, scale"),
        ({"left": X}, [], "Net's forward needs 'right' too; give it in the file of forward.inputs"),
        ({"left": X, "right": X, "pixel_values": X}, ["pixel_values"], "takes no 'pixel_values'"),
        ({"left": X, "right": X, "token_type_ids": X}, [], "takes no 'token_type_ids'"),
    ],
)
def test_what_does_not_fit_is_named(given: Any, made: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=f"forward.inputs: .*{words}"):
        fitted(Net(), given, made=made, key="forward.inputs")


def test_a_forward_of_any_names_takes_them() -> None:
    assert Signature.of(Open()).takes("whatever")
    assert not Signature.of(Net()).takes("whatever")
