"""Linear layers whose products are added up in one order, as functions that a weight which waits may take over.

Such are those of weights that stay packed, and of plain ones beside them: torch's own product of float32 has other last
bits in another number of threads on some processors. What multiplies is imported once something is: each model that is
described looks for these layers, and few have any.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import handle_torch_function, has_torch_function


class OrderedLinear(nn.Linear):
    """A linear layer of ``linear_in_order``."""

    def forward(self, input: Tensor) -> Tensor:
        """Return what a linear layer returns."""
        return linear_in_order(input, self.weight, self.bias)


def linear_in_order(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return what ``functional.linear`` does, added up in the order of ``multiply_packed``: ``input`` […, columns]
    times ``weight`` [rows, columns], both float32 on the host, of whole runs of columns.

    Where gradients are recorded, under autocast, of other dtypes, and where no loops could be compiled, it is torch's
    own product.
    """
    if has_torch_function((input, weight, bias)):
        return handle_torch_function(linear_in_order, (input, weight, bias), input, weight, bias)
    learns = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
    differs = {input.dtype, weight.dtype} != {torch.float32} or torch.is_autocast_enabled(input.device.type)
    if learns or differs:
        return functional.linear(input, weight, bias)
    from offstage.stages.checkpoints.codecs.loops import loops
    from offstage.stages.checkpoints.codecs.products import multiply_packed

    if input.device.type == "cpu" and loops() is None:
        return functional.linear(input, weight, bias)
    return multiply_packed(input, [weight], _matrix_text(*weight.shape), bias)


def linear_packed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    beside: Sequence[Tensor],
    matrix_text: str,
    compute: torch.dtype | None = None,
    tiles: bool = False,
) -> Tensor:
    """Return the products of ``multiply_packed`` with the matrix of ``matrix_text``, which rests in ``weight`` and the
    parts ``beside`` it; or, where it ``has_own_rows``, with those of its rows that are in ``weight``.

    It is for weights that wait: such take it over, and have it multiply by what they are brought in.
    """
    if has_torch_function((input, weight, bias)):
        return handle_torch_function(
            linear_packed, (input, weight, bias), input, weight, bias, beside=beside, matrix_text=matrix_text,
            compute=compute, tiles=tiles,
        )  # fmt: skip
    from offstage.stages.checkpoints.codecs.packed_matrices import of_rows
    from offstage.stages.checkpoints.codecs.products import multiply_packed

    text = of_rows(matrix_text, len(weight))
    return multiply_packed(input, [weight, *beside], text, bias, compute=compute, tiles=tiles)


@lru_cache(maxsize=2**10)
def _matrix_text(rows: int, columns: int) -> str:
    from offstage.stages.checkpoints.codecs.packed_matrices import PlainMatrix, as_text

    return as_text(PlainMatrix(rows, columns))
