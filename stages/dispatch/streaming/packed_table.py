"""An embedding that rests packed on disk: of it only the rows that are asked for are read, and unpacked.

No map of its file could be used, since what lies there isn't the table. Whatever else is done to it reads all of it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from offstage.stages.checkpoints.packed import PackedTensor
from offstage.stages.checkpoints.readers import read_extent
from offstage.stages.dispatch.streaming.places import read_only
from offstage.stages.dispatch.streaming.waiting_tensor import WaitingTensor


def can_be_looked_up(table: PackedTensor) -> bool:
    """Return whether rows of ``table`` can be read one by one."""
    return table.codec.rows(table, 0, 1) is not None


class PackedTable(WaitingTensor):
    """The tensor that stands for a packed one, ``use``, between its uses, and is looked up where that lies."""

    use: PackedTensor

    def look_up(self, indices: torch.Tensor) -> torch.Tensor:
        """Return the rows at ``indices``, a tensor of any shape on the cpu; each is read once."""
        wanted, places = torch.unique(indices, return_inverse=True)
        rows = [self.use.codec.rows(self.use, row, row + 1) for row in wanted.tolist()]
        table = torch.cat([read_extent(row) for row in rows if row is not None])
        learns = self.requires_grad and torch.is_grad_enabled()
        return functional.embedding(places, read_only(self, table, self.source.name) if learns else table)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {name: value for name, value in (kwargs or {}).items() if value is not None}
        table = args[1] if len(args) == 2 else None
        if func is functional.embedding and isinstance(table, PackedTable) and "max_norm" not in given:
            with torch._C.DisableTorchFunctionSubclass():
                if args[0].numel() and bool(((args[0] >= 0) & (args[0] < len(table))).all()):
                    return table.look_up(args[0])
        return super().__torch_function__(func, types, args, kwargs)
