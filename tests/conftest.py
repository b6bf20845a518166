"""What all tests have in common: what their imports made is collected once, and never looked through again."""

from __future__ import annotations

import gc


def pytest_collection_finish() -> None:
    """Take what the imported libraries are made of out of every later collection: a million objects, half a second."""
    gc.collect()
    gc.freeze()
