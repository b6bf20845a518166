"""What the tests of the store write, and how they look at it."""

from __future__ import annotations

from pathlib import Path

from offstage.pipeline.cache.store import Store

KEY = "0123456789abcdef" * 4
CONTENT = {"answer.json": b'{"answer": 42}', "shards/0.bin": b"x" * 5000}


def write(folder: Path) -> str:
    for name, content in CONTENT.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
    return "live half"


def never(folder: Path) -> str:
    raise AssertionError("built again")


def names(folder: Path) -> list[str]:
    """Everything in ``folder`` but lock files."""
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def assert_right(root: Path, key: str = KEY) -> None:
    artifact = Store(root).find("plan", key)
    assert artifact is not None
    assert {name: artifact.path(name).read_bytes() for name in artifact.files} == CONTENT
