"""A cache's folder, and a file system without locks."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
from filelock import FileLock

from offstage.pipeline.cache import locks


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "outputs" / "cache"


@pytest.fixture
def no_locks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system that has no locks."""

    class Refusing(FileLock):
        def acquire(self, *arguments: object, **options: object) -> object:
            raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(locks, "FileLock", Refusing)
