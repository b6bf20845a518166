"""A user's cache of these tests' own, which knows this machine, and rehearsals that are made once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.known_machine import copy_known
from tests.rehearsals import rehearsing_once


@pytest.fixture(scope="session")
def user_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("cache")
    copy_known(home)
    return home


@pytest.fixture(autouse=True, scope="module")
def _finds_out_once(user_cache: Path) -> Iterator[None]:
    with rehearsing_once(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(user_cache))
        yield
