"""Code is compiled once, kept where nobody else may write, and done without where it can't be had."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from stages.machine import compiled_code

SOURCE = "int answer(void) { return 42; }\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source in C, of a user whose cache is empty; skips where there is no compiler."""
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("needs a C compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "answer.c"
    path.write_text(SOURCE)
    return path


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "cache").rglob("*.so"))


def test_a_source_is_compiled_once_and_found_ever_after(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert compiled_code.load(source) is None, "nothing is compiled where it is used"
    compiled_code.build(source)
    library = compiled_code.load(source)
    assert library is not None
    assert library.answer() == 42
    monkeypatch.setenv("CC", "/nowhere/cc")
    compiled_code.build(source)
    assert compiled_code.load(source) is library
    assert len(list((source.parent / "cache").rglob("*.*"))) == 1, "nothing is left beside it"


def test_another_source_of_that_name_is_other_code(source: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / source.name
    other.parent.mkdir()
    other.write_text(SOURCE.replace("42", "43"))
    for path in (source, other):
        compiled_code.build(path)
    library = compiled_code.load(other)
    assert library is not None
    assert library.answer() == 43
    assert len(kept(tmp_path)) == 2


@pytest.mark.parametrize("compiler", ["false", "/nowhere/cc", "cc --no-such-option", "true"])
def test_where_the_compiler_fails_nothing_is_kept(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, compiler: str
) -> None:
    monkeypatch.setenv("CC", compiler)
    compiled_code.build(source)
    assert compiled_code.load(source) is None
    assert kept(tmp_path) == []
    assert list((tmp_path / "cache").rglob("*.*")) == []


def test_code_that_others_may_write_to_is_never_run(source: Path, tmp_path: Path) -> None:
    compiled_code.build(source)
    (path,) = kept(tmp_path)
    for place, mode in ((path, 0o702), (path.parent, 0o770), (path, 0o720)):
        before = place.stat().st_mode
        place.chmod(mode)
        assert compiled_code.load(source) is None
        place.chmod(before)
    aside = path.rename(tmp_path / "aside")
    path.symlink_to(aside)
    assert compiled_code.load(source) is None


def test_a_file_that_is_no_code_is_done_without(source: Path, tmp_path: Path) -> None:
    compiled_code.build(source)
    (path,) = kept(tmp_path)
    path.write_bytes(b"no code")
    assert compiled_code.load(source) is None


def test_a_cache_that_cannot_be_written_is_done_without(source: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file lies where a folder must be")
    compiled_code.build(source)
    assert compiled_code.load(source) is None
