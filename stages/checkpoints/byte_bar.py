"""The bar of what takes as long as its bytes take: loading, storing, hashing."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm


def byte_bar(doing: str, total: int) -> tqdm[Any]:
    """Return a bar that says how many of ``total`` bytes are done, how fast, and how much time is left.

    It is on standard error, only where that is a terminal and there is something to do, and gone when it is closed.
    """
    hidden = None if total else True  # null: hidden where nobody looks
    return tqdm(total=total, unit="B", unit_scale=True, desc=doing, disable=hidden, leave=False)
