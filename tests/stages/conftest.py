"""What tests of several stages ask for."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a user who has the loops compiled; skips where there is no compiler."""
    from offstage.stages.checkpoints.codecs import loops

    folder = tmp_path_factory.mktemp("compiled")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        loops.build()
        if loops.loops() is None:
            pytest.skip("needs a C compiler")
    return folder
