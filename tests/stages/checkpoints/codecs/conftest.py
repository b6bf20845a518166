"""Codecs are held against the libraries' own by their operators; the compiled loops are held against the operators."""

from __future__ import annotations

from pathlib import Path

import pytest

from stages.checkpoints.codecs import loops


@pytest.fixture(autouse=True)
def no_loops(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have nothing compiled there, unless a test asks for it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a user who has the loops compiled; skips where there is no compiler."""
    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        loops.build()
        if loops.loops() is None:
            pytest.skip("needs a C compiler")
    return folder
