"""A user's cache of these tests' own, in which this machine is measured once, and rehearsals that are made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.rehearsals import rehearsing_once


@pytest.fixture(scope="session")
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True, scope="module")
def _finds_out_once(user_cache: Path) -> Iterator[None]:
    with rehearsing_once(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(user_cache))
        yield
