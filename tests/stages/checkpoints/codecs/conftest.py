"""Codecs are held against the libraries' own by their operators; the compiled loops are held against the operators."""

from __future__ import annotations

import pytest

from offstage.stages.checkpoints.codecs import products


@pytest.fixture(autouse=True)
def no_loops(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing compiled there, unless a test asks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setattr(products, "_products", {})
