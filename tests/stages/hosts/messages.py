"""A host that sends messages of all lengths to another, which sends them back: ``parts.json`` has how each went."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from offstage.pipeline.peers import packed, peers
from offstage.stages.hosts.wire import _built, _described

HIDDEN, LOGITS = torch.arange(4096, dtype=torch.bfloat16).view(1, 1, 4096), torch.randn(1, 1, 32000)
MESSAGES: dict[str, Any] = {
    "nothing": None,
    "a short prompt's": torch.randn(1, 5, 4096),
    "a token's after it": HIDDEN,
    "the next token's": HIDDEN + 1,
    "one of other types": (HIDDEN, [LOGITS, torch.tensor(True), torch.tensor(7)], None, "words", 3, 0.5),
    "one like it": (HIDDEN, [LOGITS, torch.tensor(False), torch.tensor(8)], None, "words", 4, 0.5),
    "a long prompt's": torch.randn(1, 500, 4096),
    "a token's after that": HIDDEN,
    "the one after": HIDDEN,
    "no rows": torch.empty(0, 7),
    "words": "many " * 1000,
    "every other column": torch.randn(6, 8)[:, ::2],
}
AT_ONCE = {
    "nothing",
    "a token's after it",
    "the next token's",
    "one like it",
    "the one after",
    "no rows",
    "every other column",
}


def main() -> None:
    here, folder, parts = peers(), Path(sys.argv[1]), dict[str, int]()
    send, other = here._send, 1 - here.rank

    def counted(*arguments: Any) -> None:
        parts[name] = parts.get(name, 0) + 1
        send(*arguments)

    here._send = counted  # type: ignore[method-assign]
    for name, value in MESSAGES.items():
        if here.rank == 0:
            here.send(message_of(value), other, tag=1)
        shape, data = here.receive(other, tag=1)
        received, left = _built(shape, data)
        assert not left.numel(), name
        if here.rank == 0:
            assert same(value, received), name
        else:
            here.send(message_of(received), other, tag=1)
    (folder / f"parts-{here.rank}.json").write_text(json.dumps(parts))
    here.close()


def message_of(value: Any) -> torch.Tensor:
    """Return the message that a wire makes of ``value``."""
    tensors: list[torch.Tensor] = []
    shape = _described(value, tensors)
    return packed(shape, tensors)


def same(one: Any, other: Any) -> bool:
    """Return whether both are the same, of the same types, to the bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, tuple | list):
        return type(one) is type(other) and all(same(*pair) for pair in zip(one, other, strict=True))
    return type(one) is type(other) and bool(one == other)
