"""What tests of several stages ask for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.known_machine import copy_known
from tests.rehearsals import keeping_operators


@pytest.fixture(autouse=True, scope="session")
def _keeps_operators() -> Iterator[None]:
    """Have the rehearsals of these folders share what torch found of operators, whether they are made once or anew."""
    with keeping_operators():
        yield


@pytest.fixture(scope="session")
def compiled_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of a user who has the loops compiled; skips where there is no compiler."""
    from offstage.stages.checkpoints.codecs import loops

    folder = tmp_path_factory.mktemp("compiled")
    copy_known(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        loops.build()
        if loops.loops() is None:
            pytest.skip("needs a C compiler")
    return folder
